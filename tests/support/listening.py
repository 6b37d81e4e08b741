"""Where processes take connections."""

import psutil


def listened_at(pids):
    """Addresses of these processes and of whatever they have started."""
    processes = [psutil.Process(pid) for pid in pids]
    below = [child for process in processes for child in process.children(recursive=True)]
    return {
        connection.laddr.ip
        for process in (*processes, *below)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
