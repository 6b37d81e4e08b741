"""Ways of ending that wait for somebody else: each has its bound. Proved by leaving each out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from triptych.commands import launch_ray, temporary_server
from triptych.config import Config
from triptych.messages import WorkerRecord
from triptych.observe.log import RateLimitedLog
from triptych.runtime import link, nats, nats_discovery, supervisor
from triptych.runtime.authentication import Buffer
from triptych.runtime.frames import FrameKind
from triptych.runtime.supervisor import SupervisedProcess, Supervisor

SECONDS = 20  # within which what is bounded by less must have ended, on any machine


class Deaf(asyncio.Transport):
    """To a peer that reads no more: what was written never leaves."""

    def __init__(self, one: link.Link) -> None:
        super().__init__()
        self._link = one
        self.aborted = self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.aborted = True
        self._link.connection_lost(None)


class Ended(link.Link):
    def on_frame(self, kind: int, body: Buffer) -> None: ...

    def on_closed(self, reason: str) -> None: ...


async def test_a_connection_whose_peer_reads_no_more_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(link, "HELLO_SECONDS", 600.0)  # nor does it fall silent
    one = Ended(FrameKind.CONTROL, RateLimitedLog(logging.getLogger(__name__)))
    transport = Deaf(one)
    one.connection_made(transport)
    async with asyncio.timeout(SECONDS):
        await one.close_gracefully("a test")
    assert transport.aborted


async def test_a_nats_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        _reconnection_task = None

        async def close(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(nats, "CLOSE_SECONDS", 0.05)
    async with asyncio.timeout(SECONDS):
        await nats.close(cast(Any, Client()))


async def test_a_lease_on_a_nats_that_does_not_answer_is_left() -> None:
    class Bucket:
        timeout = 0.05

        async def swap(self, *_: object) -> None:
            await asyncio.Event().wait()

    place = nats_discovery._BucketRegistration(cast(Any, Bucket()))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(TimeoutError):
            await place.remove(WorkerRecord("P-0", "P", 1, "127.0.0.1:9", 42, "model"))


# It leaves a process behind, out of reach, that holds its stderr.
LEAVING = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
print("child", child.pid, file=sys.stderr, flush=True)
"""


async def test_a_childs_last_lines_are_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else may hold the other end of the pipe."""
    monkeypatch.setattr(supervisor, "RELAY_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.01)
    said: list[str] = []
    boss = Supervisor([SupervisedProcess("a", [sys.executable, "-c", LEAVING])], say=said.append)
    boss.ready()
    running = asyncio.create_task(boss.run())
    try:
        async with asyncio.timeout(SECONDS):
            while not any("restarting in" in line for line in said):
                await asyncio.sleep(0.01)
            boss.stop()
            await running
    finally:
        for pid in [int(line.split()[-1]) for line in said if "child" in line]:
            os.kill(pid, signal.SIGKILL)


def test_a_server_of_our_own_that_does_not_stop_is_killed() -> None:
    class Process:
        killed = False

        def send_signal(self, number: int) -> None: ...

        def wait(self, timeout: float | None = None) -> int:
            if not self.killed:
                assert timeout, "it waits for ever"
                raise subprocess.TimeoutExpired("serve", timeout)
            return -9

        def kill(self) -> None:
            self.killed = True

    process = Process()
    temporary_server._stop(cast(Any, process))
    assert process.killed


async def test_workers_on_ray_that_do_not_end_are_not_waited_for_longer() -> None:
    """Neither in time nor when they are killed: Ray may not answer."""

    class Actor:
        called = 0

        def remote(self, *_: object) -> Actor:
            self.called += 1
            return self

        def future(self) -> Future[launch_ray.Exit]:
            return Future()

        run = property(lambda self: self)
        stop = property(lambda self: self)

    ray, actor = SimpleNamespace(kill=lambda _: None), Actor()
    ray.exceptions = SimpleNamespace(RayError=OSError)
    worker = SupervisedProcess("E-0", elsewhere=launch_ray.RayActor(ray, actor))
    boss = Supervisor([worker], stop_seconds=0.05)
    running = asyncio.create_task(boss.run())
    async with asyncio.timeout(SECONDS):
        while not actor.called:
            await asyncio.sleep(0.01)
        boss.stop()
        assert await running == 0
    assert actor.called == 2  # run and stop


def test_the_last_lines_of_a_worker_on_ray_are_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    going_on = threading.Event()
    ended: list[launch_ray.Exit] = []

    def spawn(*_: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", ""]
        return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, process_group=0)

    monkeypatch.setattr(launch_ray, "RELAY_SECONDS", 0.05)
    monkeypatch.setattr(launch_ray, "_relay", lambda *_: going_on.wait())
    monkeypatch.setattr(launch_ray.RayWorker, "_spawn", spawn)
    settings = msgspec.json.encode(Config(engine="fake"))
    run = launch_ray.RayWorker("E-0").run
    running = threading.Thread(target=lambda: ended.append(run(settings, {}, "E", 0)), daemon=True)
    running.start()
    running.join(SECONDS)
    going_on.set()
    assert ended == [(0, [])]
