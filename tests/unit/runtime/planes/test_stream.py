"""A stream of bytes over messages that are lost, doubled and late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from triptych.runtime.planes import stream
from triptych.runtime.planes.base import MESSAGE_BYTES
from triptych.runtime.planes.stream import MAX_IN_FLIGHT, ReliableStream


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK_SECONDS", 0.005)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class End(asyncio.BufferedProtocol):
    """One end: what it received, and how it was lost."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.paused = False
        self.lost: list[Exception | None] = []
        self._room = bytearray(1000)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.came += self._room[:nbytes]

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Way:
    """One direction between two streams; ``lose`` says which messages never arrive."""

    def __init__(self, lose: Callable[[], bool] = lambda: False) -> None:
        self.reconnects: int | None = 0
        self.there: ReliableStream | None = None
        self.lose = lose
        self.posted = 0
        self.left = False

    async def send(self, message: bytes) -> None:
        self.posted += 1
        await asyncio.sleep(0)
        self._arrive(message)

    def close(self, message: bytes) -> None:
        self.left = True
        self._arrive(message)

    def _arrive(self, message: bytes) -> None:
        if self.there is not None and self.reconnects is not None and not self.lose():
            asyncio.get_running_loop().call_soon(self.there.receive, message)


class Pair:
    def __init__(self, lose: Callable[[], bool] = lambda: False) -> None:
        self.ends = End(), End()
        self.ways = Way(lose), Way(lose)
        self.caller = ReliableStream(self.ends[0], self.ways[0], opens=True)
        self.worker = ReliableStream(self.ends[1], self.ways[1], opens=False)
        self.ways[0].there, self.ways[1].there = self.worker, self.caller

    def close(self) -> None:
        self.caller.abort()
        self.worker.abort()


@pytest.mark.parametrize("seed", range(8))
async def test_bytes_arrive_whole_and_in_order_however_many_messages_are_lost(seed: int) -> None:
    """Without the check of the offset in ``_receive_data``, bytes come twice or not at all."""
    dice = random.Random(seed)
    pair = Pair(lambda: dice.random() < 0.3)
    said = bytearray(), bytearray()
    for _ in range(60):
        for side, one in enumerate((pair.caller, pair.worker)):
            data = dice.randbytes(dice.choice((1, 30, 2000, MESSAGE_BYTES + 7)))
            one.write(data)
            said[side].extend(data)
        if dice.random() < 0.3:
            await asyncio.sleep(0.001)
    await until(lambda: [e.came for e in pair.ends] == [said[1], said[0]])
    pair.close()


async def test_a_broken_connection_reconnects_without_waiting_for_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of what is sent into the break is lost, nothing is written after it, and time alone does
    not repair it here: without ``_send_again`` in ``ReliableStream._tick`` it is never complete."""
    monkeypatch.setattr(stream, "RESEND_TICKS", 1 << 30)
    pair = Pair()
    pair.caller.write(b"before ")
    await until(lambda: pair.ends[1].came == b"before ")
    for way in pair.ways:
        way.lose = lambda: True
    pair.caller.write(b"into it ")
    await asyncio.sleep(0.002)
    for way in pair.ways:
        way.reconnects, way.lose = None, lambda: False
    pair.caller.write(b"meanwhile")
    await until(lambda: bool(pair.caller.get_extra_info("away")))
    posted = pair.ways[0].posted
    await asyncio.sleep(0.02)
    assert pair.ways[0].posted == posted
    for way in pair.ways:
        way.reconnects = 1
    await until(lambda: pair.ends[1].came == b"before into it meanwhile")
    assert pair.caller.get_extra_info("away")  # the peer may still be on its way back
    await until(lambda: not pair.caller.get_extra_info("away"))
    pair.close()


async def test_a_break_that_does_not_end_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proved by waiting for ever, as silence does not count meanwhile."""
    monkeypatch.setattr(stream, "AWAY_TICKS", 10)
    pair = Pair()
    pair.ways[0].reconnects = None
    await until(lambda: bool(pair.caller.get_extra_info("away")))
    assert pair.ends[0].lost == []
    await until(lambda: bool(pair.ends[0].lost))
    assert str(pair.ends[0].lost[0]) == "NATS is away"
    pair.close()


async def test_bytes_in_flight_are_bounded() -> None:
    """Without MAX_IN_FLIGHT in ``ReliableStream._pump`` all 8 MiB are buffered, none paused."""
    pair = Pair()
    pair.worker.pause_reading()
    pair.caller.set_write_buffer_limits(high=MESSAGE_BYTES)
    written = 0
    while not pair.ends[0].paused:
        pair.caller.write(b"x" * 1000)
        written += 1000
        await asyncio.sleep(0)
        assert written < 8 << 20
    assert pair.caller.get_write_buffer_size() <= MAX_IN_FLIGHT + 2 * MESSAGE_BYTES + 2000
    assert pair.ends[1].came == b""
    pair.worker.resume_reading()
    await until(lambda: len(pair.ends[1].came) == written)
    assert not pair.ends[0].paused
    pair.close()


async def test_acknowledgements_come_in_bunches() -> None:
    pair = Pair()
    for _ in range(500):
        pair.caller.write(b"y" * 1000)
        await asyncio.sleep(0)
    await until(lambda: len(pair.ends[1].came) == 500_000)
    await until(lambda: pair.caller.get_write_buffer_size() == 0)
    assert pair.ways[1].posted < 60
    pair.close()


async def test_close_sends_the_last_bytes_first_and_both_sides_end() -> None:
    pair = Pair(iter([False] * 40 + [True] * 20 + [False] * 10_000).__next__)
    pair.caller.write(b"z" * (3 << 20))
    pair.caller.close()
    pair.caller.write(b"too late")
    await until(lambda: all(end.lost for end in pair.ends))
    assert pair.ends[1].came == b"z" * (3 << 20)
    assert [end.lost for end in pair.ends] == [[None], [None]]
    assert all(way.left for way in pair.ways)


async def test_both_sides_may_close_at_once() -> None:
    pair = Pair()
    pair.caller.close()
    pair.worker.close()
    await until(lambda: all(end.lost for end in pair.ends))


async def test_aborting_one_end_ends_the_other() -> None:
    pair = Pair()
    pair.worker.abort()
    await until(lambda: all(end.lost for end in pair.ends))
    assert pair.ends[1].lost == [None]
    assert isinstance(pair.ends[0].lost[0], ConnectionResetError)


async def test_no_responder_fails_a_new_connection_at_once_and_an_old_one_later() -> None:
    alone = Pair()
    alone.caller.receive(b"")
    await until(lambda: bool(alone.ends[0].lost))
    assert isinstance(alone.ends[0].lost[0], ConnectionRefusedError)
    pair = Pair()
    pair.worker.write(b"here")
    await until(lambda: pair.ends[0].came == b"here")
    pair.caller.receive(b"")
    pair.worker.write(b" still")
    await until(lambda: pair.ends[0].came == b"here still")
    await asyncio.sleep(0.1)  # twenty ticks
    assert not pair.ends[0].lost
    pair.caller.receive(b"")
    await until(lambda: bool(pair.ends[0].lost))
    alone.close()
    pair.close()


@pytest.mark.parametrize("message", [b"\x01", b"\xff" * 16, b"\x00" + b"\xff" * 16 + b"data"])
async def test_unknown_messages_are_ignored(message: bytes) -> None:
    pair = Pair()
    pair.worker.receive(message)
    pair.caller.write(b"good")
    await until(lambda: pair.ends[1].came == b"good")
    pair.close()
