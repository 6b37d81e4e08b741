"""What a streamed token costs on each request plane: tcp, http and nats in one run, each with the
tags of its frames and without them, and with TLS.

A worker's process streams tokens over one connection to this one, at a pace that every plane can
keep, one step of all streams at a time as engines do. The processor time of both processes (and of
the NATS server) is divided by the tokens that arrived; what the same worker spends without a
connection to a caller is not taken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.record import Figure
from triptych.config import Config
from triptych.host import free_port
from triptych.messages import Delta, Job, Sampling, Work, WorkerAnswer, WorkerRequest
from triptych.runtime.authentication import ConnectionKeys
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.link import Link
from triptych.runtime.nats import connect
from triptych.runtime.planes import Planes, WorkerTls
from triptych.runtime.server import CallServer, Reply

PLAIN, TAGS, TLS = "without tags", "", "with TLS"
WAYS = (
    *((plane, way) for plane in ("tcp", "http", "nats") for way in (PLAIN, TAGS)),
    ("tcp", TLS),
    ("http", TLS),
)
STREAMS = (64, 1000)
STEP_SECONDS = {64: 0.01, 1000: 0.05}
SECRET = "of the benchmark"


def run(quick: bool) -> tuple[list[Figure], Any]:
    steps = 50 if quick else 300
    rounds = 1 if quick else 3
    with _nats() as (url, server):
        found = [
            uvloop.run(_measure(plane, way, streams, steps, url, server))
            for _ in range(rounds)  # in turn, so that a slow minute hits all planes
            for streams in STREAMS
            for plane, way in WAYS
        ]
    best = {
        (plane, way, streams): min(
            (f for f in found if (f["plane"], f["way"], f["streams"]) == (plane, way, streams)),
            key=lambda f: float(f["cpu_us"]),
        )
        for streams in STREAMS
        for plane, way in WAYS
    }
    return [_figure(one) for one in best.values()], found


def _figure(one: dict[str, Any]) -> Figure:
    detail = (
        f"worker {one['worker_us']:.2f}, caller {one['caller_us']:.2f}"
        + (f", NATS server {one['nats_us']:.2f}" if one["nats_us"] else "")
        + f"; the last token of a step arrives after {one['step_ms']:.2f} ms (median)"
    )
    name = f"{one['plane']} {one['way']}".strip()
    what = f"{name}: CPU time of a token, {one['streams']} streams"
    return Figure(what, one["cpu_us"], "us", detail=detail)


async def _measure(
    plane: str, way: str, streams: int, steps: int, url: str, server: int
) -> dict[str, Any]:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.planes", plane, way, str(streams), str(steps), url,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    async with _planes(plane, way, url) as planes:
        address = (await worker.stdout.readline()).decode().strip()
        connection = await WorkerConnection.open(address, SECRET, "PD-0", 1, planes=planes)
        late: list[float] = []
        tokens = 0

        def hear(answer: WorkerAnswer) -> None:
            nonlocal tokens
            tokens += 1
            if isinstance(answer, Delta) and answer.timings:  # of the last stream in each step
                late.append(time.monotonic() - answer.timings["sent"])

        work = Job(Work("r", (1,), (), Sampling(seed=1)))
        processes = os.getpid(), worker.pid, server
        before = [_seconds(pid) for pid in processes]
        calls = [connection.call(work, hear) for _ in range(streams)]
        await asyncio.gather(*(call.done() for call in calls))
        spent = [_seconds(pid) - then for pid, then in zip(processes, before, strict=True)]
        await connection.close()
    worker.terminate()
    await worker.wait()
    assert tokens == streams * steps
    mine, its, nats = (1e6 * seconds / tokens for seconds in spent)
    return {
        "plane": plane,
        "way": way,
        "streams": streams,
        "tokens": tokens,
        "cpu_us": mine + its + (nats if plane == "nats" else 0.0),
        "caller_us": mine,
        "worker_us": its,
        "nats_us": nats if plane == "nats" else 0.0,
        "step_ms": 1e3 * sorted(late)[len(late) // 2],
    }


def _seconds(pid: int) -> float:
    """Processor time of all threads of a process, finer than the ticks of its times."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def _serve(plane: str, way: str, streams: int, steps: int, url: str) -> None:
    """The worker's process: all streams step together."""
    replies: list[Reply] = []
    full, done = asyncio.Event(), asyncio.Event()

    async def answer(ask: WorkerRequest, reply: Reply) -> None:
        replies.append(reply)
        if len(replies) == streams:
            full.set()
        await done.wait()

    async with _planes(plane, way, url) as planes:
        server = CallServer(answer, SECRET, "PD-0", 1)
        print(await server.start("127.0.0.1", 0, planes.named(plane)), flush=True)
        await full.wait()
        for step in range(steps):
            for reply in replies[:-1]:
                reply.send(Delta((1000 + step,)))
            replies[-1].send(Delta((1000 + step,), timings={"sent": time.monotonic()}))
            await asyncio.sleep(STEP_SECONDS[streams])
        done.set()
        await asyncio.sleep(600)


@contextlib.asynccontextmanager
async def _planes(plane: str, way: str, url: str) -> AsyncIterator[Planes]:
    with _without_tags() if way == PLAIN else contextlib.nullcontext():
        if plane != "nats":
            yield Planes(tls=WorkerTls() if way == TLS else None)
            return
        client = await connect(Config(join=url), "benchmark")
        try:
            yield Planes(client)
        finally:
            await client.close()


@contextlib.contextmanager
def _without_tags() -> Iterator[None]:
    """Frames as they were before they had tags, for comparison."""
    tagged = Link.authenticate

    def untagged(link: Link, keys: ConnectionKeys) -> None:
        tagged(link, keys)
        link._mac = link._inbox.mac = None

    Link.authenticate = untagged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Link.authenticate = tagged  # type: ignore[method-assign]


@contextlib.contextmanager
def _nats() -> Iterator[tuple[str, int]]:
    port = free_port("127.0.0.1", 0)
    program = Path(sys.executable).with_name("nats-server")
    with tempfile.TemporaryFile() as log:
        words = [str(program), "-a", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield f"nats://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    name, how, count, length, where = sys.argv[1:]
    uvloop.run(_serve(name, how, int(count), int(length), where))
