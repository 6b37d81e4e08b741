"""The request plane nats when NATS is restarted, and when one side is gone without a word."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from nats.aio.client import Client

from support.nats_server import NatsServer, nats_server
from triptych.config import Config
from triptych.errors import WorkerLost
from triptych.messages import Delta, Job, MediaItem, Sampling, Work, WorkerAnswer, WorkerRequest
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.nats import connect
from triptych.runtime.planes import Planes, stream
from triptych.runtime.server import CallServer, Reply

SECRET = "a cluster's secret"


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@contextlib.asynccontextmanager
async def joined(nats: NatsServer) -> AsyncIterator[tuple[Client, Planes]]:
    client = await connect(Config(join=nats.url), "tests")
    try:
        yield client, Planes(client, "tests")
    finally:
        await client.close()


def job(number: int, data: bytes = b"") -> Job:
    media = (MediaItem("image", 0, data),) if data else ()
    return Job(Work(f"r{number}", (number,), media, Sampling(seed=1)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nats_restarted_under_load_fails_no_call_and_loses_no_token(
    nats: NatsServer,
) -> None:
    """Without ``Stream._send_again`` nothing goes on after the break; without "away" in
    ``Link._heartbeat`` the long one fails all calls."""
    broken = asyncio.Event()

    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        token = 0
        while not broken.is_set():
            reply.send(Delta((ask.work.prompt[0], token)))
            token += 1
            await asyncio.sleep(0.002)
        reply.send(Delta((ask.work.prompt[0], token), "stop"))

    async with joined(nats) as (_, here), joined(nats) as (_, there):
        server = CallServer(stream, SECRET, "PD-0", 7, silence=2.0)
        address = await server.start("", 0, there.named("nats"))
        connection = await WorkerConnection.open(
            address, SECRET, "PD-0", 7, planes=here, silence=2.0
        )
        got: list[list[WorkerAnswer]] = [[] for _ in range(100)]
        calls = [connection.call(job(i), got[i].append) for i in range(50)]
        await until(lambda: all(len(answers) > 20 for answers in got[:50]))
        for pause in (0.0, 4.0):  # both silences long
            nats.stop()
            # Calls are asked meanwhile too.
            calls += [
                connection.call(job(i), got[i].append) for i in range(len(calls), len(calls) + 25)
            ]
            await asyncio.sleep(pause)
            await asyncio.to_thread(nats.start)
            seen = [len(answers) for answers in got[: len(calls)]]
            await until(lambda: all(len(a) > n for a, n in zip(got, seen, strict=False)))  # noqa: B023
        broken.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*(call.done() for call in calls))
        await connection.close()
        await server.close()
    for number, answers in enumerate(got):
        ids = [token for answer in answers if isinstance(answer, Delta) for token in answer.ids]
        assert ids == [x for token in range(len(ids) // 2) for x in (number, token)]
        assert isinstance(answers[-1], Delta)
        assert answers[-1].finish == "stop"


async def test_while_nats_stays_away_a_call_fails_soon_and_says_so(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls do not even wait. Proved with ``stream.AWAY_TICKS`` never over."""
    monkeypatch.setattr(stream, "AWAY_TICKS", 4)

    async def hold(ask: WorkerRequest, reply: Reply) -> None:
        await reply.wait_until_closed()

    async with joined(nats) as (_, here), joined(nats) as (_, there):
        server = CallServer(hold, SECRET, "PD-0", 7)
        address = await server.start("", 0, there.named("nats"))
        connection = await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=here)
        call = connection.call(job(1), print)
        assert not here.away
        nats.stop()
        async with asyncio.timeout(30):
            with pytest.raises(WorkerLost, match="NATS is away"):
                await call.done()
        assert here.away
        with pytest.raises(WorkerLost, match="NATS is away"):
            await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=here)
        await until(lambda: not server.callers)  # what it did for them is over too
        await asyncio.to_thread(nats.start)
        await until(lambda: not (here.away or there.away))
        again = await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=here)
        await again.close()
        await server.close()


async def test_large_media_arrive_whole_over_a_restart(nats: NatsServer) -> None:
    blob = os.urandom(1 << 20) * 24
    came: list[bool] = []

    async def take(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        came.append(bytes(ask.work.media[0].data) == blob)

    async with joined(nats) as (_, here), joined(nats) as (_, there):
        server = CallServer(take, SECRET, "PD-0", 7)
        address = await server.start("", 0, there.named("nats"))
        connection = await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=here)
        call = connection.call(job(1, blob), print)
        await asyncio.sleep(0.01)  # some of it is on its way
        nats.stop()
        assert not came
        await asyncio.to_thread(nats.start)
        async with asyncio.timeout(60):
            await call.done()
        await connection.close()
        await server.close()
    assert came == [True]


WORKER = f"""
import asyncio, sys
from triptych.config import Config
from triptych.messages import Delta
from triptych.runtime.nats import connect
from triptych.runtime.planes import Planes
from triptych.runtime.server import CallServer

async def main():
    async def handler(ask, reply):
        reply.send(Delta((1,)))
        await reply.wait_until_closed()
    client = await connect(Config(join=sys.argv[1]), "worker")
    server = CallServer(handler, {SECRET!r}, "PD-0", 7)
    print(await server.start("", 0, Planes(client, "tests").named("nats")), flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_a_killed_worker_is_noticed_before_it_is_silent_for_long(nats: NatsServer) -> None:
    """It would take the silence of a minute without ``ReliableStream._absent``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, nats.url, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with joined(nats) as (_, here):
            connection = await WorkerConnection.open(
                address, SECRET, "PD-0", 7, planes=here, silence=60.0
            )
            got: list[WorkerAnswer] = []
            call = connection.call(job(1), got.append)
            await until(lambda: bool(got))
            process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(20):
                with pytest.raises(WorkerLost):
                    await call.done()
            with pytest.raises(WorkerLost, match="no worker receives"):
                await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=here)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_caller_without_nats_says_what_is_missing() -> None:
    with pytest.raises(WorkerLost, match="--join"):
        await WorkerConnection.open("nats://triptych.a.requests.b.c.7", SECRET, "PD-0", 7)


async def test_the_namespaces_of_one_nats_see_nothing_of_each_other(nats: NatsServer) -> None:
    async def nothing(ask: WorkerRequest, reply: Reply) -> None: ...

    async with joined(nats) as (client, mine):
        servers = [CallServer(nothing, SECRET, "PD-0", 7) for _ in range(2)]
        addresses = [
            await server.start("", 0, Planes(client, space).named("nats"))
            for server, space in zip(servers, ("red", "blue"), strict=True)
        ]
        assert addresses[0] != addresses[1]
        connection = await WorkerConnection.open(addresses[0], SECRET, "PD-0", 7, planes=mine)
        assert [len(server.callers) for server in servers] == [1, 0]
        await connection.close()
        for server in servers:
            await server.close()
