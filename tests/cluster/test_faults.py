"""Faults of a running server: no stream is lost and every token is that of the undisturbed run.

The names carry the numbers of the list of faults, and what it promises is held by ``promises``.
What is compared was answered by the same server before the fault; every stream is sampled with a
seed of its own and has a picture. Each guard was switched off once; how, is said at each test.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tools import tiny

from support.promises import LONG, soon, unharmed, within
from support.requests64 import picture, png
from support.servers import TestServer, serving
from support.streams import body, equal, on_and_on, streamed, whole
from triptych.host import free_port
from triptych.runtime.lease import LEASE_SECONDS

FAKE = ["--engine=fake", "--enable-multimodal"]
GAP, NOTICED = 2.0, 5.0  # seconds that are promised
STILL_SECONDS = 30.0 if LONG else 2 * LEASE_SECONDS


def at_work(server, worker):
    server.wait(lambda: server.cluster()[worker]["running"] > 0, what=f"{worker} is at work")


def count(server, worker, what):
    """Of something that a worker counts, since it was started."""
    return server.cluster()[worker]["counters"][what]


def back(server, worker, pid):
    server.wait(
        lambda: server.complete() and server.cluster()[worker]["pid"] != pid,
        what=f"{worker} is back",
    )


def kill_at_work(server, worker):
    at_work(server, worker)
    return server.kill(worker)


def longest_gap(streams):
    return max(stream.gap for stream in streams)


def test_f1_a_decode_worker_killed_under_fifty_streams(server, bodies, wanted):
    """In the midst of its streams. Guard: the migration. `return False` in
    Pipeline._arrives made `raise`, all streams of D-0 end with worker_lost."""
    pids = []
    made = count(server, "D-0", "generated_tokens")

    def strike():
        server.wait(
            lambda: count(server, "D-0", "generated_tokens") - made > 750, what="D-0 is far on"
        )
        pids.append(server.kill("D-0"))

    with unharmed(server, "D-0"):
        streams = streamed(server, bodies, strike)
        equal(streams, wanted)
        within(GAP, longest_gap(streams), "F1: longest gap of a stream")
        back(server, "D-0", *pids)


def test_f2_a_prefill_worker_killed_in_mid_work(server, bodies, wanted):
    """Guard: as of F1."""
    pids = []
    with unharmed(server, "P-0"):
        strike = lambda: pids.append(kill_at_work(server, "P-0"))  # noqa: E731
        equal(streamed(server, bodies, strike, begun=False), wanted)
        back(server, "P-0", *pids)


def test_f3_an_encoder_killed_in_mid_work(server, bodies, wanted):
    """What it had is encoded again, once. Guard: as of F1."""
    pids = []
    encoded = count(server, "E-1", "encoded_items")
    with unharmed(server, "E-0"):
        strike = lambda: pids.append(kill_at_work(server, "E-0"))  # noqa: E731
        equal(streamed(server, bodies, strike, begun=False), wanted)
        back(server, "E-0", *pids)
        again = count(server, "E-1", "encoded_items") - encoded
        again += count(server, "E-0", "encoded_items") - 1  # its canary
        assert again <= len(bodies)


def test_f4_killed_again_and_again_while_tensors_move(server, bodies, wanted):
    """Prefill workers and encoders die while others read what they handed over; short streams, so
    that there is always one who reads. Guard: as of F1. What a reader may get of a dead owner's
    memory, tests/contract/test_transfer.py shows."""
    workers = ("P-0", "E-1", "P-1", "E-0")

    def strike():
        for worker in workers:
            pid = kill_at_work(server, worker)
            back(server, worker, pid)

    short = [asked | {"max_tokens": 6} for asked in bodies]
    with unharmed(server, *workers):
        for number, streams in enumerate(asyncio.run(on_and_on(server, short, strike))):
            equal(streams, [wanted[number][:6]] * len(streams))


def stand_still(server, worker, bodies, **how):
    """The streams of these, amid which a worker stands still: past their end and its lease."""
    pids, since = [], []

    def stop():
        at_work(server, worker)
        pids.append(server.kill(worker, signal.SIGSTOP))
        since.append(time.monotonic())

    try:
        streams = streamed(server, bodies, stop, **how)
        time.sleep(max(0.0, since[0] + STILL_SECONDS - time.monotonic()))
        assert worker not in server.cluster()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    back(server, worker, *pids)  # another process: the old one was fenced, and has ended
    server.wait(lambda: not psutil.pid_exists(pids[0]), what="the fenced one has ended")
    return streams


def test_f5_a_decode_worker_stopped_past_its_lease(server, bodies, wanted):
    """It is noticed, its streams go on elsewhere, and when it wakes it serves no more: its epoch is
    over. Guards: heartbeats of the request plane and leases in discovery (with Link._heartbeat that
    drops no peer and Membership._watch that drops no worker, streams hang; either one is enough),
    and WorkerLease._try's look at the clock (without it the same process is back)."""
    with unharmed(server, "D-1"):
        streams = stand_still(server, "D-1", bodies)
        equal(streams, wanted)
        within(NOTICED + GAP, longest_gap(streams), "F5: noticed and taken up elsewhere")


def test_f6_a_prefill_worker_stopped_past_its_lease(server, bodies, wanted):
    """No worker reads what it handed over before. Guards: as of F5."""
    with unharmed(server, "P-1"):
        equal(stand_still(server, "P-1", bodies, begun=False), wanted)


def ask(server):
    return server.chat("Hello", max_tokens=1)


def test_f7_the_last_worker_dies():
    """Its supervisor stands still, so that it can't be back at once. Guard:
    WorkerConnection.on_closed (where it ends no call, streams hang; and new requests do, where it
    reports nothing)."""
    with serving(*FAKE, "--pattern=EPD", "--fake-step-ms=20") as server, unharmed(server, "EPD-0"):
        asked = [body(server, i, 100) for i in range(4)]
        wanted = whole(streamed(server, asked), 100)
        supervisor = psutil.Process(server.process.pid)

        def strike():
            supervisor.suspend()
            server.kill("EPD-0")
            refused = lambda: ask(server).status == 503  # noqa: E731
            soon(server, refused, 1.0, "F7: refused after the last worker died")

        try:
            for number, stream in enumerate(streamed(server, asked, strike)):
                assert stream.error == "no_workers"
                assert stream.ids == wanted[number][: len(stream.ids)]
            assert ask(server).json["error"]["code"] == "no_workers"
        finally:
            supervisor.resume()
        served = lambda: ask(server).status == 200  # noqa: E731
        soon(server, served, 5.0, "F7: served again after it may start")
        equal(streamed(server, asked), wanted)


def _unshares():
    """Whether a mount namespace can be had: some containers refuse it."""
    argv = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return not subprocess.run(argv, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def mounted(script, tmp_path, *flags):
    """A server in a mount namespace of its own, in which ``script`` was run."""
    port = free_port("127.0.0.1", 0)
    serve = [sys.executable, "-m", "triptych", "serve", *FAKE, f"--port={port}", *flags]
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*own, *serve], stderr=log)
    server = TestServer(process, port, str(tmp_path / "log"))
    try:
        server.wait(server.complete, 60, "it serves")
        yield server
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


@pytest.mark.skipif(not _unshares(), reason="no mount namespace can be made here")
def test_f18_dev_shm_is_full(wanted, bodies, tmp_path):
    """In a mount namespace with a /dev/shm of one page, which is in use. Segments have no name
    in any file system. Where there is no memory at all, the contract of transfer has the 503."""
    script = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    with mounted(script, tmp_path, "--pattern=E/P/D") as full, unharmed(full):
        equal(streamed(full, bodies), wanted)
        assert {w["transport"] for w in full.cluster().values()} == {"auto", "shm"}


@pytest.mark.skipif(not _unshares(), reason="no mount namespace can be made here")
def test_f25_the_disk_of_the_run_directory_is_full(wanted, bodies, tmp_path):
    """Streams run on and requests are served for two leases; then there is space. Guards: the
    reader's check for space and the life of connections, each shown by tests/unit. Without both, no
    worker is left after five seconds."""
    run = tmp_path / "run"
    run.mkdir()
    slow = f"--fake-step-ms={2.5 * LEASE_SECONDS * 1000 / len(wanted[0])}"
    script = f"mount -t tmpfs -o size=64k tmpfs {run}"
    with mounted(script, tmp_path, "--pattern=E/P/D", slow, f"--run-dir={run}") as server:
        ballast = f"/proc/{server.process.pid}/root{run}/ballast"

        def fill():
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
            end = time.monotonic() + 2 * LEASE_SECONDS
            while time.monotonic() < end:
                assert ask(server).status == 200
            assert server.state()["discovery"]["away"]

        with unharmed(server):
            equal(streamed(server, bodies[:20], fill), wanted[:20])
            os.unlink(ballast)
            server.wait(lambda: not server.state()["discovery"]["away"], what="there is room")


@pytest.fixture(scope="module")
def torch_server():
    flags = ["--pattern=E/P/D*2", "--enable-multimodal"]
    with serving(str(tiny.ensure_checkpoint("qwen2_5_vl")), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def torch_bodies(torch_server):
    """Half of them are sampled."""
    return [
        body(torch_server, i, 60, png(picture(random.Random(i))), temperature=float(i % 2))
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def torch_wanted(torch_server, torch_bodies):
    wanted = whole(streamed(torch_server, torch_bodies), 60)
    assert len({tuple(ids) for ids in wanted}) == 12
    return wanted


def test_f1_with_a_model(torch_server, torch_bodies, torch_wanted):
    """Guard: Work.generated in the torch engine's sequence (without it tokens differ)."""
    pids = []
    with unharmed(torch_server, "D-0"):
        strike = lambda: pids.append(kill_at_work(torch_server, "D-0"))  # noqa: E731
        streams = streamed(torch_server, torch_bodies, strike)
        equal(streams, torch_wanted)
        within(GAP, longest_gap(streams), "F1 with a model: longest gap of a stream")
        back(torch_server, "D-0", *pids)


def test_f5_with_a_model(torch_server, torch_bodies, torch_wanted):
    """Guards: as of F5."""
    with unharmed(torch_server, "D-1"):
        streams = stand_still(torch_server, "D-1", torch_bodies)
        equal(streams, torch_wanted)
        within(NOTICED + GAP, longest_gap(streams), "F5 with a model: noticed and taken up")
