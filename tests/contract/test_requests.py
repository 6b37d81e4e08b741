"""What every request plane does, on every event loop we run on."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from nats.aio.client import Client

from support.nats_server import nats_server
from support.relay import Attack, Relay, kind_of
from triptych.config import Config
from triptych.errors import (
    ContextLengthExceeded,
    Draining,
    EngineFailed,
    InvalidConfig,
    TriptychError,
    WorkerLost,
)
from triptych.messages import (
    Delta,
    GetReport,
    Handover,
    Job,
    MediaItem,
    MediaMeta,
    PromptInfo,
    Sampling,
    Ticket,
    TokenLogprob,
    Work,
    WorkerAnswer,
    WorkerRequest,
)
from triptych.runtime import frames
from triptych.runtime.authentication import TAG_BYTES
from triptych.runtime.connection import Call, WorkerConnection, limited
from triptych.runtime.frames import WINDOW, FrameKind
from triptych.runtime.nats import connect
from triptych.runtime.planes import Planes
from triptych.runtime.server import CallServer, Reply

SECRET = "a cluster's secret"


class Ground:
    """A plane to meet on."""

    def __init__(self, name: str, planes: Planes, client: Client | None = None) -> None:
        self.name = name
        self.planes = planes
        self.client = client  # of NATS, where the plane is that

    async def start(self, server: CallServer) -> str:
        return await server.start("127.0.0.1", 0, self.planes.named(self.name))

    async def open(
        self, address: str, secret: str, worker: str, epoch: int, silence: float = 4.0
    ) -> WorkerConnection:
        return await WorkerConnection.open(
            address, secret, worker, epoch, planes=self.planes, silence=silence
        )

    @contextlib.asynccontextmanager
    async def __call__(
        self, handler: Callable[[WorkerRequest, Reply], Awaitable[None]], silence: float = 4.0
    ) -> AsyncIterator[tuple[CallServer, WorkerConnection]]:
        server = CallServer(handler, SECRET, "PD-0", 7, silence=silence)
        address = await self.start(server)
        try:
            connection = await self.open(address, SECRET, "PD-0", 7, silence)
            try:
                yield server, connection
            finally:
                await connection.close()
        finally:
            await server.close()


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


@pytest.fixture(params=["tcp", "http", "nats"])
async def plane(request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    if request.param != "nats":
        yield Ground(request.param, Planes())
        return
    options = Config(join=request.getfixturevalue("nats_url"))
    client = await connect(options, "tests")
    yield Ground("nats", Planes(client, "tests"), client)
    await client.close()


def job(name: str = "r", *data: bytes, prompt: tuple[int, ...] = (1, 2)) -> Job:
    media = tuple(MediaItem("image", i, blob) for i, blob in enumerate(data))
    return Job(Work(name, prompt, media, Sampling(seed=1)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(answers: list[WorkerAnswer]) -> list[int]:
    return [token for answer in answers if isinstance(answer, Delta) for token in answer.ids]


async def test_a_call_streams_its_answers_in_order_and_ends(plane: Ground) -> None:
    async def count(ask: WorkerRequest, reply: Reply) -> None:
        for i in range(10):
            reply.send(Delta((i,)))
            await asyncio.sleep(0)
        reply.send(Delta((10,), "stop"))

    async with plane(count) as (_, connection):
        got: list[WorkerAnswer] = []
        await connection.call(job(), got.append).done()
    assert got == [*(Delta((i,)) for i in range(10)), Delta((10,), "stop")]


async def test_asks_and_answers_arrive_as_they_were_sent(plane: Ground) -> None:
    asked: list[WorkerRequest] = []
    ticket = Ticket("P-0", 3, "shm", 9, b"\x00\xffaddress", (), 12, 0, 4.5)
    handover = Handover(
        Delta((5,), None, (TokenLogprob(-0.5),), PromptInfo(9, 4, (1, 2)), {"prefill": 0.25}),
        (MediaMeta(b"k" * 32, 4, (1, 2, 2)),),
        ticket,
    )

    async def answer(ask: WorkerRequest, reply: Reply) -> None:
        asked.append(ask)
        reply.send(handover)

    async with plane(answer) as (_, connection):
        got: list[WorkerAnswer] = []
        sent = job("r", b"jpeg", b"", b"png", prompt=tuple(range(500)))
        sent = Job(sent.work, (0, 2), (), handover)
        await connection.call(sent, got.append).done()
        await connection.call(GetReport(), got.append).done()
    assert asked == [sent, GetReport()]
    assert got == [handover, handover]


async def test_many_calls_share_one_connection(plane: Ground) -> None:
    async def repeat(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        for _ in range(100):
            reply.send(Delta(ask.work.prompt))
            await asyncio.sleep(0)

    async with plane(repeat) as (_, connection):
        got: list[list[WorkerAnswer]] = [[] for _ in range(200)]
        calls = [connection.call(job(prompt=(i,)), got[i].append) for i in range(200)]
        await asyncio.gather(*(call.done() for call in calls))
    for i, answers in enumerate(got):
        assert tokens(answers) == [i] * 100


async def test_media_of_many_megabytes_arrive_whole(plane: Ground) -> None:
    async def measure(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        same = all(bytes(m.data) == blob for m, blob in zip(ask.work.media, blobs, strict=True))
        reply.send(Delta((int(same), *(len(item.data) for item in ask.work.media))))

    blobs = (bytes(range(256)) * (80 << 10), b"small", b"z" * (3 << 20))  # 20 MiB, 5 B, 3 MiB
    async with plane(measure) as (_, connection):
        got: list[WorkerAnswer] = []
        views = job("r", *(memoryview(blob) for blob in blobs))  # type: ignore[arg-type]
        calls = [connection.call(ask, got.append) for ask in (views, job("s", *blobs))]
        await asyncio.gather(*(call.done() for call in calls))
    assert tokens(got) == [1, *map(len, blobs)] * 2


async def test_large_answers_arrive_whole(plane: Ground) -> None:
    async def give(ask: WorkerRequest, reply: Reply) -> None:
        ticket = Ticket("P-0", 3, "inline", 9, b"k" * (5 << 20), (), 5 << 20, 0, 4.5)
        reply.send(Handover(Delta((1,)), (), ticket))

    async with plane(give) as (_, connection):
        got: list[WorkerAnswer] = []
        await connection.call(job(), got.append).done()
    assert isinstance(got[0], Handover)
    assert got[0].kv is not None
    assert got[0].kv.address == b"k" * (5 << 20)


async def test_an_error_travels_to_the_caller(plane: Ground) -> None:
    async def refuse(ask: WorkerRequest, reply: Reply) -> None:
        reply.send(Delta((1,)))
        raise ContextLengthExceeded.of(10, 5, 12)

    async with plane(refuse) as (_, connection):
        got: list[WorkerAnswer] = []
        call = connection.call(job(), got.append)
        with pytest.raises(ContextLengthExceeded, match="12") as caught:
            await call.done()
    assert got == [Delta((1,))]
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_a_bug_is_answered_without_its_details(
    plane: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(ask: WorkerRequest, reply: Reply) -> None:
        raise ZeroDivisionError("secret inner matters")

    async with plane(break_down) as (_, connection):
        with pytest.raises(EngineFailed) as caught:
            await connection.call(job(), print).done()
        with pytest.raises(EngineFailed):  # and the worker goes on
            await connection.call(job(), print).done()
    assert "inner" not in caught.value.message
    assert "secret inner matters" in caplog.text


async def test_work_that_is_cancelled_by_the_worker_itself_is_answered_too(plane: Ground) -> None:
    async def give_up(ask: WorkerRequest, reply: Reply) -> None:
        raise asyncio.CancelledError

    async with plane(give_up) as (_, connection):
        with pytest.raises(EngineFailed):
            await connection.call(job(), print).done()


class Holding:
    """A handler that holds something for as long as its call is open."""

    def __init__(self) -> None:
        self.held = 0
        self.served = 0

    async def __call__(self, ask: WorkerRequest, reply: Reply) -> None:
        self.held += 1
        self.served += 1
        try:
            reply.send(Delta((1,)))
            await reply.wait_until_closed()
        finally:
            self.held -= 1


async def test_closing_a_call_frees_what_it_held(plane: Ground) -> None:
    holding = Holding()
    async with plane(holding) as (_, connection):
        got: list[WorkerAnswer] = []
        calls = [connection.call(job(), got.append) for _ in range(10)]
        await until(lambda: len(got) == 10)
        assert holding.held == 10
        for call in calls[1:]:
            call.close()
            call.close()
        await until(lambda: holding.held == 1)
        await asyncio.gather(*(call.done() for call in calls[1:]))  # closed here: no error
        calls[0].close()
        await until(lambda: holding.held == 0)


async def test_a_call_closed_before_the_worker_has_seen_it_holds_nothing(plane: Ground) -> None:
    holding = Holding()
    async with plane(holding) as (_, connection):
        for _ in range(20):
            connection.call(job(), print).close()
        last: list[WorkerAnswer] = []
        call = connection.call(job(), last.append)
        await until(lambda: bool(last))
        assert holding.held == 1
        call.close()


async def test_after_close_no_answer_arrives(plane: Ground) -> None:
    stopped = asyncio.Event()

    async def flood(ask: WorkerRequest, reply: Reply) -> None:
        try:
            while True:
                reply.send(Delta((1,)))
                await asyncio.sleep(0)
        finally:
            reply.send(Delta((2,)))
            stopped.set()

    async with plane(flood) as (_, connection):
        heard: list[WorkerAnswer] = []
        calls: list[Call] = []

        def hear(answer: WorkerAnswer) -> None:
            heard.append(answer)
            if len(heard) == 3:
                calls[0].close()

        calls.append(connection.call(job(), hear))
        await calls[0].done()
        await stopped.wait()
        await asyncio.sleep(0.05)
    assert len(heard) == 3


async def test_a_caller_that_disconnects_frees_its_resources(plane: Ground) -> None:
    holding = Holding()
    async with plane(holding) as (_, connection):
        got: list[WorkerAnswer] = []
        calls = [connection.call(job(), got.append) for _ in range(5)]
        await until(lambda: len(got) == 5)
        await connection.close()
        await until(lambda: holding.held == 0)
        for call in calls:
            with pytest.raises(WorkerLost):
                await call.done()


async def test_callers_of_a_worker_that_disconnects_get_worker_lost(plane: Ground) -> None:
    holding = Holding()
    async with plane(holding) as (server, connection):
        lost: list[str] = []
        connection.on_lost(lambda: lost.append("told"))
        call = connection.call(job(), print)
        await until(lambda: holding.held == 1)
        await server.close()
        with pytest.raises(WorkerLost):
            await call.done()
        await connection.closed.wait()
        connection.on_lost(lambda: lost.append("told late"))
        assert lost == ["told", "told late"]
        with pytest.raises(WorkerLost):
            connection.call(job(), print)
        call.close()
    assert holding.held == 0


async def test_a_paused_caller_gets_a_window_and_then_merged_deltas(plane: Ground) -> None:
    sent = asyncio.Event()
    total = WINDOW * 5

    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        for i in range(total):
            reply.send(Delta((i,), None, (TokenLogprob(-float(i)),), timings={"decode": 1.0}))
            await asyncio.sleep(0)
        reply.send(Delta((total,), "length", (TokenLogprob(-float(total)),)))
        sent.set()

    async with plane(stream) as (_, connection):
        got: list[WorkerAnswer] = []
        call = connection.call(job(), got.append)
        call.pause()
        await sent.wait()
        await until(lambda: len(got) == WINDOW)
        await asyncio.sleep(0.05)
        assert len(got) == WINDOW  # and no more, as long as the caller is paused
        call.resume()
        await call.done()
    assert tokens(got) == list(range(total + 1))
    late = [answer for answer in got[WINDOW:] if isinstance(answer, Delta)]
    assert 1 < len(late) < (total - WINDOW) / 4
    assert [delta.finish for delta in late] == [None] * (len(late) - 1) + ["length"]
    logprobs = [entry.logprob for delta in late for entry in delta.logprobs]
    assert logprobs == [-float(token) for delta in late for token in delta.ids]
    assert sum((delta.timings or {}).get("decode", 0.0) for delta in late) == total - WINDOW


async def test_one_paused_call_does_not_hold_up_another(plane: Ground) -> None:
    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        for i in range(WINDOW * 3):
            reply.send(Delta((i,)))
            await asyncio.sleep(0)

    async with plane(stream) as (_, connection):
        slow: list[WorkerAnswer] = []
        fast: list[WorkerAnswer] = []
        paused = connection.call(job(), slow.append)
        paused.pause()
        await connection.call(job(), fast.append).done()
        assert tokens(fast) == list(range(WINDOW * 3))
        paused.resume()
        await paused.done()
    assert tokens(slow) == list(range(WINDOW * 3))


async def test_a_failure_comes_after_the_answers_that_waited(plane: Ground) -> None:
    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        for i in range(WINDOW * 2):
            reply.send(Delta((i,)))
        raise EngineFailed("broken")

    async with plane(stream) as (_, connection):
        got: list[WorkerAnswer] = []
        call = connection.call(job(), got.append)
        call.pause()
        await until(lambda: len(got) == WINDOW)
        call.resume()
        with pytest.raises(EngineFailed, match="broken"):
            await call.done()
    assert tokens(got) == list(range(WINDOW * 2))


async def test_drain_lets_calls_end_and_takes_no_new_jobs(plane: Ground) -> None:
    finish = asyncio.Event()

    async def wait(ask: WorkerRequest, reply: Reply) -> None:
        if isinstance(ask, Job):
            reply.send(Delta((1,)))
            await finish.wait()
        reply.send(Delta((2,), "stop"))

    async with plane(wait) as (server, connection):
        got: list[WorkerAnswer] = []
        running = connection.call(job(), got.append)
        await until(lambda: bool(got))
        draining = asyncio.create_task(server.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await connection.call(job(), print).done()
        await connection.call(GetReport(), got.append).done()  # it still answers reports
        assert not draining.done()
        finish.set()
        await running.done()
        assert await draining
    assert tokens(got) == [1, 2, 2]


async def test_a_drain_that_takes_too_long_says_so_and_close_ends_the_rest(plane: Ground) -> None:
    holding = Holding()
    async with plane(holding) as (server, connection):
        call = connection.call(job(), print)
        await until(lambda: holding.held == 1)
        assert not await server.drain(0.05)
        await server.close()
        with pytest.raises(WorkerLost):
            await call.done()
    assert holding.held == 0


async def test_a_drain_without_calls_is_done_at_once(plane: Ground) -> None:
    async with plane(Holding()) as (server, _):
        assert await server.drain(0)


@pytest.mark.parametrize(
    ("secret", "worker", "epoch"),
    [
        ("another secret", "PD-0", 7),
        ("", "PD-0", 7),
        (SECRET, "PD-1", 7),
        (SECRET, "PD-0", 6),
        (SECRET, "PD-0", 8),
    ],
)
async def test_a_caller_with_another_secret_or_for_another_worker_is_refused(
    plane: Ground, secret: str, worker: str, epoch: int
) -> None:
    holding = Holding()
    server = CallServer(holding, SECRET, "PD-0", 7)
    address = await plane.start(server)
    try:
        with pytest.raises(WorkerLost) as caught:
            await plane.open(address, secret, worker, epoch)
        assert SECRET not in str(caught.value)
        good = await plane.open(address, SECRET, "PD-0", 7)  # the server goes on
        await good.close()
    finally:
        await server.close()
    assert holding.served == 0


async def test_an_address_without_a_listener_is_a_lost_worker(plane: Ground) -> None:
    server = CallServer(Holding(), SECRET, "PD-0", 7)
    address = await plane.start(server)
    await server.close()
    with pytest.raises(WorkerLost):
        await plane.open(address, SECRET, "PD-0", 7)
    with pytest.raises(WorkerLost):
        await plane.open("no address", SECRET, "PD-0", 7)


async def test_a_server_without_a_secret_cannot_be_created() -> None:
    with pytest.raises(InvalidConfig):
        CallServer(Holding(), "", "PD-0", 7)


async def test_idle_connections_stay(plane: Ground) -> None:
    async def answer(ask: WorkerRequest, reply: Reply) -> None:
        reply.send(Delta((1,)))

    async with plane(answer, silence=1.0) as (_, connection):
        await asyncio.sleep(2.2)  # more than twice the silence that is allowed
        got: list[WorkerAnswer] = []
        await connection.call(job(), got.append).done()
        assert got == [Delta((1,))]


async def test_an_unknown_kind_of_error_still_has_its_code(plane: Ground) -> None:
    class Odd(TriptychError):
        status = 418
        code = "odd"

    async def refuse(ask: WorkerRequest, reply: Reply) -> None:
        raise Odd("strange")

    async with plane(refuse) as (_, connection):
        with pytest.raises(TriptychError, match="strange") as caught:
            await connection.call(job(), print).done()
    assert (caught.value.status, caught.value.code) == (418, "odd")


async def test_a_thousand_streams_at_once(plane: Ground) -> None:
    going: set[int] = set()
    together = asyncio.Event()

    async def count(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        going.add(ask.work.prompt[0])
        if len(going) == 1000:
            together.set()
        await together.wait()
        for token in range(20):
            reply.send(Delta((ask.work.prompt[0], token)))
            await asyncio.sleep(0.001)

    async with plane(count) as (_, connection):
        got: list[list[WorkerAnswer]] = [[] for _ in range(1000)]
        calls = [connection.call(job(prompt=(i,)), got[i].append) for i in range(1000)]
        await asyncio.gather(*(call.done() for call in calls))
    for i, answers in enumerate(got):
        assert tokens(answers) == [number for token in range(20) for number in (i, token)]


async def test_a_caller_that_does_not_read_costs_no_more_than_its_windows(plane: Ground) -> None:
    """Writing without regard for ``pause_writing`` (``Link.flush``) puts all of it into the
    transport, and the bound is broken."""
    large = tuple(range(1000, 3000))
    sent = 0

    async def flood(ask: WorkerRequest, reply: Reply) -> None:
        nonlocal sent
        for _ in range(WINDOW):
            reply.send(Delta(large))
            sent += 1
            await asyncio.sleep(0)

    async with plane(flood, silence=60) as (server, connection):
        got: list[WorkerAnswer] = []
        assert connection._transport is not None
        if plane.name == "http":
            wire = connection._transport._websocket._response.connection.transport  # type: ignore[attr-defined]
        else:
            wire = connection._transport
        wire.pause_reading()
        calls = [connection.call(job(), got.append) for _ in range(36)]
        await until(lambda: sent == 36 * WINDOW)
        [caller] = server.callers
        assert caller._transport is not None
        assert not caller._writable
        assert caller._transport.get_write_buffer_size() < 4 << 20  # of 14 MB
        wire.resume_reading()
        await asyncio.gather(*(call.done() for call in calls))
    assert len(got) == 36 * WINDOW
    assert all(isinstance(answer, Delta) and answer.ids == large for answer in got)


async def greet_badly(address: str, client: Client | None, garbage: bytes) -> bytes:
    """Send bytes to a worker as any client can on its plane; gives what comes back until it
    closes."""
    if client is not None:
        subject = address.removeprefix("nats://") + ".stranger"
        heard = await client.subscribe(subject + ".back")
        head = struct.pack(">BQQ", 1, 0, 0)
        for message in (garbage, head + garbage):
            await client.publish(subject, message)
        answer = await heard.next_msg(timeout=20)
        while not answer.data[0] & 4:  # it knows nothing of this connection (any more)
            answer = await heard.next_msg(timeout=20)
        await heard.unsubscribe()
        return answer.data
    if address.startswith("http"):
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as ends:
            await ends.send_bytes(garbage)
            async with asyncio.timeout(20):
                while (await ends.receive()).type is aiohttp.WSMsgType.BINARY:
                    pass
    where = address.removeprefix("http://").removesuffix("/triptych")
    host, _, port = where.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(garbage)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


class _Boom:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 3000,
        b"GET / HTTP/1.0\r\n\r\n",
        pickle.dumps(_Boom()),
        b"".join(frames.open_frame(1, job())),
        frames.frame(frames.FrameKind.HELLO, b"\xc1 no msgpack"),
    ],
    ids=["noise", "http", "pickle", "call", "hello"],
)
async def test_f17_garbage_is_closed_and_nothing_runs(plane: Ground, garbage: bytes) -> None:
    """Without the refusal of frames before the hello (``_Caller.on_frame``), the call runs."""
    holding = Holding()
    async with plane(holding) as (server, _):
        assert server._listening is not None
        back = await greet_badly(server._listening.address, plane.client, garbage)
        assert SECRET.encode() not in back
        assert holding.served == 0
        await until(lambda: len(server.callers) == 1)
        good = await plane.open(server._listening.address, SECRET, "PD-0", 7)
        call = good.call(job(), print)
        await until(lambda: holding.served == 1)
        call.close()
        await good.close()


def altered(kind: FrameKind) -> Attack:
    def attack(frame: bytes, back: list[bytes]) -> list[bytes]:
        changed = bytearray(frame)
        if kind_of(frame) == kind:
            changed[-TAG_BYTES - 1] ^= 1  # the last byte of the body: a token, or of a picture
        return [bytes(changed)]

    return attack


def injected(kind: FrameKind, body: bytes) -> Attack:
    def attack(frame: bytes, back: list[bytes]) -> list[bytes]:
        return [frames.frame(kind, body) + frame[-TAG_BYTES:], frame]

    return attack


def replayed(frame: bytes, back: list[bytes]) -> list[bytes]:
    return [frame, frame]


def reordered() -> Attack:
    kept: list[bytes] = []

    def attack(frame: bytes, back: list[bytes]) -> list[bytes]:
        kept.append(frame)
        if len(kept) < 2:
            return []
        return [kept.pop(), kept.pop()]

    return attack


def dropped() -> Attack:
    seen: list[bytes] = []

    def attack(frame: bytes, back: list[bytes]) -> list[bytes]:
        seen.append(frame)
        return [] if len(seen) == 1 else [frame]

    return attack


def truncated(kind: FrameKind) -> Attack:
    """A shorter body that is right by its own length, with the tag of the longer one."""

    def attack(frame: bytes, back: list[bytes]) -> list[bytes]:
        if kind_of(frame) != kind:
            return [frame]
        return [frames.frame(kind, frame[5 : -TAG_BYTES - 1]) + frame[-TAG_BYTES:]]

    return attack


def untagged(frame: bytes, back: list[bytes]) -> list[bytes]:
    return [frame[:-TAG_BYTES]]


def reflected(frame: bytes, back: list[bytes]) -> list[bytes]:
    back.append(frame)  # a beat, say, is the same in both directions
    return [frame]


FORGED = frames.pack([(1, Delta((666,)))])
OPENED = b"".join(frames.open_frame(9, GetReport()))[5:]
ATTACKS: dict[str, Callable[[], dict[str, Attack]]] = {
    "answers altered": lambda: {"to_caller": altered(FrameKind.ANSWERS)},
    "asks altered": lambda: {"to_worker": altered(FrameKind.OPEN)},
    "answers injected": lambda: {"to_caller": injected(FrameKind.ANSWERS, FORGED)},
    "asks injected": lambda: {"to_worker": injected(FrameKind.OPEN, OPENED)},
    "replayed to the caller": lambda: {"to_caller": replayed},
    "replayed to the worker": lambda: {"to_worker": replayed},
    "reordered": lambda: {"to_caller": reordered()},
    "left out": lambda: {"to_caller": dropped()},
    "truncated": lambda: {"to_caller": truncated(FrameKind.ANSWERS)},
    "without tags": lambda: {"to_caller": untagged},
    "reflected": lambda: {"to_worker": reflected},
}


class Counting:
    """A handler that streams numbers until its caller is gone, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[WorkerRequest] = []

    async def __call__(self, ask: WorkerRequest, reply: Reply) -> None:
        self.asked.append(ask)
        for number in range(20):
            reply.send(Delta((number,)))
            await asyncio.sleep(0.002)
        await reply.wait_until_closed()


@contextlib.asynccontextmanager
async def relayed(
    plane: Ground, handler: Counting, **attacks: Attack
) -> AsyncIterator[tuple[Relay, CallServer]]:
    server = CallServer(handler, SECRET, "PD-0", 7)
    relay = Relay(plane.planes.named(plane.name), await plane.start(server), **attacks)
    try:
        yield relay, server
    finally:
        await relay.close()
        await server.close()


async def test_f24_a_relay_that_changes_nothing_is_not_noticed(plane: Ground) -> None:
    """So the relay of the tests below does pass the hello, and each end is what the other knows."""
    handler, got = Counting(), list[WorkerAnswer]()
    async with relayed(plane, handler) as (relay, _):
        connection = await plane.open(await relay.start(), SECRET, "PD-0", 7)
        call = connection.call(job("r", b"x" * 100_000), got.append)
        await until(lambda: len(got) == 20)
        call.close()
        await connection.close()
    assert relay.passed[0] >= 1
    assert relay.passed[1] >= 1
    assert SECRET.encode() not in relay.seen


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_f24_a_relay_that_changes_anything_loses_the_connection(
    plane: Ground, attack: Callable[[], dict[str, Attack]]
) -> None:
    """Whatever it does after the hello, neither end takes a word of it, and the call fails as one
    whose worker is lost: it is retried elsewhere."""
    handler, got = Counting(), list[WorkerAnswer]()
    before = limited.totals["frames_forged"]
    async with relayed(plane, handler, **attack()) as (relay, server):
        connection = await plane.open(await relay.start(), SECRET, "PD-0", 7)
        asked = job("r", b"picture")
        call = connection.call(asked, got.append)
        async with asyncio.timeout(20):
            with pytest.raises(WorkerLost):
                await call.done()
        await connection.closed.wait()
    assert tokens(got) == list(range(len(got)))  # nothing but what the worker said, in its order
    assert handler.asked in ([], [asked])
    assert limited.totals["frames_forged"] - before + server.limited.totals["frames_forged"] >= 1
