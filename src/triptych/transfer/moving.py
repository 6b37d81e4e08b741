"""How the bytes of a ticket get from one NIXL agent to another. All of it in the agent's thread.

On one host the reader READs: the kernel copies, and the owner need not wake. Afterwards it reads
the segments' first pages: a generation is entered once and struck out once, so one that stands
there now has stood there all the time. Between hosts the reader asks and the owner WRITEs, two to
four times as fast over TCP: the owner looks up the generation, holds the memory while it sends,
and tells the checksum of what it sent. Nothing is handed out before that has been compared.

Memory that another side may still write to is kept until that is over: a reader that gave up asks
until it is told so, or until the other side is gone. Nothing is tried twice here: who takes a
ticket for lost walks again, and then a connection that had broken is a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec
from msgspec import Struct

from triptych.errors import TicketLost
from triptych.transfer.agent import ASLEEP, AT_WORK, Agent, Spot, broken
from triptych.transfer.checksum import checksum
from triptych.transfer.layout import stacked
from triptych.transfer.segment import PAGE, Memory, Segment, flat, identity, table
from triptych.transfer.shm import Grant

log = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds for a transfer, and one more for every so many bytes
SLOWEST = 10 << 20
ASK_SECONDS = 0.5  # how often a reader asks whether its transfer is under way
GRACE_SECONDS = 5.0  # what a lost owner has sent may arrive for so long
REMEMBERED = 4096  # refusals

GONE = "the tensors are gone with their owner, or were given back"


class Range(Struct, frozen=True, array_like=True):
    """Bytes behind the first page of a ticket's piece."""

    piece: int
    offset: int
    size: int


class Wanted(Struct, frozen=True, array_like=True, tag=1):
    """A reader asks for its ticket's bytes, one range behind the other from ``target`` on."""

    token: bytes  # names the transfer
    generation: int
    key: bytes  # the first piece's nonce: only who has the ticket knows it
    metadata: bytes
    target: int
    ranges: tuple[Range, ...]


class UnderWay(Struct, frozen=True, array_like=True, tag=2):
    """Is it? A refusal is the answer where it is not; none while it is."""

    token: bytes
    metadata: bytes


class Moved(Struct, frozen=True, array_like=True, tag=3):
    token: bytes
    generation: int
    checksum: int


class Refused(Struct, frozen=True, array_like=True, tag=4):
    token: bytes


_decode = msgspec.msgpack.Decoder(Wanted | UnderWay | Moved | Refused).decode
_encode = msgspec.msgpack.encode


class Source(Struct, frozen=True):
    """Where a ticket's bytes are, as its reader sees it."""

    agent: str
    metadata: bytes
    generation: int
    epoch: int
    key: bytes
    pieces: tuple[tuple[Spot, bytes, int], ...]  # with nonce and place in the table


class Scratch(Struct, frozen=True):
    """The reader's memory: room for all ranges, and behind them for a page of every piece."""

    memory: Memory
    segment: Segment
    ranges: tuple[Range, ...]

    @property
    def start(self) -> int:
        return ctypes.addressof(self.memory) + PAGE

    def places(self) -> list[int]:
        return stacked(r.size for r in self.ranges)[0]

    def views(self) -> list[memoryview]:
        body = flat(self.memory)[PAGE:]
        return [body[at : at + r.size] for at, r in zip(self.places(), self.ranges, strict=True)]

    @property
    def size(self) -> int:
        return sum(r.size for r in self.ranges)


class Mover:
    """Both sides: what we fetch, and what others ask us for. ``find``: the open tickets."""

    def __init__(self, agent: Agent, find: Callable[[int], Grant | None]) -> None:
        self._agent = agent
        self._find = find
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._receiving: dict[bytes, Receiving] = {}
        self._sending: dict[bytes, Sending] = {}
        agent.hear = self.hear

    def read(self, source: Source, scratch: Scratch, done: Future[None]) -> None:
        self._begin(Reading(self._agent, source, scratch, done), source, scratch)

    def ask(self, source: Source, scratch: Scratch, token: bytes, done: Future[None]) -> None:
        job = Receiving(self._agent, source, scratch, token, done, self._receiving)
        self._begin(job, source, scratch)

    def _begin(self, job: Reading | Receiving, source: Source, scratch: Scratch) -> None:
        try:
            self._agent.register(scratch.segment)
            self._agent.meet(source.agent, source.metadata)
            job.start()
        except Exception as error:  # noqa: BLE001 (NIXL's are of many kinds)
            job.lose(error)
        self._agent.jobs.append(job)

    def hear(self, sender: str, message: bytes) -> None:
        """What another agent says. It need not be one of ours: anything may stand there."""
        try:
            said = _decode(message)
        except msgspec.MsgspecError:
            log.warning("a NIXL agent said something that nobody here understands")
            return
        match said:
            case Wanted():
                self._send(sender, said)
            case UnderWay() if said.token not in self._sending:
                self._refuse(sender, said.token, said.metadata)
            case Moved() | Refused() if (job := self._receiving.get(said.token)) is not None:
                job.end(said if isinstance(said, Moved) else None)

    def _send(self, reader: str, wanted: Wanted) -> None:
        if wanted.token in self._refused or wanted.token in self._sending:
            return
        grant = self._find(wanted.generation)
        held = [] if grant is None else grant.held
        if grant is None or not held or not hmac.compare_digest(held[0][1].nonce, wanted.key):
            self._refuse(reader, wanted.token, wanted.metadata)
            return
        job = Sending(self._agent, self._find, reader, wanted, grant, self._sending)
        try:
            job.start(held)
        except Exception as error:  # noqa: BLE001
            log.warning("tensors could not be sent: %s", error)
            job.abort()
            if broken(error):
                self._agent.part(reader)
            self._refuse(reader, wanted.token, wanted.metadata)
            return
        self._agent.jobs.append(job)

    def _refuse(self, reader: str, token: bytes, metadata: bytes) -> None:
        """Say no, and stay with it: what was asked before may come later than the question."""
        self._refused[token] = None
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)
        with contextlib.suppress(Exception):  # whoever is gone needs no answer
            self._agent.meet(reader, metadata)
            self._agent.tell(reader, _encode(Refused(token)))


class Reading:
    """A READ of our own: first the bytes, then the pages that vouch for them."""

    pace = AT_WORK

    def __init__(self, agent: Agent, source: Source, scratch: Scratch, done: Future[None]) -> None:
        self._agent = agent
        self._source = source
        self._scratch = scratch
        self._done = done
        self._patience = _patience(scratch.size)
        self._pages = False
        self._move: Any = None

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

    def _go(self, here: list[Spot], there: list[Spot]) -> None:
        if self._move is not None:
            self._move.release()
        self._move = self._agent.start("READ", here, there, self._source.agent)

    @property
    def _count(self) -> int:
        return len(self._source.pieces)

    def _page_at(self) -> int:
        return stacked(r.size for r in self._scratch.ranges)[1]

    def step(self) -> bool:
        if self._move is None:
            return True
        try:
            if not self._move.done():
                self._look_at_clock()
                return False
            if not self._pages:
                self._start_pages()
                return False
            self._verify()
        except TicketLost as error:
            _fail(self._done, error)
        except Exception as error:  # noqa: BLE001
            self.lose(error)
        self.abort()
        return True

    def _verify(self) -> None:
        body = flat(self._scratch.memory)[PAGE + self._page_at() :]
        for index, (spot, nonce, slot) in enumerate(self._source.pieces):
            page = body[index * PAGE : (index + 1) * PAGE]
            expected = (nonce, self._source.epoch, spot[1] - PAGE)
            if identity(page) != expected or table(page)[slot] != self._source.generation:
                raise TicketLost(GONE)
        _succeed(self._done)

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._patience:
            self.pace = ASLEEP  # the memory is ours again when the transfer is over
            _fail(self._done, TicketLost("the tensors did not come in time"))

    def lose(self, error: Exception) -> None:
        _tell(self._source, error)
        _fail(self._done, TicketLost(GONE))
        if broken(error):
            self._agent.part(self._source.agent)

    def abort(self) -> None:
        if self._move is not None:
            self._move.release()
            self._move = None
        _fail(self._done, TicketLost("this process is ending"))


class Receiving:
    """A WRITE of the owner's into our scratch."""

    pace = AT_WORK

    def __init__(
        self,
        agent: Agent,
        source: Source,
        scratch: Scratch,
        token: bytes,
        done: Future[None],
        register: dict[bytes, Receiving],
    ) -> None:
        self._agent = agent
        self._source = source
        self._scratch = scratch
        self._token = token
        self._done = done
        self._register = register
        self._patience = _patience(scratch.size)
        self._ask_at = time.monotonic() + ASK_SECONDS
        self._lost_at = 0.0
        self._over = False
        register[token] = self

    def start(self) -> None:
        wanted = Wanted(
            self._token,
            self._source.generation,
            self._source.key,
            self._agent.metadata([self._scratch.segment]),
            self._scratch.start,
            self._scratch.ranges,
        )
        self._agent.tell(self._source.agent, _encode(wanted))

    def end(self, moved: Moved | None) -> None:
        """The owner is done with it, one way or the other."""
        self._over = True
        if moved is None:
            _fail(self._done, TicketLost(GONE))
        elif self._done.done():
            return
        elif moved.generation != self._source.generation:
            _fail(self._done, TicketLost(GONE))
        elif moved.checksum != checksum(self._scratch.views()):
            log.error("tensors of %s arrived damaged and were dropped", self._source.agent)
            _fail(self._done, TicketLost("the tensors were damaged on their way"))
        else:
            _succeed(self._done)

    def step(self) -> bool:
        now = time.monotonic()
        if self._done.done() and not self._over:
            self.pace = ASLEEP  # nobody waits; the memory is ours again when we hear of it
        elif now > self._patience:
            _fail(self._done, TicketLost("the tensors did not come in time"))
        if not self._over and not self._lost_at and now > self._ask_at:
            self._ask_at = now + ASK_SECONDS
            try:
                about = self._agent.metadata([self._scratch.segment])
                self._agent.tell(self._source.agent, _encode(UnderWay(self._token, about)))
            except Exception as error:  # noqa: BLE001
                self.lose(error)
        if self._over or (self._lost_at and now > self._lost_at + GRACE_SECONDS):
            self._register.pop(self._token, None)
            return True
        return False

    def lose(self, error: Exception) -> None:
        _tell(self._source, error)
        _fail(self._done, TicketLost(GONE))
        self._lost_at = time.monotonic()
        if broken(error):
            self._agent.part(self._source.agent)

    def abort(self) -> None:
        _fail(self._done, TicketLost("this process is ending"))


class Sending:
    """A WRITE of ours into a reader's scratch. Holds the ticket's memory until it is over."""

    pace = AT_WORK

    def __init__(
        self,
        agent: Agent,
        find: Callable[[int], Grant | None],
        reader: str,
        wanted: Wanted,
        grant: Grant,
        register: dict[bytes, Sending],
    ) -> None:
        self._agent = agent
        self._find = find
        self._reader = reader
        self._wanted = wanted
        self._grant = grant
        self._register = register
        self._patience = _patience(sum(r.size for r in wanted.ranges))
        self._checksum = 0
        self._memory: list[Memory] = []
        self._move: Any = None

    def start(self, held: list[tuple[Memory, Segment]]) -> None:
        ranges = self._wanted.ranges
        for r in ranges:
            if not 0 <= r.piece < len(held) or r.offset < 0 or r.size < 1:
                raise ValueError("a range that no ticket has")
            if r.offset + r.size > held[r.piece][1].capacity:
                raise ValueError("a range that reaches beyond its ticket")
        self._memory = [memory for memory, _ in held]
        bodies = [flat(memory)[PAGE:] for memory in self._memory]
        self._checksum = checksum(bodies[r.piece][r.offset : r.offset + r.size] for r in ranges)
        bases = [self._agent.register(segment)[0] + PAGE for _, segment in held]
        here = [(bases[r.piece] + r.offset, r.size, 0) for r in ranges]
        places, _ = stacked(r.size for r in ranges)
        target = self._wanted.target
        there = [(target + at, r.size, 0) for at, r in zip(places, ranges, strict=True)]
        self._agent.meet(self._reader, self._wanted.metadata)
        self._move = self._agent.start("WRITE", here, there, self._reader)
        self._register[self._wanted.token] = self

    def step(self) -> bool:
        try:
            if not self._move.done():
                if time.monotonic() > self._patience and self.pace == AT_WORK:
                    self.pace = ASLEEP
                    self._agent.part(self._reader)  # which ends it, one of these times
                return False
            self._answer()
        except Exception as error:  # noqa: BLE001
            log.info("a reader of tensors is gone: %s", error)
            self._agent.part(self._reader)
        self.abort()
        return True

    def _answer(self) -> None:
        token, generation = self._wanted.token, self._wanted.generation
        still = self._find(generation) is self._grant
        answer = Moved(token, generation, self._checksum) if still else Refused(token)
        self._agent.tell(self._reader, _encode(answer))

    def abort(self) -> None:
        self._register.pop(self._wanted.token, None)
        if self._move is not None:
            self._move.release()
        self._memory = []


def _tell(source: Source, error: Exception) -> None:
    level = logging.INFO if broken(error) else logging.WARNING
    log.log(level, "tensors of %s did not come: %s", source.agent, error)


def _patience(size: int) -> float:
    return time.monotonic() + PATIENCE + size / SLOWEST


def _succeed(done: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        done.set_result(None)


def _fail(done: Future[None], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        if not done.done():
            done.set_exception(error)
