"""How a ticket's bytes get from one NIXL agent to another. All of it runs in the agent's thread.

On one host the reader READs: the kernel copies, and the owner need not wake. Afterwards it reads
the segments' first pages: a serial is entered once and removed once, so one that stands there
now has stood there all the time. Between hosts the reader asks and the owner WRITEs, about
twice as fast over TCP: the owner looks up the serial, keeps the memory while it sends, and
reports the checksum of what it sent. The reader hands out nothing before it has compared that.

Memory that the owner may still write to stays reserved until that is over: a reader that gave up
asks until the owner answers, or until the owner is gone.

Nothing is retried here: a lost ticket makes the pipeline run the request again, and by then a
broken connection is a new one. Messages are msgpack, never a pickle as NIXL's own lists are.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError

import msgspec
import numpy
from msgspec import Struct

from triptych.errors import TicketLost
from triptych.transfer.base import aligned_offsets
from triptych.transfer.nixl_agent import (
    ACTIVE_SECONDS,
    ASLEEP_SECONDS,
    MemoryDescriptor,
    NixlAgent,
    NixlError,
    RunningTransfer,
)
from triptych.transfer.segment import (
    PAGE,
    Memory,
    Segment,
    byte_view,
    segment_identity,
    ticket_table,
)
from triptych.transfer.shm import OpenTicket

log = logging.getLogger(__name__)
TRANSFER_SECONDS = (
    20.0  # for a transfer, and one more for every so many bytes: NIXL has no deadline
)
SLOWEST_BYTES_PER_SECOND = 10 << 20
STATUS_QUERY_SECONDS = 0.5  # how often a reader asks whether its transfer is under way
LATE_WRITE_SECONDS = 5.0  # what a lost owner has sent may arrive for so long
REMEMBERED_REFUSALS = 4096

GONE = "the owner of the tensors is gone, or has released them"
ENDING = "this process is ending"
_BLOCK = 4096
_SMALL = 16 << 10  # bytes below which the plain CRC is as quick


class ByteRange(Struct, frozen=True, array_like=True):
    """Bytes behind the first page of one of a ticket's segments."""

    piece: int
    offset: int
    size: int


class WriteRequest(Struct, frozen=True, array_like=True, tag=1):
    """A reader asks for its ticket's bytes, one range behind the other from ``target`` on."""

    token: bytes  # names the transfer
    serial: int
    key: bytes  # the first segment's nonce: only a process that has the ticket knows it
    metadata: bytes
    target: int
    ranges: tuple[ByteRange, ...]


class StatusQuery(Struct, frozen=True, array_like=True, tag=2):
    """Is the transfer under way? The owner answers with a refusal if not, and else not at all."""

    token: bytes
    metadata: bytes


class WriteDone(Struct, frozen=True, array_like=True, tag=3):
    token: bytes
    serial: int
    checksum: int


class WriteRefused(Struct, frozen=True, array_like=True, tag=4):
    token: bytes


decode_message = msgspec.msgpack.Decoder(
    WriteRequest | StatusQuery | WriteDone | WriteRefused
).decode
encode_message = msgspec.msgpack.encode


def transfer_deadline(size: int) -> float:
    return time.monotonic() + TRANSFER_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def checksum(views: Iterable[memoryview]) -> int:
    """Of the views one behind the other. Lets other threads run meanwhile.

    Sums of the 64-bit words of every 4 KiB, and a CRC over those sums: 27 GB/s where a plain CRC
    does 4. It finds a page that is missing, old or swapped; it does not prevent forgery.
    """
    found = 0
    for view in views:
        whole = 0
        if view.nbytes >= _SMALL:
            whole = view.nbytes // _BLOCK * _BLOCK
            words = numpy.frombuffer(view[:whole], numpy.uint64)
            sums = words.reshape(-1, _BLOCK // 8).sum(axis=1, dtype=numpy.uint64)
            found = zlib.crc32(sums.tobytes(), found)
        found = zlib.crc32(view[whole:], found)
    return found


class RemoteTensors(Struct, frozen=True):
    """Where a ticket's bytes are, as its reader sees it."""

    agent: str
    metadata: bytes
    serial: int
    epoch: int
    key: bytes
    pieces: tuple[tuple[MemoryDescriptor, bytes, int], ...]  # with nonce and slot in the table


class ReceiveBuffer(Struct, frozen=True):
    """The reader's memory: space for all ranges, and behind them for a page of every segment."""

    memory: Memory
    segment: Segment
    ranges: tuple[ByteRange, ...]

    @property
    def start(self) -> int:
        return ctypes.addressof(self.memory) + PAGE

    def offsets(self) -> list[int]:
        return aligned_offsets(r.size for r in self.ranges)[0]

    def views(self) -> list[memoryview]:
        body = byte_view(self.memory)[PAGE:]
        return [body[at : at + r.size] for at, r in zip(self.offsets(), self.ranges, strict=True)]

    @property
    def size(self) -> int:
        return sum(r.size for r in self.ranges)


class ReadOperation:
    """A READ of our own: first the bytes, then the pages that vouch for them."""

    pace = ACTIVE_SECONDS

    def __init__(
        self, agent: NixlAgent, source: RemoteTensors, buffer: ReceiveBuffer, done: Future[None]
    ) -> None:
        self._agent = agent
        self._source = source
        self._buffer = buffer
        self._done = done
        self._deadline = transfer_deadline(buffer.size)
        self._reading_pages = False
        self._transfer: RunningTransfer | None = None

    def start(self) -> None:
        pieces, ranges, start = self._source.pieces, self._buffer.ranges, self._buffer.start
        there = [(pieces[r.piece][0][0] + PAGE + r.offset, r.size, 0) for r in ranges]
        offsets = zip(self._buffer.offsets(), ranges, strict=True)
        self._read([(start + at, r.size, 0) for at, r in offsets], there)

    def _start_pages(self) -> None:
        first = self._buffer.start + self._pages_offset()
        here = [(first + i * PAGE, PAGE, 0) for i in range(len(self._source.pieces))]
        self._reading_pages = True
        self._read(here, [(piece[0][0], PAGE, 0) for piece in self._source.pieces])

    def _read(self, here: list[MemoryDescriptor], there: list[MemoryDescriptor]) -> None:
        if self._transfer is not None:
            self._transfer.release()
        self._transfer = self._agent.start_transfer("READ", here, there, self._source.agent)

    def _pages_offset(self) -> int:
        return aligned_offsets(r.size for r in self._buffer.ranges)[1]

    def step(self) -> bool:
        if self._transfer is None:
            return True
        try:
            over = self._transfer.done()
            if over and not self._reading_pages:
                self._start_pages()
                over = self._transfer.done()
            if not over:
                self._check_deadline()
                return False
            self._verify()
        except TicketLost as error:
            fail(self._done, error)
        except NixlError as error:
            self.give_up(error)
        self.abort()
        return True

    def _verify(self) -> None:
        body = byte_view(self._buffer.memory)[PAGE + self._pages_offset() :]
        for index, (place, nonce, slot) in enumerate(self._source.pieces):
            page = body[index * PAGE : (index + 1) * PAGE]
            expected = (nonce, self._source.epoch, place[1] - PAGE)
            entered = ticket_table(page)[slot]
            if segment_identity(page) != expected or entered != self._source.serial:
                raise TicketLost(GONE)
        succeed(self._done)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            self.pace = ASLEEP_SECONDS  # the memory is ours again when the transfer is over
            fail(self._done, TicketLost("the tensors did not arrive in time"))

    def give_up(self, error: NixlError) -> None:
        _lose(self._agent, self._source, self._done, error)

    def abort(self) -> None:
        if self._transfer is not None:
            self._transfer.release()
            self._transfer = None
        fail(self._done, TicketLost(ENDING))


class ReceiveOperation:
    """A WRITE of the owner's into our buffer."""

    pace = ACTIVE_SECONDS

    def __init__(
        self,
        agent: NixlAgent,
        source: RemoteTensors,
        buffer: ReceiveBuffer,
        token: bytes,
        done: Future[None],
        register: dict[bytes, ReceiveOperation],
    ) -> None:
        self._agent = agent
        self._source = source
        self._buffer = buffer
        self._token = token
        self._done = done
        self._register = register
        self._deadline = transfer_deadline(buffer.size)
        self._query_at = time.monotonic() + STATUS_QUERY_SECONDS
        self._lost_at = 0.0
        self._over = False
        register[token] = self

    def start(self) -> None:
        request = WriteRequest(
            self._token,
            self._source.serial,
            self._source.key,
            self._agent.metadata([self._buffer.segment]),
            self._buffer.start,
            self._buffer.ranges,
        )
        self._agent.notify(self._source.agent, encode_message(request))

    def finish(self, answer: WriteDone | WriteRefused) -> None:
        """The owner writes no more into the buffer."""
        self._over = True
        if self._done.done():
            return
        if isinstance(answer, WriteRefused) or answer.serial != self._source.serial:
            fail(self._done, TicketLost(GONE))
        elif answer.checksum != checksum(self._buffer.views()):
            log.error("dropped tensors of %s that arrived damaged", self._source.agent)
            fail(self._done, TicketLost("the tensors were damaged on their way"))
        else:
            succeed(self._done)

    def step(self) -> bool:
        now = time.monotonic()
        if self._done.done() and not self._over:
            self.pace = ASLEEP_SECONDS  # nobody waits; the owner's answer frees the memory
        elif now > self._deadline:
            fail(self._done, TicketLost("the tensors did not arrive in time"))
        if not self._over and not self._lost_at and now > self._query_at:
            self._query_at = now + STATUS_QUERY_SECONDS
            try:
                own = self._agent.metadata([self._buffer.segment])
                # Another transfer may have removed the owner.
                self._agent.add_remote(self._source.agent, self._source.metadata)
                self._agent.notify(
                    self._source.agent, encode_message(StatusQuery(self._token, own))
                )
            except NixlError as error:
                self.give_up(error)
        if self._over or (self._lost_at and now > self._lost_at + LATE_WRITE_SECONDS):
            self._register.pop(self._token, None)
            return True
        return False

    def give_up(self, error: NixlError) -> None:
        self._lost_at = time.monotonic()
        _lose(self._agent, self._source, self._done, error)

    def abort(self) -> None:
        fail(self._done, TicketLost(ENDING))


class SendOperation:
    """A WRITE of ours into a reader's buffer. Keeps the ticket's memory until it is over."""

    pace = ACTIVE_SECONDS

    def __init__(
        self,
        agent: NixlAgent,
        find: Callable[[int], OpenTicket | None],
        reader: str,
        request: WriteRequest,
        ticket: OpenTicket,
        register: dict[bytes, SendOperation],
    ) -> None:
        self._agent = agent
        self._find = find
        self._reader = reader
        self._request = request
        self._ticket = ticket
        self._register = register
        self._deadline = transfer_deadline(sum(r.size for r in request.ranges))
        self._checksum = 0
        self._memory: list[Memory] = []
        self._transfer: RunningTransfer | None = None

    def start(self, segments: list[tuple[Memory, Segment]]) -> None:
        """Raises ValueError for ranges outside the ticket's segments."""
        ranges = self._request.ranges
        for r in ranges:
            if not 0 <= r.piece < len(segments) or r.offset < 0 or r.size < 1:
                raise ValueError("the reader asks for a range that the ticket does not have")
            if r.offset + r.size > segments[r.piece][1].capacity:
                raise ValueError("the reader asks for a range beyond the end of the ticket")
        self._memory = [memory for memory, _ in segments]
        bodies = [byte_view(memory)[PAGE:] for memory in self._memory]
        self._checksum = checksum(bodies[r.piece][r.offset : r.offset + r.size] for r in ranges)
        bases = [self._agent.register(segment)[0] + PAGE for _, segment in segments]
        here = [(bases[r.piece] + r.offset, r.size, 0) for r in ranges]
        offsets, _ = aligned_offsets(r.size for r in ranges)
        target = self._request.target
        there = [(target + at, r.size, 0) for at, r in zip(offsets, ranges, strict=True)]
        self._agent.add_remote(self._reader, self._request.metadata)
        self._transfer = self._agent.start_transfer("WRITE", here, there, self._reader)
        self._register[self._request.token] = self

    def step(self) -> bool:
        try:
            if self._transfer is not None and not self._transfer.done():
                if time.monotonic() > self._deadline and self.pace == ACTIVE_SECONDS:
                    self.pace = ASLEEP_SECONDS
                    self._agent.remove_remote(self._reader)  # which ends the transfer in time
                return False
            answer = self._answer()
            self.abort()  # first: when the reader knows, the memory is free again
            self._agent.notify(self._reader, encode_message(answer))
        except NixlError as error:
            log.info("the reader %s of tensors is gone: %s", self._reader, error)
            self._agent.remove_remote(self._reader)
        self.abort()
        return True

    def _answer(self) -> WriteDone | WriteRefused:
        token, serial = self._request.token, self._request.serial
        valid = self._find(serial) is self._ticket
        return WriteDone(token, serial, self._checksum) if valid else WriteRefused(token)

    def abort(self) -> None:
        self._register.pop(self._request.token, None)
        if self._transfer is not None:
            self._transfer.release()
            self._transfer = None
        self._memory = []


class NixlTransfers:
    """Both sides: what we fetch, and what others ask us for. ``find``: the open tickets."""

    def __init__(self, agent: NixlAgent, find: Callable[[int], OpenTicket | None]) -> None:
        self._agent = agent
        self._find = find
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._receiving: dict[bytes, ReceiveOperation] = {}
        self._sending: dict[bytes, SendOperation] = {}
        agent.on_message = self.on_message

    def read(self, source: RemoteTensors, buffer: ReceiveBuffer, done: Future[None]) -> None:
        self._begin(ReadOperation(self._agent, source, buffer, done), source, buffer)

    def request_write(
        self, source: RemoteTensors, buffer: ReceiveBuffer, token: bytes, done: Future[None]
    ) -> None:
        operation = ReceiveOperation(self._agent, source, buffer, token, done, self._receiving)
        self._begin(operation, source, buffer)

    def _begin(
        self,
        operation: ReadOperation | ReceiveOperation,
        source: RemoteTensors,
        buffer: ReceiveBuffer,
    ) -> None:
        try:
            self._agent.register(buffer.segment)
            self._agent.add_remote(source.agent, source.metadata)
            operation.start()
        except NixlError as error:
            operation.give_up(error)
        self._agent.operations.append(operation)

    def on_message(self, sender: str, message: bytes) -> None:
        """Any process that reaches the port may send a message, so it may hold anything."""
        try:
            received = decode_message(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            log.warning("ignored an unrecognized NIXL message from %r", sender)
            return
        match received:
            case WriteRequest():
                self._send(sender, received)
            case StatusQuery() if received.token not in self._sending:
                self._refuse(sender, received.token, received.metadata)
            case WriteDone() | WriteRefused():
                operation = self._receiving.get(received.token)
                if operation is not None:
                    operation.finish(received)

    def _send(self, reader: str, request: WriteRequest) -> None:
        if request.token in self._refused or request.token in self._sending:
            return
        ticket = self._find(request.serial)
        segments = [] if ticket is None else ticket.segments
        known = segments and hmac.compare_digest(segments[0][1].nonce, request.key)
        if ticket is None or not known:
            self._refuse(reader, request.token, request.metadata)
            return
        operation = SendOperation(self._agent, self._find, reader, request, ticket, self._sending)
        try:
            operation.start(segments)
        except (NixlError, ValueError) as error:
            log.warning("could not send tensors to %s: %s", reader, error)
            operation.abort()
            if isinstance(error, NixlError) and error.disconnected:
                self._agent.remove_remote(reader)
            self._refuse(reader, request.token, request.metadata)
            return
        self._agent.operations.append(operation)

    def _refuse(self, reader: str, token: bytes, metadata: bytes) -> None:
        """Refuse for good: a request may arrive after the query that was sent later."""
        self._refused[token] = None
        if len(self._refused) > REMEMBERED_REFUSALS:
            self._refused.popitem(last=False)
        with contextlib.suppress(NixlError):  # a reader that is gone needs no answer
            self._agent.add_remote(reader, metadata)
            self._agent.notify(reader, encode_message(WriteRefused(token)))


def _lose(agent: NixlAgent, source: RemoteTensors, done: Future[None], error: NixlError) -> None:
    level = logging.INFO if error.disconnected else logging.WARNING
    log.log(level, "tensors of %s did not arrive: %s", source.agent, error)
    fail(done, TicketLost(GONE))
    if error.disconnected:
        agent.remove_remote(source.agent)


def succeed(done: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        done.set_result(None)


def fail(done: Future[None], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        if not done.done():
            done.set_exception(error)
