"""When a reader believes what came, without NIXL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from triptych.errors import TicketLost
from triptych.transfer.nixl_agent import NixlError
from triptych.transfer.nixl_transfers import (
    ByteRange,
    ReadOperation,
    ReceiveBuffer,
    ReceiveOperation,
    RemoteTensors,
    StatusQuery,
    WriteRefused,
    decode_message,
)
from triptych.transfer.segment import PAGE, Segment

SIZE = 65536


class Move:
    """Copies when it is asked for the last time of so many."""

    def __init__(self, here: list[Any], there: list[Any], asks: int) -> None:
        self._pairs = list(zip(here, there, strict=True))
        self._asks = asks

    def done(self) -> bool:
        self._asks -= 1
        if self._asks == 0:
            for (to, size, _), (source, _, _) in self._pairs:
                ctypes.memmove(to, source, size)
        return self._asks <= 0

    def release(self) -> None:
        pass


class Agent:
    """``asks``: how often each of its transfers is asked before it is done."""

    def __init__(self, asks: list[int]) -> None:
        self._asks = iter(asks)
        self.known: set[str] = set()
        self.sent: list[bytes] = []

    def start_transfer(self, what: str, here: list[Any], there: list[Any], name: str) -> Move:
        return Move(here, there, next(self._asks))

    def metadata(self, segments: list[Segment]) -> bytes:
        return b"about"

    def add_remote(self, name: str, metadata: bytes) -> None:
        self.known.add(name)

    def remove_remote(self, name: str) -> None:
        self.known.discard(name)

    def notify(self, name: str, message: bytes) -> None:
        if name not in self.known:
            raise NixlError(name)
        self.sent.append(message)


@pytest.fixture
def owned() -> Iterator[Segment]:
    segment = Segment(SIZE, epoch=3)
    ctypes.memset(ctypes.addressof(segment.memory) + PAGE, 7, 1000)
    yield segment
    segment.close()


def source(owned: Segment, slot: int) -> RemoteTensors:
    spot = (ctypes.addressof(owned.memory), PAGE + SIZE, 0)
    return RemoteTensors("owner", b"about", 5, 3, owned.nonce, ((spot, owned.nonce, slot),))


@pytest.fixture
def scratch() -> Iterator[ReceiveBuffer]:
    segment = Segment(SIZE, epoch=1)
    yield ReceiveBuffer(segment.memory, segment, (ByteRange(0, 0, 1000),))
    segment.close()


@pytest.mark.parametrize("asks", [[1, 1], [2, 1], [3, 2], [1, 2], [2, 2]])
def test_bytes_count_once_their_confirming_pages_have_arrived(
    owned: Segment, scratch: ReceiveBuffer, asks: list[int]
) -> None:
    """However often each is asked for: done between two questions it is not both of them."""
    done = Future[None]()
    reading = ReadOperation(Agent(asks), source(owned, owned.add_ticket(5)), scratch, done)  # type: ignore[arg-type]
    reading.start()
    for _ in range(sum(asks)):
        if reading.step():
            break
    assert done.result(0) is None
    assert bytes(scratch.views()[0]) == b"\7" * 1000


@pytest.mark.parametrize("asks", [[1, 1], [2, 1], [1, 2]])
def test_bytes_of_a_removed_ticket_are_lost(
    owned: Segment, scratch: ReceiveBuffer, asks: list[int]
) -> None:
    slot = owned.add_ticket(5)
    owned.remove_ticket(slot)
    done = Future[None]()
    reading = ReadOperation(Agent(asks), source(owned, slot), scratch, done)  # type: ignore[arg-type]
    reading.start()
    while not reading.step():
        pass
    with pytest.raises(TicketLost):
        done.result(0)


def test_memory_stays_reserved_for_an_owner_that_is_only_stopped(
    owned: Segment, scratch: ReceiveBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another transfer has parted with it: it is met again, and asked on.

    Without that the memory is given back after some seconds, for the owner to write into.
    """
    now = [1000.0]
    monkeypatch.setattr("triptych.transfer.nixl_transfers.time.monotonic", lambda: now[0])
    agent, register = Agent([]), dict[bytes, ReceiveOperation]()
    done = Future[None]()
    owner = source(owned, owned.add_ticket(5))
    receiving = ReceiveOperation(agent, owner, scratch, b"token", done, register)  # type: ignore[arg-type]
    agent.add_remote("owner", b"about")
    receiving.start()
    for _ in range(100):
        agent.remove_remote("owner")
        now[0] += 1.0
        assert not receiving.step()
    assert done.exception(0) is not None
    assert register
    assert isinstance(decode_message(agent.sent[-1]), StatusQuery)
    receiving.finish(WriteRefused(b"token"))
    assert receiving.step()
    assert not register
