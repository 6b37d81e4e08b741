"""The reader's side of a transfer, in the agent's thread: what comes, and when it is believed.

Memory that the owner may still write to is kept until that is over: a reader that gave up asks
until it is told so, or until the owner is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from concurrent.futures import Future, InvalidStateError

from msgspec import Struct

from triptych.errors import TicketLost
from triptych.transfer.base import aligned_offsets
from triptych.transfer.checksum import checksum
from triptych.transfer.nixl_agent import (
    ASLEEP,
    AT_WORK,
    MemoryDescriptor,
    NixlAgent,
    RunningTransfer,
    broken,
)
from triptych.transfer.segment import (
    PAGE,
    Memory,
    Segment,
    byte_view,
    segment_identity,
    ticket_table,
)
from triptych.transfer.wire import (
    ByteRange,
    StatusQuery,
    WriteDone,
    WriteRequest,
    encode_message,
    transfer_deadline,
)

log = logging.getLogger(__name__)
STATUS_QUERY_SECONDS = 0.5  # how often a reader asks whether its transfer is under way
LATE_WRITE_SECONDS = 5.0  # what a lost owner has sent may arrive for so long

GONE = "the tensors are gone with their owner, or were given back"


class RemoteTensors(Struct, frozen=True):
    """Where a ticket's bytes are, as its reader sees it."""

    agent: str
    metadata: bytes
    generation: int
    epoch: int
    key: bytes
    pieces: tuple[tuple[MemoryDescriptor, bytes, int], ...]  # with nonce and place in the table


class ReceiveBuffer(Struct, frozen=True):
    """The reader's memory: room for all ranges, and behind them for a page of every piece."""

    memory: Memory
    segment: Segment
    ranges: tuple[ByteRange, ...]

    @property
    def start(self) -> int:
        return ctypes.addressof(self.memory) + PAGE

    def places(self) -> list[int]:
        return aligned_offsets(r.size for r in self.ranges)[0]

    def views(self) -> list[memoryview]:
        body = byte_view(self.memory)[PAGE:]
        return [body[at : at + r.size] for at, r in zip(self.places(), self.ranges, strict=True)]

    @property
    def size(self) -> int:
        return sum(r.size for r in self.ranges)


class ReadOperation:
    """A READ of our own: first the bytes, then the pages that vouch for them."""

    pace = AT_WORK

    def __init__(
        self, agent: NixlAgent, source: RemoteTensors, scratch: ReceiveBuffer, done: Future[None]
    ) -> None:
        self._agent = agent
        self._source = source
        self._scratch = scratch
        self._done = done
        self._patience = transfer_deadline(scratch.size)
        self._pages = False
        self._move: RunningTransfer | None = None

    def start(self) -> None:
        pieces, ranges, start = self._source.pieces, self._scratch.ranges, self._scratch.start
        there = [(pieces[r.piece][0][0] + PAGE + r.offset, r.size, 0) for r in ranges]
        places = zip(self._scratch.places(), ranges, strict=True)
        self._go([(start + at, r.size, 0) for at, r in places], there)

    def _start_pages(self) -> None:
        end = self._page_at()
        here = [(self._scratch.start + end + i * PAGE, PAGE, 0) for i in range(self._count)]
        self._pages = True
        self._go(here, [(piece[0][0], PAGE, 0) for piece in self._source.pieces])

    def _go(self, here: list[MemoryDescriptor], there: list[MemoryDescriptor]) -> None:
        if self._move is not None:
            self._move.release()
        self._move = self._agent.start("READ", here, there, self._source.agent)

    @property
    def _count(self) -> int:
        return len(self._source.pieces)

    def _page_at(self) -> int:
        return aligned_offsets(r.size for r in self._scratch.ranges)[1]

    def step(self) -> bool:
        if self._move is None:
            return True
        try:
            over = self._move.done()
            if over and not self._pages:
                self._start_pages()
                over = self._move.done()
            if not over:
                self._look_at_clock()
                return False
            self._verify()
        except TicketLost as error:
            fail(self._done, error)
        except Exception as error:  # noqa: BLE001
            self.lose(error)
        self.abort()
        return True

    def _verify(self) -> None:
        body = byte_view(self._scratch.memory)[PAGE + self._page_at() :]
        for index, (spot, nonce, slot) in enumerate(self._source.pieces):
            page = body[index * PAGE : (index + 1) * PAGE]
            expected = (nonce, self._source.epoch, spot[1] - PAGE)
            if (
                segment_identity(page) != expected
                or ticket_table(page)[slot] != self._source.generation
            ):
                raise TicketLost(GONE)
        succeed(self._done)

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._patience:
            self.pace = ASLEEP  # the memory is ours again when the transfer is over
            fail(self._done, TicketLost("the tensors did not come in time"))

    def lose(self, error: Exception) -> None:
        _tell(self._source, error)
        fail(self._done, TicketLost(GONE))
        if broken(error):
            self._agent.part(self._source.agent)

    def abort(self) -> None:
        if self._move is not None:
            self._move.release()
            self._move = None
        fail(self._done, TicketLost("this process is ending"))


class ReceiveOperation:
    """A WRITE of the owner's into our scratch."""

    pace = AT_WORK

    def __init__(
        self,
        agent: NixlAgent,
        source: RemoteTensors,
        scratch: ReceiveBuffer,
        token: bytes,
        done: Future[None],
        register: dict[bytes, ReceiveOperation],
    ) -> None:
        self._agent = agent
        self._source = source
        self._scratch = scratch
        self._token = token
        self._done = done
        self._register = register
        self._patience = transfer_deadline(scratch.size)
        self._ask_at = time.monotonic() + STATUS_QUERY_SECONDS
        self._lost_at = 0.0
        self._over = False
        register[token] = self

    def start(self) -> None:
        wanted = WriteRequest(
            self._token,
            self._source.generation,
            self._source.key,
            self._agent.metadata([self._scratch.segment]),
            self._scratch.start,
            self._scratch.ranges,
        )
        self._agent.tell(self._source.agent, encode_message(wanted))

    def end(self, moved: WriteDone | None) -> None:
        """The owner is done with it, one way or the other."""
        self._over = True
        if moved is None:
            fail(self._done, TicketLost(GONE))
        elif self._done.done():
            return
        elif moved.generation != self._source.generation:
            fail(self._done, TicketLost(GONE))
        elif moved.checksum != checksum(self._scratch.views()):
            log.error("tensors of %s arrived damaged and were dropped", self._source.agent)
            fail(self._done, TicketLost("the tensors were damaged on their way"))
        else:
            succeed(self._done)

    def step(self) -> bool:
        now = time.monotonic()
        if self._done.done() and not self._over:
            self.pace = ASLEEP  # nobody waits; the memory is ours again when we hear of it
        elif now > self._patience:
            fail(self._done, TicketLost("the tensors did not come in time"))
        if not self._over and not self._lost_at and now > self._ask_at:
            self._ask_at = now + STATUS_QUERY_SECONDS
            try:
                about = self._agent.metadata([self._scratch.segment])
                # Another transfer may have parted with it.
                self._agent.meet(self._source.agent, self._source.metadata)
                self._agent.tell(
                    self._source.agent, encode_message(StatusQuery(self._token, about))
                )
            except Exception as error:  # noqa: BLE001
                self.lose(error)
        if self._over or (self._lost_at and now > self._lost_at + LATE_WRITE_SECONDS):
            self._register.pop(self._token, None)
            return True
        return False

    def lose(self, error: Exception) -> None:
        _tell(self._source, error)
        fail(self._done, TicketLost(GONE))
        self._lost_at = time.monotonic()
        if broken(error):
            self._agent.part(self._source.agent)

    def abort(self) -> None:
        fail(self._done, TicketLost("this process is ending"))


def _tell(source: RemoteTensors, error: Exception) -> None:
    level = logging.INFO if broken(error) else logging.WARNING
    log.log(level, "tensors of %s did not come: %s", source.agent, error)


def succeed(done: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        done.set_result(None)


def fail(done: Future[None], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        if not done.done():
            done.set_exception(error)
