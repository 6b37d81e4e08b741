"""A client's connection: takes requests apart and serves them one after the other.

Bodies are received straight into one buffer; heads are small and go through another. A large body
waits for room before it is read (``intake``). One request at a time is served; what a client sends
ahead waits. Every wait has a deadline, which the server watches, and a client that does not read
pauses whoever makes its tokens.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, BufferedProtocol, Event, Task, Transport
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from triptych.config import Limits
from triptych.errors import (
    HeadersTooLarge,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    TriptychError,
)
from triptych.frontend.buffers import Body, Buffers
from triptych.frontend.exchange import REASONS, Exchange, new_id, refusal
from triptych.frontend.head import Head, parse
from triptych.frontend.intake import LARGE, SHARE, Intake

FIRST = 64 << 10  # bytes that are read before it is known what they are
AHEAD = 64 << 10  # bytes that a client may send ahead of its answer
HIGH_WATER = 64 << 10  # unread answer bytes at which the token source is paused
UNREAD = 1 << 20  # bytes that a paused stream may still add: its worker's window fits in
LINGER_SECONDS = 2.0  # after a refusal: time to read it while what it refuses still pours in
LINGER_BYTES = 16 << 20
BODILESS_BYTES = 16 << 10  # of a body that nobody will look at
LOOKS = 60  # at how a large body comes in, during the time that others wait at most,
LATE = 5  # and so many at which it may be too slow, one after the other, while others do wait
IDLE_SECONDS = 75.0  # keep-alive without a request
NO_DEADLINE = float("inf")
NO_ROOM = "There is no room for so large a body at the moment. Try again."

Answer = Callable[[Exchange], Awaitable[None]]
Admit = Callable[[Head], None]
Refused = Callable[[TriptychError], None]


class House(Protocol):
    """What all connections of a server share."""

    loop: AbstractEventLoop
    limits: Limits
    connections: set[Connection]
    draining: bool
    settled: Event  # set when a connection has become idle or was lost
    scratch: memoryview  # for whatever has no buffer of its own
    buffers: Buffers
    intake: Intake
    answer: Answer
    admit: Admit
    refused: Refused

    def flush_soon(self, connection: Connection) -> None:
        """Have ``connection.flush`` called before the event loop waits again."""


class Connection(BufferedProtocol):
    """A client's connection: takes requests apart and serves them one after the other."""

    __slots__ = (
        "_body",
        "_due",
        "_ended",
        "_exchange",
        "_filled",
        "_head",
        "_late",
        "_lingered",
        "_loop",
        "_most",
        "_out",
        "_pending",
        "_queued",
        "_room",
        "_seen",
        "_stalled",
        "_transport",
        "_view",
        "deadline",
        "paused",
        "server",
        "task",
    )

    def __init__(self, server: House) -> None:
        self.server = server
        self.deadline = NO_DEADLINE  # what the client must do next is due then
        self.paused = False  # the client does not read
        self._most = 0  # bytes left unread at which it is cut, while paused
        self._ended = False  # the client will send no more, but has asked for something
        self._loop = server.loop
        self._transport: Transport | None = None
        self._out: list[bytes] = []  # pieces that leave together
        self._pending = bytearray()  # bytes of a head, or sent ahead of the answer
        self._head: Head | None = None  # of the request whose body is coming in
        self._body: Body = bytearray()
        self._queued: bytes | None = None  # while there is no room: what has come of the body
        self._view: memoryview | None = None  # the body's buffer while it is received in place
        self._filled = 0
        self._due = 0.0  # when the body must be there
        self._seen = 0  # bytes of it that were there at the last look
        self._late = 0  # looks at which too little had come
        self._room = 0  # bytes that a chunked body may have before it asks for more
        self._stalled = 0  # bytes of chunked framing without a byte of body
        self._lingered = -1  # bytes thrown away after a refusal; -1: none was given
        self._exchange: Exchange | None = None
        self.task: Task[None] | None = None

    @property
    def closing(self) -> bool:
        return self.server.draining or (self._ended and not self._pending)

    def answered(self) -> None:
        self.server.intake.answered(self)

    def take_back(self, buffer: Body) -> None:
        self.server.buffers.give(buffer)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = self._loop.time() + self.server.limits.header_seconds
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._transport = self._view = self._queued = None
        self.deadline = NO_DEADLINE
        self.server.intake.leave(self)
        self.server.settled.set()
        if self.task is not None:
            self.task.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._view is None:
            if self._lingered >= 0:
                return self.server.scratch[: self.server.intake.slice]
            return self.server.scratch if self._head is not None else self.server.scratch[:FIRST]
        return self._view[self._filled : self._filled + self.server.intake.slice]

    def buffer_updated(self, nbytes: int) -> None:
        if self._view is not None:
            self._filled += nbytes
            if self._filled == len(self._view):
                self._received()
            elif len(self._view) > LARGE:
                self._pace(nbytes)
            return
        data = self.server.scratch[:nbytes]
        if self._lingered >= 0:
            self._linger(nbytes)
        elif self._exchange is not None or self.paused:
            self._ahead(data)
        elif self._head is not None:
            self._guard(self._chunked, data)
        else:
            self._guard(self._heading, data)

    def eof_received(self) -> bool:
        """A client that will send no more may still wait for its answer: False closes our side.

        Or it has gone. The two look alike until something is written: see ``_probe``.
        """
        self._ended = self._exchange is not None and not self._exchange.head.old
        if self._ended and not self.paused:
            self.deadline = self._loop.time()
        return self._ended

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = self._loop.time() + self.server.limits.write_seconds
        streams = 1
        if self._exchange is not None and self._exchange.flow is not None:
            streams = self._exchange.streams
            self._exchange.flow.pause()
        if self._transport is not None:
            self._most = self._transport.get_write_buffer_size() + UNREAD * streams

    def resume_writing(self) -> None:
        self.paused = False
        self.deadline = NO_DEADLINE
        if self._exchange is None:
            self._next()
        elif self._exchange.flow is not None:
            self._exchange.flow.resume()

    # --- requests coming in

    def _guard(self, take: Callable[[bytes | memoryview], None], data: bytes | memoryview) -> None:
        try:
            take(data)
        except TriptychError as error:
            self.refuse(error)

    def _heading(self, data: bytes | memoryview) -> None:
        """Bytes of a head; whatever comes after it belongs to the body or the next request."""
        pending, limits = self._pending, self.server.limits
        if not pending:
            self.deadline = self._loop.time() + limits.header_seconds
        start = max(0, len(pending) - 3)
        pending += data
        end = pending.find(b"\r\n\r\n", start)
        if (len(pending) if end < 0 else end) > limits.header_bytes:
            raise HeadersTooLarge(f"The head is larger than {limits.header_bytes} bytes.")
        if end < 0:
            return
        with memoryview(pending) as view:
            head = parse(view[: end + 4], limits.headers)
            rest = bytes(view[end + 4 :])
        pending.clear()
        self.server.admit(head)
        if head.length > (most := self._most_bytes(head)):
            raise PayloadTooLarge(f"The body has {head.length} bytes; the limit is {most}.")
        self._expect(head, rest)

    def _most_bytes(self, head: Head) -> int:
        return BODILESS_BYTES if head.bodiless else self.server.limits.body_bytes

    def _expect(self, head: Head, rest: bytes) -> None:
        """Make room for the body that the head declares."""
        if not head.chunked and len(rest) >= head.length:
            self._pending += rest[head.length :]
            self._serve(head, bytearray(rest[: head.length]), head.length)
            return
        self._head = head
        if head.chunked:
            self._body, self._stalled, self._room = bytearray(), 0, LARGE
        if head.length <= LARGE or self._has_room(head.length):
            self._take(rest)
        else:
            self._wait(rest)

    def _take(self, rest: bytes) -> None:
        """Receive the body, of which this has come already."""
        head = self._head
        assert head is not None
        self.deadline = self._due = self._loop.time() + self.server.limits.body_seconds
        if head.length > LARGE or len(self._body) > LARGE:
            self._look(len(rest) or len(self._body))
        begun = rest or self._body
        if not begun and head.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            if rest:
                self._chunked(rest)
            return
        self._body = self.server.buffers.take(head.length)
        self._view = memoryview(self._body)[: head.length]
        self._filled = len(rest)  # at most what is read at once or kept ahead: it fits
        self._view[: self._filled] = rest

    # --- large bodies, as the intake sees them

    def _has_room(self, size: int) -> bool:
        """Whether a body can come in; if not, it waits, but no more do than may be served."""
        intake = self.server.intake
        if intake.waiting >= self.server.limits.requests:
            intake.refused += 1
            raise Overloaded(NO_ROOM)
        assert self._head is not None
        return intake.ask(self, size, self._head.tenant or self._address())

    def _address(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def _wait(self, rest: bytes) -> None:
        """There is no room for the body: leave it with the client. Its time does not run."""
        self._queued = rest
        self.deadline = self._loop.time() + self.server.limits.body_wait_seconds
        self.rest()

    def enter(self) -> None:
        rest, self._queued = self._queued, None
        if rest is not None:
            self._take(rest)
            self.wake()

    def rest(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def wake(self) -> None:
        reads = self._lingered >= 0 or (self._head is not None and self._queued is None)
        if reads and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _look(self, come: int) -> None:
        """See after a while what has come by then."""
        self._seen, self._late = come, 0
        self.deadline = min(self._due, self._loop.time() + self._pause())

    def _pause(self) -> float:
        return min(1.0, self.server.limits.body_wait_seconds / LOOKS)

    def _keeps_up(self) -> bool:
        """Whether a body may go on coming in.

        While others wait it must come at the pace at which it would be there in time.
        """
        limits, now = self.server.limits, self._loop.time()
        come = len(self._body) if self._view is None else self._filled
        whole = come if self._view is None else len(self._view)
        if self._head is None or whole <= LARGE or now >= self._due:
            return False
        late = 0
        if self.server.intake.waiting:
            self.server.intake.progress(self, come)
            if come - self._seen < whole * self._pause() / limits.body_seconds:
                late = self._late + 1
        self._look(come)
        self._late = late
        return late < LATE

    def _pace(self, nbytes: int) -> None:
        if not self.server.intake.count(nbytes):
            self.server.intake.rest(self)

    def _received(self) -> None:
        head, body = self._head, self._body
        assert head is not None
        size = self._filled if self._view is not None else len(body)
        self.server.intake.complete(self, size)
        self._view = self._head = None
        self._body = bytearray()
        self._serve(head, body, size)

    def _chunked(self, data: bytes | memoryview) -> None:
        head, limits = self._head, self.server.limits
        assert head is not None
        body = self._body
        assert isinstance(body, bytearray)
        before = len(body)
        complete = head.chunks(data, body, self._most_bytes(head))
        self._stalled = self._stalled + len(data) if len(body) == before else 0
        if complete:
            if head.surplus:
                head.keep_alive = False  # where the next request began, the parser can't tell
            self._received()
        elif self._stalled > limits.header_bytes:
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")
        elif len(body) > self._room:
            self._widen(before <= LARGE)
        elif before > LARGE:
            self._pace(len(data))

    def _widen(self, first: bool) -> None:
        """Make room for more of a chunked body: how large it will be, nobody knows."""
        intake = self.server.intake
        self._room = min(self.server.limits.body_bytes, max(SHARE, 4 * len(self._body)))
        if not first:
            if not intake.grow(self, self._room):
                intake.refused += 1
                raise Overloaded(NO_ROOM)
        elif self._has_room(self._room):
            self._look(len(self._body))
        else:
            self._wait(b"")

    def _ahead(self, data: bytes | memoryview) -> None:
        self._pending += data
        if len(self._pending) > AHEAD and self._transport is not None:
            self._transport.pause_reading()

    # --- answers going out

    def _serve(self, head: Head, body: Body, size: int) -> None:
        # To a client that sends no more, one that has gone looks the same: it is probed at once.
        self.deadline = self._loop.time() if self._ended else NO_DEADLINE
        exchange = self._exchange = Exchange(self, head, body, size)
        self.task = exchange.task = self._loop.create_task(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.server.answer(exchange)
        except asyncio.CancelledError:
            pass  # a task that keeps it keeps the frames of all the request, and these the task
        finally:
            self._exchange = self.task = exchange.task = None
            exchange.release()
            if exchange.large:
                self.server.intake.leave(self)
            self.server.settled.set()
            if not exchange.started or not exchange.head.keep_alive:
                self.close()
            elif not self.paused:
                self._next()

    def _next(self) -> None:
        """Go on with what was sent ahead, or wait for the next request."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.server.draining:
            self.close()
            return
        if not self._pending:
            self.deadline = self._loop.time() + IDLE_SECONDS
            return
        sent, self._pending = bytes(self._pending), bytearray()
        self._transport.resume_reading()
        self._guard(self._heading, sent)

    def put(self, data: bytes) -> None:
        """Write before the event loop waits again, together with whatever else comes until then."""
        out = self._out
        if not out:
            self.server.flush_soon(self)
        out.append(data)

    def write(self, data: bytes) -> None:
        """Write at once, after what was put before."""
        out = self._out
        if out:
            out.append(data)
            self.flush()
        elif self._transport is not None:
            self._transport.write(data)

    def flush(self) -> None:
        out, transport = self._out, self._transport
        if not out:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if transport is None:
            return
        transport.write(data)
        if self.paused and transport.get_write_buffer_size() > self._most:
            transport.abort()  # its source was told to pause, and has poured on

    def refuse(self, error: TriptychError) -> None:
        """Answer what can't be served, and let the client read that before its socket closes."""
        self.server.refused(error)
        status, body, extra = refusal(error)
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
            b"x-request-id: %b\r\nconnection: close\r\n\r\n%b"
            % (REASONS[status], len(body), extra, new_id("req-").encode(), body)
        )
        self._view = self._head = self._queued = None
        self._body, self._pending = bytearray(), bytearray()
        self._lingered = 0
        self.server.intake.leave(self)
        self.deadline = self._loop.time() + LINGER_SECONDS
        if self._transport is not None:
            self._transport.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def _linger(self, nbytes: int) -> None:
        self._lingered += nbytes
        if self._lingered > LINGER_BYTES:
            self.abort()
        else:
            self._pace(nbytes)

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = NO_DEADLINE
        closing = self._transport is None or self._transport.is_closing()
        waiting = self._head is not None or self._pending
        if self._ended and self._exchange is not None and not (closing or self.paused):
            self._probe(self._exchange)
        elif closing or self._lingered >= 0 or self.paused or self._exchange is not None:
            self.abort()
        elif self._queued is not None:
            self.server.intake.refused += 1
            self.refuse(Overloaded(NO_ROOM))
        elif waiting:
            if self._keeps_up():
                return
            self.refuse(RequestTimeout("The request did not come in time."))
        else:
            self.close()

    def _probe(self, exchange: Exchange) -> None:
        """Find out whether a client that sends no more still reads.

        The system of one that has gone refuses the first bytes and the second write then fails,
        which cancels the work. A stream's tokens do the same.
        """
        if not exchange.started:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.deadline = self._loop.time()  # again at the next look

    def idle(self) -> bool:
        return self._exchange is None and self._head is None

    def cut(self) -> None:
        """End what is being answered: the client is told."""
        if self._exchange is not None and self.task is not None:
            self._exchange.cut = True
            self.task.cancel()

    def close(self) -> None:
        self.flush()
        if self._transport is not None:
            self.deadline = self._loop.time() + self.server.limits.write_seconds
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
