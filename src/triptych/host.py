"""This host: its identity, clock and memory, whether a process on it runs, addresses and ports."""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import time
from pathlib import Path

from triptych.errors import InvalidConfig
from triptych.messages import WorkerRecord


@functools.cache
def host_id() -> str:
    """The host name, the boot id and the process namespace. Two processes have the same id exactly
    if a process number means the same process to both: containers are hosts of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()} {boot} {processes}"


def host_name(host: str) -> str:
    """The readable part of a ``host_id``."""
    return host.partition(" ")[0] or "another host"


def boot_time() -> float:
    """Seconds since boot, including suspended time: equal in all processes of a host, and not
    affected by changes of the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0: it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state in b"ZX" else int(fields[18])  # Z, X: dead, not yet reaped


def is_running(worker: WorkerRecord) -> bool:
    """Whether the process that registered this record runs on this host. A later process with the
    same pid does not count."""
    return worker.begun != 0 and process_start(worker.pid) == worker.begun


def is_loopback(address: str) -> bool:
    """Whether a host name or address reaches this host alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_port(host: str, port: int, flag: str = "--host") -> int:
    """The port to listen on; 0 finds a free one. Raises InvalidConfig if it cannot be bound."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise listen_error(error, host, port, flag) from None
        bound: int = probe.getsockname()[1]
        return bound


def listen_error(
    error: OSError | UnicodeError, host: str, port: int, flag: str = "--host"
) -> InvalidConfig:
    """Explains why the process cannot listen. ``flag`` is the option that named the host."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        why, hint = "the port is in use", "Choose another with --port (0: any free one)."
    elif code == errno.EACCES:
        why, hint = "the port is not allowed", "Choose one above 1023 with --port."
    elif code in (None, errno.EADDRNOTAVAIL) or isinstance(error, socket.gaierror):
        why, hint = "this machine has no such address", f"Give one of its own with {flag}."
    else:
        why, hint = str(error), f"See {flag} and --port."
    return InvalidConfig(f"cannot listen on {join_host_port(host, port)}: {why}. {hint}")


def join_host_port(host: str, port: int) -> str:
    """``127.0.0.1:8000`` or ``[::1]:8000``, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_host(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The first address of a host name."""
    [(_, _, _, _, found), *_] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return ipaddress.ip_address(found[0])
