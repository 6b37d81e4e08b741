"""The client goes away: its work ends at once, and nothing of it stays.

The names carry the numbers of the list of faults.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import time

import aiohttp
import pytest

from support.promises import at_rest, soon, unharmed
from support.streams import body, equal, streamed
from triptych.messages import GetReport
from triptych.runtime import process
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.directory import WorkerFiles
from triptych.transfer.shm import IDLE_SECONDS

SECRET = "s" * 32  # the server's
PROMISED = 2.0  # seconds
KEPT = 1.25 * IDLE_SECONDS  # that memory which is lent no more stays at hand, with its descriptor


async def _reports(run_dir):
    reports = []
    for record in WorkerFiles(run_dir, SECRET).view().values():
        connection = await WorkerConnection.open(record.address, SECRET, record.id, record.epoch)
        await connection.call(GetReport(), reports.append).done()
        await connection.close()
    return reports


def all_idle(run_dir):
    """Whether the workers themselves say so: it takes no frontend."""
    reports = asyncio.run(_reports(run_dir))
    assert len(reports) == 6
    return not any(
        w.running + w.queued + w.tickets + w.segments + w.kv_blocks_total - w.kv_blocks_free
        for w in reports
    )


def test_f10_the_frontend_is_killed(server, bodies, wanted, run_dir):
    """Guard: _Caller.on_closed in runtime.server (its replies not closed, the streams run on)."""
    frontend = server.state()["frontend"]["pid"]
    idle, killed = lambda: all_idle(run_dir), []

    def strike():
        server.wait(lambda: server.cluster()["D-0"]["running"] > 0, what="D-0 is at work")
        assert not idle()
        os.kill(frontend, signal.SIGKILL)
        killed.append(time.monotonic())

    with unharmed(server, "frontend"):
        with pytest.raises(BaseExceptionGroup) as broken:  # all connections break, nothing else
            streamed(server, [asked | {"max_tokens": 5000} for asked in bodies], strike)
        assert broken.value.split((OSError, aiohttp.ClientError))[1] is None
        soon(server, idle, PROMISED, "F10: workers gave up what it had asked for", *killed)
        server.wait(server.live, what="another frontend")
    equal(streamed(server, bodies), wanted)


def test_f11_a_thousand_clients_reset(server, bodies, wanted):
    """Guard: the frontend's connection_lost (its task not cancelled, blocks stay in use)."""
    process.raise_descriptor_limit()
    request = post(body(server, 1, 5000))
    come_and_go(server, request)  # so that it has the size of a server with a thousand clients
    with unharmed(server):
        pids = server.pids()
        before = settled(lambda: open_at(pids)), settled(lambda: open_at(pids, "frontend"))
        come_and_go(server, request)
        since = time.monotonic()
        soon(server, lambda: at_rest(server), PROMISED, "F11: blocks and segments are back", since)
        back = lambda *whose: lambda: open_at(pids, *whose) <= before[len(whose)]  # noqa: E731
        soon(server, back("frontend"), PROMISED, "F11: the frontend's descriptors are back", since)
        soon(server, back(), PROMISED + KEPT, "F11: all descriptors are back", since)
    equal(streamed(server, bodies), wanted)


def come_and_go(server, request):
    """A thousand clients ask for long streams, and reset their connections amid these."""
    with contextlib.ExitStack() as scope:
        for _ in range(1000):
            client = socket.create_connection(("127.0.0.1", server.port))
            scope.callback(reset, client)
            client.sendall(request)
        server.wait(
            lambda: sum(w["running"] + w["queued"] for w in server.cluster().values()) > 100,
            what="they are at work",
        )


def open_at(pids, *whose):
    """Descriptors of these processes, or of all."""
    return sum(len(os.listdir(f"/proc/{pids[name]}/fd")) for name in whose or pids)


def settled(count):
    """What is counted, once it stays the same for a while."""
    end = time.monotonic() + 30
    last, since = count(), time.monotonic()
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < end, "it does not come to rest"
        if (now := count()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    return last


def reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def post(asked):
    data = json.dumps(asked).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
