"""The request plane seen from its wire: writes, bad callers, and peers that fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from triptych.errors import EngineFailed, PayloadTooLarge, WorkerLost
from triptych.messages import (
    Delta,
    EncodeResult,
    GetReport,
    Handover,
    Job,
    MediaItem,
    PromptInfo,
    Sampling,
    Ticket,
    TokenLogprob,
    TopLogprob,
    Work,
    WorkerAnswer,
    WorkerRequest,
)
from triptych.runtime import connection as connections
from triptych.runtime import frames, link
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.frames import WINDOW, FrameKind, Hello
from triptych.runtime.server import MERGED, CallServer, Reply, next_answer

SECRET = "a cluster's secret"
JOB = Job(Work("r", (1,), (), Sampling(seed=1)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class Recorder:
    """A handler that notes what ran."""

    def __init__(self) -> None:
        self.ran: list[WorkerRequest] = []

    async def __call__(self, ask: WorkerRequest, reply: Reply) -> None:
        self.ran.append(ask)
        reply.send(Delta((1,)))
        if isinstance(ask, Job):
            await reply.wait_until_closed()


@pytest.fixture
async def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def server(recorder: Recorder) -> AsyncIterator[CallServer]:
    server = CallServer(recorder, SECRET, "PD-0", 7)
    yield server
    await server.close()


@pytest.fixture
async def address(server: CallServer) -> str:
    return await server.start("127.0.0.1", 0)


class Writes:
    """Counts the writes of a link, and what is in their frames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: FrameKind) -> None:
        self.bodies: list[bytes] = []
        plain = link.Link.write

        def write(that: link.Link, sent: FrameKind, body: bytes = b"") -> None:
            if sent == kind:
                self.bodies.append(body)
            plain(that, sent, body)

        monkeypatch.setattr(link.Link, "write", write)


async def test_all_answers_of_a_tick_leave_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    step = asyncio.Event()
    replies: list[Reply] = []

    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        replies.append(reply)
        await step.wait()

    server = CallServer(stream, SECRET, "PD-0", 7)
    connection = await WorkerConnection.open(await server.start("127.0.0.1", 0), SECRET, "PD-0", 7)
    got: list[WorkerAnswer] = []
    calls = [connection.call(JOB, got.append) for _ in range(256)]
    await until(lambda: len(replies) == 256)
    writes = Writes(monkeypatch, FrameKind.ANSWERS)
    for number in range(5):
        for reply in replies:
            reply.send(Delta((number,)))
        await until(lambda n=number: len(got) == 256 * (n + 1))  # type: ignore[misc]
    assert len(writes.bodies) == 5
    assert len(frames.decode_answers(writes.bodies[0])) == 256
    step.set()
    await asyncio.gather(*(call.done() for call in calls))
    assert len(writes.bodies) == 6  # the ends of all calls, in one too
    await connection.close()
    await server.close()


async def test_credit_is_not_granted_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(ask: WorkerRequest, reply: Reply) -> None:
        for i in range(WINDOW * 4):
            reply.send(Delta((i,)))
            await asyncio.sleep(0.0005)

    server = CallServer(stream, SECRET, "PD-0", 7)
    connection = await WorkerConnection.open(await server.start("127.0.0.1", 0), SECRET, "PD-0", 7)
    writes = Writes(monkeypatch, FrameKind.CONTROL)
    got: list[WorkerAnswer] = []
    await connection.call(JOB, got.append).done()
    granted = [item for body in writes.bodies for item in frames.decode_control(body)]
    assert len(granted) <= 4 * WINDOW // connections.REFILL
    assert sum(item.answers for item in granted if isinstance(item, frames.WindowGrant)) <= len(got)
    await connection.close()
    await server.close()


async def test_nothing_is_written_while_the_transport_is_full(
    address: str, server: CallServer
) -> None:
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    (caller,) = server.callers
    got: list[WorkerAnswer] = []
    caller.pause_writing()
    call = connection.call(JOB, got.append)
    await asyncio.sleep(0.05)
    assert got == []
    caller.resume_writing()
    await until(lambda: got == [Delta((1,))])
    call.close()
    await connection.close()


async def test_answers_too_large_for_one_frame_go_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def give(ask: WorkerRequest, reply: Reply) -> None:
        assert isinstance(ask, Job)
        size = ask.work.prompt[0]
        for _ in range(5):
            reply.send(Handover(Delta(()), (), Ticket("", 0, "", 0, bytes(size), (), 0, 0, 0)))

    server = CallServer(give, SECRET, "PD-0", 7)
    connection = await WorkerConnection.open(await server.start("127.0.0.1", 0), SECRET, "PD-0", 7)
    monkeypatch.setattr(frames, "MAX_FRAME", 4000)
    got: list[WorkerAnswer] = []
    await connection.call(Job(Work("r", (1000,), (), Sampling(1))), got.append).done()
    assert len(got) == 5
    with pytest.raises(EngineFailed, match="4000"):
        await connection.call(Job(Work("r", (5000,), (), Sampling(1))), got.append).done()
    assert len(got) == 5
    with pytest.raises(PayloadTooLarge):
        connection.call(
            Job(Work("r", (1,), (MediaItem("image", 0, bytes(5000)),), Sampling(1))), got.append
        )
    await connection.close()
    await server.close()


def test_merging_keeps_everything_that_was_said() -> None:
    info = PromptInfo(4, 0)
    logprobs = (TokenLogprob(-1.0), TokenLogprob(-2.0))
    answers: list[WorkerAnswer] = [
        Delta((1,), None, logprobs[:1], info, {"prefill": 1.0}),
        Delta((), None),
        Delta((2,), "stop", logprobs[1:], None, {"prefill": 0.5, "decode": 2.0}),
        EncodeResult(()),
        Delta((3,)),
    ]
    waiting = deque(answers)
    assert [next_answer(waiting) for _ in range(3)] == [
        Delta((1, 2), "stop", logprobs, info, {"prefill": 1.5, "decode": 2.0}),
        EncodeResult(()),
        Delta((3,)),
    ]
    assert not waiting


@pytest.mark.parametrize(("top", "most"), [(None, MERGED), (0, MERGED // 2), (20, 1)])
def test_merging_has_a_bound(top: int | None, most: int) -> None:
    """What a Delta costs the caller is in its numbers: many log-probabilities, few tokens."""
    scores = tuple(TopLogprob(i, -1.0) for i in range(top or 0))
    logprobs = () if top is None else (TokenLogprob(-1.0, scores),)
    waiting: deque[WorkerAnswer] = deque(Delta((i,), None, logprobs) for i in range(5 * MERGED))
    taken = []
    while waiting:
        delta = next_answer(waiting)
        assert isinstance(delta, Delta)
        taken.append(delta.ids)
    assert {len(ids) for ids in taken} == {most}
    assert [id for ids in taken for id in ids] == list(range(5 * MERGED))


class Evil:
    """Leaves a trace when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch unpickled",)


HELLO = frames.frame(
    FrameKind.HELLO, frames.pack(Hello(frames.PROTOCOL_VERSION, "PD-0", 7, b"n" * 32))
)
STRANGERS = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(5000),
    "ones": b"\xff" * 5000,
    "pickle": pickle.dumps(Evil()),
    "framed pickle": frames.frame(FrameKind.HELLO, pickle.dumps(Evil())),
    "huge length": b"\xff\xff\xff\xff\x01",
    "long hello": frames.frame(FrameKind.HELLO, bytes(2000)),
    "deep hello": frames.frame(FrameKind.HELLO, b"\x91" * 1000),
    "hello twice": HELLO + HELLO,
    "old version": frames.frame(FrameKind.HELLO, frames.pack(Hello(0, "PD-0", 7, b"n" * 32))),
    "call without hello": frames.frame(FrameKind.OPEN, b"".join(frames.open_frame(1, JOB))[5:]),
    "call without proof": HELLO + b"".join(frames.open_frame(1, JOB)),
    "wrong proof": HELLO
    + frames.frame(FrameKind.PROOF, frames.pack(frames.Proof(b"p" * 32)))
    + b"".join(frames.open_frame(1, JOB)),
    "unknown kind": frames.frame(FrameKind.HELLO, b"")[:4] + b"\x63",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
async def test_an_unauthenticated_caller_is_disconnected_and_nothing_runs(
    said: bytes,
    address: str,
    server: CallServer,
    recorder: Recorder,
    tmp_path: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
    writer.write(said)
    async with asyncio.timeout(4):  # before the time for a hello is over
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    await _hang_up(writer)
    assert SECRET.encode() not in answer
    assert recorder.ran == []
    assert os.listdir(tmp_path) == []
    await until(lambda: not server.callers)
    await _works(address)


@pytest.mark.parametrize("said", [b"", HELLO[:3], HELLO[:-1], HELLO], ids=len)
async def test_a_caller_that_does_not_finish_the_hello_in_time_is_disconnected(
    said: bytes, address: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HELLO_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
    writer.write(said)
    async with asyncio.timeout(20):
        await reader.read()
    await _hang_up(writer)
    assert recorder.ran == []
    monkeypatch.undo()
    await _works(address)


BROKEN = {
    "call opened twice": b"".join(frames.open_frame(1, JOB)),
    "wrong struct": frames.frame(FrameKind.CONTROL, frames.pack([["no", "grant"]])),
    "truncated": frames.frame(FrameKind.CONTROL, frames.pack([1, 2])[:-1]),
    "answers from a caller": frames.frame(FrameKind.ANSWERS, frames.pack([])),
    "too long": b"\xff\xff\xff\xff\x07",
    "pickle": frames.frame(FrameKind.OPEN, pickle.dumps(Evil())),
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN)
async def test_a_caller_that_breaks_the_protocol_loses_its_connection(
    said: bytes, address: str, recorder: Recorder
) -> None:
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    for _ in range(2):
        connection.write_pieces([said[:5], said[5:]])
    async with asyncio.timeout(20):
        await connection.closed.wait()
    await _works(address)


async def test_a_worker_without_the_secret_learns_nothing_and_gets_no_call() -> None:
    heard = bytearray()
    over = asyncio.Event()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = frames.Challenge(b"n" * 32)
        writer.write(frames.frame(FrameKind.CHALLENGE, frames.pack(challenge)))
        writer.write(frames.frame(FrameKind.WELCOME, frames.pack(frames.Proof(b"p" * 32))))
        with contextlib.suppress(ConnectionError):
            heard.extend(await reader.read())
        await _hang_up(writer)
        over.set()

    false = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = false.sockets[0].getsockname()[1]
    with pytest.raises(WorkerLost, match="does not know"):
        await WorkerConnection.open(f"127.0.0.1:{port}", SECRET, "PD-0", 7)
    await over.wait()
    false.close()
    assert SECRET.encode() not in heard


async def test_a_worker_that_never_answers_the_hello_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await _hang_up(writer)
        over.set()

    over = asyncio.Event()
    monkeypatch.setattr(connections, "HELLO_SECONDS", 0.2)
    silent = await asyncio.start_server(ignore, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(WorkerLost, match="does not answer"):
        await WorkerConnection.open(f"127.0.0.1:{port}", SECRET, "PD-0", 7)
    await over.wait()
    silent.close()


WORKER = f"""
import asyncio, sys
from triptych.messages import Delta
from triptych.runtime.server import CallServer

async def main():
    async def handler(ask, reply):
        reply.send(Delta((1,)))
        await reply.wait_until_closed()
    server = CallServer(handler, {SECRET!r}, "PD-0", 7)
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_stopped_or_killed_worker_is_noticed(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        connection = await WorkerConnection.open(address, SECRET, "PD-0", 7, silence=1.0)
        got: list[WorkerAnswer] = []
        call = connection.call(JOB, got.append)
        await until(lambda: bool(got))
        process.send_signal(number)
        async with asyncio.timeout(20):
            with pytest.raises(WorkerLost):
                await call.done()
        assert connection.closed.is_set()
    finally:
        process.kill()
        await process.wait()


async def test_a_loop_that_was_stuck_itself_does_not_blame_the_other_side(address: str) -> None:
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7, silence=1.0)
    for _ in range(4):
        connection._heartbeat()  # what is late comes once, and the peer's bytes come between
        connection.buffer_updated(0)
    assert not connection.closed.is_set()
    await _works(address)
    await connection.close()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _works(address: str) -> None:
    """The server still serves callers that know the secret."""
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    got: list[WorkerAnswer] = []
    await connection.call(GetReport(), got.append).done()
    assert got == [Delta((1,))]
    await connection.close()


class Metered:
    """A transport that notes how many bytes are written in each turn of the loop."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.turns: list[int] = []
        self._open = False

    def write(self, data: bytes | memoryview) -> None:
        if not self._open:
            self._open = True
            self.turns.append(0)
            asyncio.get_running_loop().call_soon(self._close)
        self.turns[-1] += len(data)
        self._transport.write(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def _close(self) -> None:
        self._open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_large_calls_leave_a_share_at_a_time_and_arrive_whole(
    address: str, recorder: Recorder
) -> None:
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    metered = Metered(connection._transport)
    connection._transport = metered  # type: ignore[assignment]
    files = [bytes([number]) * (2_000_000 + number) for number in range(12)]
    calls = []
    for file in files:
        media = (MediaItem("image", 0, file), MediaItem("image", 1, b"small"))
        calls.append(connection.call(Job(Work("r", (1,), media, Sampling(seed=1))), lambda _: None))
        calls.append(connection.call(JOB, lambda _: None))
    calls[1].close()  # which must not get into the middle of a frame
    await until(lambda: len(recorder.ran) == len(calls))
    asked = [ask for ask in recorder.ran if isinstance(ask, Job) and ask.work.media]
    assert [bytes(ask.work.media[0].data) for ask in asked] == files
    assert {bytes(ask.work.media[1].data) for ask in asked} == {b"small"}
    assert max(metered.turns) <= link.WRITE_TURN + link.WRITE_PIECE
    for call in calls:
        call.close()
    await connection.close()


async def test_a_large_answer_leaves_a_share_at_a_time(address: str, server: CallServer) -> None:
    """To hash and to write 20 MiB at once would hold everybody else up."""
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    (caller,) = server.callers
    metered = Metered(caller._transport)
    caller._transport = metered  # type: ignore[assignment]
    heard: list[WorkerAnswer] = []
    call = connection.call(JOB, heard.append)
    ticket = Ticket("", 0, "", 0, bytes(20 << 20), (), 0, 0, 0)
    caller.post((call.id, Handover(Delta(()), (), ticket)))
    await until(lambda: len(heard) == 2)
    assert max(metered.turns) <= link.WRITE_TURN + link.WRITE_PIECE
    call.close()
    await connection.close()
