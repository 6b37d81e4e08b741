"""Faults of a running server: no stream is lost and every token is that of the undisturbed run.

The names carry the numbers of the list of faults. What is compared was answered by the same server
before the fault. Each guard was switched off once; how, is said at each test.
"""

import asyncio
import contextlib
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.requests64 import picture, png
from support.servers import TestServer, serving
from support.streams import body, equal, on_and_on, streamed, whole
from triptych.engines.torch import tiny
from triptych.runtime import descriptors
from triptych.runtime.ports import free_port

STREAMS, TOKENS = 50, 80
FAKE = ["--engine=fake", "--enable-multimodal"]
SLOW = ["--fake-encode-ms=150", "--fake-ttft-ms=150", "--fake-step-ms=20"]
NO_CACHE = ["--cache-embeddings=0", "--cache-decoded=0"]  # every request encodes and prefills


@pytest.fixture(scope="module")
def server():
    with serving(*FAKE, *SLOW, *NO_CACHE, "--pattern=E*2/P*2/D*2") as server:
        yield server


@pytest.fixture(scope="module")
def wanted(server):
    """What undisturbed streams answer."""
    ids = whole(streamed(server, bodies(server)), TOKENS)
    assert len({tuple(one) for one in ids}) == STREAMS
    return ids


def bodies(server, count=STREAMS, tokens=TOKENS):
    return [body(server, i, tokens) for i in range(count)]


def at_work(server, worker):
    server.wait(lambda: server.cluster()[worker]["running"] > 0, what=f"{worker} is at work")


def back(server, worker, pid):
    server.wait(
        lambda: server.complete() and server.cluster()[worker]["pid"] != pid,
        what=f"{worker} is back",
    )


def idle(server):
    def nothing_held():
        return server.complete() and all(
            w["kv_blocks_free"] == w["kv_blocks_total"]
            and not w["tickets"] + w["segments"] + w["running"] + w["queued"]
            for w in server.cluster().values()
        )

    server.wait(nothing_held, what="every block, ticket and segment is back")


def kill_at_work(server, worker):
    at_work(server, worker)
    return server.kill(worker)


def test_f1_a_decode_worker_killed_under_fifty_streams(server, wanted):
    """Guard: the walk that is taken again. `return False` in Pipeline._arrives made `raise`, all
    streams of D-0 end with worker_lost."""
    pids = []
    streams = streamed(server, bodies(server), lambda: pids.append(kill_at_work(server, "D-0")))
    equal(streams, wanted)
    back(server, "D-0", *pids)
    idle(server)


@pytest.mark.parametrize(("worker", "number"), [("P-0", 2), ("E-0", 3)])
def test_f2_f3_a_prefill_worker_or_encoder_killed_in_mid_work(server, wanted, worker, number):
    """Guard: as of F1."""
    pids = []
    strike = lambda: pids.append(kill_at_work(server, worker))  # noqa: E731
    streams = streamed(server, bodies(server), strike, begun=False)
    equal(streams, wanted)
    back(server, worker, *pids)
    idle(server)


def test_f4_killed_again_and_again_while_tensors_move(server, wanted):
    """Prefill workers and encoders die while others read what they handed over; short streams, so
    that there is always one who reads. Guard: as of F1. What a reader may get of a dead owner's
    memory, tests/contract/test_transfer.py shows."""

    def strike():
        for worker in ("P-0", "E-1", "P-1", "E-0"):
            pid = kill_at_work(server, worker)
            back(server, worker, pid)

    short = [asked | {"max_tokens": 6} for asked in bodies(server)]
    for number, streams in enumerate(asyncio.run(on_and_on(server, short, strike))):
        equal(streams, [wanted[number][:6]] * len(streams))
    idle(server)


@pytest.mark.parametrize(("worker", "begun"), [("D-1", True), ("P-1", False)])
def test_f5_f6_a_worker_that_stands_still_past_its_lease(server, wanted, worker, begun):
    """It is noticed, its streams go on elsewhere, and when it wakes it serves no more: its epoch is
    over. Guards: beats of the request plane and leases in discovery (with Link._beat that drops
    nobody and Membership._watch that drops nobody streams hang; either one alone is enough), and
    Lease._try's look at the clock (without it the same process is back)."""
    pids = []

    def stop():
        at_work(server, worker)
        pids.append(server.kill(worker, signal.SIGSTOP))

    try:
        streams = streamed(server, bodies(server), stop, begun=begun)
        gone = lambda: worker not in server.cluster()  # noqa: E731
        server.wait(gone, what="its lease is over")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    equal(streams, wanted)
    back(server, worker, *pids)  # another process: the old one was fenced, and has ended
    server.wait(lambda: not psutil.pid_exists(pids[0]), what="the fenced one has ended")
    idle(server)


def test_f7_the_last_worker_dies():
    """Guards: those of F5 (with both switched off the refusal never comes)."""
    with serving(*FAKE, "--pattern=EPD") as server:
        before = streamed(server, bodies(server, 4, 10))
        pid = server.kill("EPD-0", signal.SIGSTOP)  # it can't be back at once
        server.wait(lambda: "EPD-0" not in server.cluster(), what="it is missed")
        refused = streamed(server, bodies(server, 4, 10))
        assert {stream.error for stream in refused} == {"no_workers"}
        os.kill(pid, signal.SIGKILL)
        back(server, "EPD-0", pid)
        assert whole(streamed(server, bodies(server, 4, 10)), 10) == whole(before, 10)


def test_f10_the_frontend_is_killed(server, wanted):
    """Guard: _Caller.on_gone in runtime.server (its replies not closed, the streams run on)."""
    frontend = server.state()["frontend"]["pid"]

    def strike():
        at_work(server, "D-0")
        os.kill(frontend, signal.SIGKILL)

    with contextlib.suppress(BaseExceptionGroup):  # all connections break
        streamed(server, [body(server, i, 5000) for i in range(STREAMS)], strike)
    server.wait(server.live, what="another frontend")
    idle(server)
    assert server.state()["frontend"]["pid"] != frontend
    equal(streamed(server, bodies(server)), wanted)


def test_f11_a_thousand_clients_reset(server, wanted):
    """Guard: the frontend's connection_lost (its task not cancelled, blocks stay taken)."""
    descriptors.take_all()
    pids = [w["pid"] for w in server.cluster().values()] + [server.state()["frontend"]["pid"]]
    idle(server)
    asked = body(server, 1, 5000)
    request = post(server, asked)
    count = lambda: sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: E731
    time.sleep(0.5)
    before = count()
    clients = []
    for _ in range(1000):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(request)
        clients.append(client)
    server.wait(
        lambda: sum(w["running"] + w["queued"] for w in server.cluster().values()) > 100,
        what="they are at work",
    )
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    idle(server)
    server.wait(lambda: count() <= before, what="every descriptor is back")
    equal(streamed(server, bodies(server)), wanted)


def post(server, asked):
    data = json.dumps(asked).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Shot:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (Path(self.mark),))


def test_f17_garbage_at_every_port(server, wanted, tmp_path):
    """Guard: the limits of a hello (frames.MAX_HELLO) and the proof of the secret; the list of
    addresses fails when a worker listens on 0.0.0.0."""
    mark = tmp_path / "ran"
    tree = psutil.Process(server.process.pid).children(recursive=True)
    ports = [
        c.laddr
        for process in tree
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in ports} == {"127.0.0.1"}
    assert len(ports) >= 7  # six workers and the frontend
    pids = {worker: report["pid"] for worker, report in server.cluster().items()}
    rubbish = [
        os.urandom(4096),
        pickle.dumps(Shot(mark)),
        b"\0" * 65536,
        b"\xff\xff\xff\xff" + pickle.dumps(Shot(mark)),
        struct.pack("<I", 1 << 31) + b"x" * 100,
        b"\1",
    ]
    for address in ports:
        for data in rubbish:
            with (
                contextlib.suppress(ConnectionError),  # closed before it was all sent
                socket.create_connection(address, timeout=60) as sent,
            ):
                sent.sendall(data)
                sent.shutdown(socket.SHUT_WR)
                assert not sent.recv(1) or address.port == server.port  # closed without a word
    assert not mark.exists()
    assert {worker: report["pid"] for worker, report in server.cluster().items()} == pids
    equal(streamed(server, bodies(server)), wanted)


def _unshares():
    """Whether a mount namespace can be had: some containers refuse it."""
    argv = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return not subprocess.run(argv, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _unshares(), reason="no mount namespace can be made here")
def test_f18_dev_shm_is_full(wanted, server, tmp_path):
    """In a mount namespace with a /dev/shm of one page, which is taken. Segments have no name
    in any file system. Where there is no memory at all, the contract of transfer has the 503."""
    port = free_port("127.0.0.1", 0)
    serve = [sys.executable, "-m", "triptych", "serve", *FAKE, "--pattern=E/P/D", f"--port={port}"]
    script = (
        "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && "
        'exec "$@"'
    )
    argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *serve]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(argv, stderr=log)
    full = TestServer(process, port, str(tmp_path / "log"))
    try:
        full.wait(full.complete, 60, "it serves")
        equal(streamed(full, bodies(full)), wanted)
        assert {w["segments"] for w in full.cluster().values()} == {0}
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_f1_with_a_model_pictures_and_seeds():
    """The torch engine: half of the streams are sampled, all go on equal on another worker."""
    flags = ["--pattern=E/P/D*2", "--enable-multimodal"]
    with serving(str(tiny.ensure("qwen2_5_vl")), *flags) as server:
        asked = [
            body(server, i, 60, png(picture(random.Random(i))), temperature=float(i % 2))
            for i in range(12)
        ]
        wanted = whole(streamed(server, asked), 60)
        assert len({tuple(ids) for ids in wanted}) == 12
        pids = []
        streams = streamed(server, asked, lambda: pids.append(kill_at_work(server, "D-0")))
        equal(streams, wanted)
        back(server, "D-0", *pids)
        idle(server)
