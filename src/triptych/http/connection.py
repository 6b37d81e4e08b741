"""A client's connection: asyncio's protocol around the requests and answers of one client.

``framing`` says where requests begin and end; here is what depends on sockets, clocks and others:
deadlines, room for large bodies (``intake``), and pausing a source whose client does not read.
Requests are served one at a time; what a client sends ahead waits. Every wait has a deadline,
which the server watches.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, BufferedProtocol, Event, Task, Transport
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from triptych.config import Limits
from triptych.errors import (
    OutOfMemory,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    ServiceError,
    TriptychError,
)
from triptych.http.bodies import LARGE, SHARE, BodyAdmission
from triptych.http.buffers import BodyBuffer, BufferPool
from triptych.http.exchange import STATUS_LINES, HTTPExchange, error_response, new_id
from triptych.http.head import RequestHead
from triptych.http.parser import RequestParser, RequestPhase

FIRST = 64 << 10  # bytes that are read before it is known what they are
AHEAD = 64 << 10  # bytes that a client may send ahead of its answer
HIGH_WATER = 64 << 10  # unread answer bytes at which the token source is paused
UNREAD = 1 << 20  # bytes that a paused stream may still add: its worker's window fits in
LINGER_SECONDS = 2.0  # after a refusal: time to read it while what it refuses still pours in
LINGER_BYTES = 16 << 20
CROWDED_SECONDS = 0.5  # for a request that is refused for want of descriptors, and to read that
BODILESS_BYTES = 16 << 10  # of a body that nobody will look at
LOOKS = 60  # at how a large body comes in, during the time that others wait at most,
LATE = 5  # and so many at which it may be too slow, one after the other, while others do wait
IDLE_SECONDS = 75.0  # keep-alive without a request
OLD_SECONDS = 1.0  # for a whole answer to a client of HTTP/1.0 that has closed its side
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_DEADLINE = float("inf")
NO_ROOM = "There is no room for so large a body at the moment. Try again."
CROWDED = "The server has too many connections at the moment. Try again."
NO_MEMORY = "The server has no memory for the request at the moment. Try again."

RequestHandler = Callable[[HTTPExchange], Awaitable[None]]
HeadCheck = Callable[[RequestHead], None]
OnRejected = Callable[[TriptychError], None]


class ServerContext(Protocol):
    """What all connections of a server share."""

    loop: AbstractEventLoop
    limits: Limits
    connections: set[HTTPConnection]
    draining: bool
    settled: Event  # set when a connection has become idle or was lost
    scratch: memoryview  # for whatever has no buffer of its own
    buffers: BufferPool
    intake: BodyAdmission
    answer: RequestHandler
    admit: HeadCheck
    refused: OnRejected

    def lost(self, connection: HTTPConnection) -> None:
        """A connection has ended."""

    def flush_soon(self, connection: HTTPConnection) -> None:
        """Have ``connection.flush`` called before the event loop waits again."""


class HTTPConnection(BufferedProtocol):
    """One client's connection."""

    __slots__ = (
        "_body_due",
        "_due",
        "_ended",
        "_exchange",
        "_late",
        "_lingered",
        "_loop",
        "_most",
        "_out",
        "_queued",
        "_reader",
        "_room",
        "_seen",
        "_transport",
        "_unread_due",
        "crowded",
        "deadline",
        "paused",
        "server",
        "task",
    )

    def __init__(self, server: ServerContext, crowded: bool = False) -> None:
        self.server = server
        self.crowded = crowded  # it came when there was no descriptor to spare: it gets a 503
        self.deadline = NO_DEADLINE  # the sooner of the two that follow
        self._due = NO_DEADLINE  # what is due next, in this phase
        self._unread_due = NO_DEADLINE  # while paused: the client must have read something
        self.paused = False  # the client does not read
        self._most = 0  # bytes left unread at which it is cut, while paused
        self._ended = False  # the client will send no more, but has asked for something
        self._loop = server.loop
        self._transport: Transport | None = None
        self._reader = RequestParser(server.limits.header_bytes, server.limits.headers)
        self._out: list[bytes] = []  # pieces that leave together
        self._queued = False  # there is no room for the body
        self._body_due = 0.0  # when the body must be there
        self._seen = 0  # bytes of it that were there at the last look
        self._late = 0  # looks at which too little had come
        self._room = 0  # bytes that a chunked body may have before it asks for more
        self._lingered = -1  # bytes thrown away after a refusal; -1: none was given
        self._exchange: HTTPExchange | None = None
        self.task: Task[None] | None = None

    @property
    def closing(self) -> bool:
        return self.server.draining or (self._ended and not self._reader.ahead)

    def answered(self) -> None:
        self.server.intake.answered(self)

    def take_back(self, buffer: BodyBuffer) -> None:
        self.server.buffers.give(buffer)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections.add(self)
        self._expect(CROWDED_SECONDS if self.crowded else self.server.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._queued = False
        self.deadline = self._due = self._unread_due = NO_DEADLINE
        self._reader.stop()
        self.server.intake.leave(self)
        self.server.lost(self)
        if self.task is not None:
            self.task.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reader.in_place:
            return self._reader.space(self.server.intake.slice)
        if self._lingered >= 0:
            return self.server.scratch[: self.server.intake.slice]
        return self.server.scratch[:FIRST]

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        if reader.in_place:
            if reader.fill(nbytes):
                self._received()
            elif reader.head is not None and reader.head.length > LARGE:
                self._pace(nbytes)
        elif self._lingered >= 0:
            self._linger(nbytes)
        else:
            reader.receive(self.server.scratch[:nbytes])
            self._advance()

    def eof_received(self) -> bool:
        """A client that will send no more may still wait for its answer: False closes our side.

        Or it has gone. The two look alike until something is written: see ``_probe``.
        """
        if self._exchange is not None:
            self._ended = True
            self._expect(OLD_SECONDS if self._exchange.head.old else 0.0)
        elif self.paused and self._reader.phase is RequestPhase.IDLE and self._reader.ahead:
            self._ended = True  # what was sent ahead is served once the answer before it is read
        else:
            self.close()
        return True

    def pause_writing(self) -> None:
        self.paused = True
        self._unread_due = self._loop.time() + self.server.limits.write_seconds
        self.deadline = min(self._due, self._unread_due)
        streams = 1
        if self._exchange is not None and self._exchange.flow is not None:
            streams = self._exchange.streams
            self._exchange.flow.pause()
        if self._transport is not None:
            self._most = self._transport.get_write_buffer_size() + UNREAD * streams

    def resume_writing(self) -> None:
        self.paused = False
        self._unread_due = NO_DEADLINE
        self.deadline = self._due
        if self._exchange is None:
            self._next()
        elif self._exchange.flow is not None:
            self._exchange.flow.resume()

    # --- requests coming in

    def _expect(self, seconds: float) -> None:
        """What this phase waits for is due in so many seconds."""
        self._due = self._loop.time() + seconds
        self.deadline = min(self._due, self._unread_due)

    def _advance(self) -> None:
        """Go on with what has come, as far as it reaches."""
        phase = self._reader.phase
        try:
            if phase is RequestPhase.BODY:
                self._read_body()
            elif phase is RequestPhase.ANSWERING or self.paused:
                self._hold_back()
            elif phase is not RequestPhase.DONE:
                self._read_head(phase)
        except TriptychError as error:
            self.refuse(error)
        except MemoryError:
            self.refuse(OutOfMemory(NO_MEMORY))

    def _hold_back(self) -> None:
        """Requests that a client sends ahead wait, and only so many bytes of them."""
        if self._reader.ahead > AHEAD:
            self.rest()

    def _read_head(self, before: RequestPhase) -> None:
        if self.crowded:
            raise ServiceError(CROWDED)
        head = self._reader.read_head()
        if head is not None:
            self.server.admit(head)
            self._open(head)
        elif before is RequestPhase.IDLE and self._reader.phase is RequestPhase.HEAD:
            self._expect(self.server.limits.header_seconds)

    def _most_bytes(self, head: RequestHead) -> int:
        return BODILESS_BYTES if head.bodiless else self.server.limits.body_bytes

    def _open(self, head: RequestHead) -> None:
        """Make room for the body that the head declares."""
        if head.length > (most := self._most_bytes(head)):
            raise PayloadTooLarge(f"The body has {head.length} bytes; the limit is {most}.")
        self._room = LARGE
        if self._reader.take_whole():
            self._serve()
        elif head.length <= LARGE or self._has_room(head, head.length):
            self._begin_body(head)
        else:
            self._wait()

    def _begin_body(self, head: RequestHead) -> None:
        """There is room: take the body in, or go on with it."""
        reader = self._reader
        self._expect(self.server.limits.body_seconds)
        self._body_due = self._due
        if not reader.begun:
            nothing = not reader.ahead
            memory = None if head.chunked else self.server.buffers.take(head.length)
            reader.begin_body(memory, self._most_bytes(head))
            if nothing and head.expects_continue:
                self.write(CONTINUE)
        if head.length > LARGE or reader.size > LARGE:
            self._look(reader.size)
        self._read_body()

    def _read_body(self) -> None:
        """Take in what has come of a body. One of declared length is received in its place."""
        reader = self._reader
        head = reader.head
        if self._queued or head is None or not head.chunked:
            return
        before, come = reader.size, reader.ahead
        if reader.read_body():
            self._received()
        elif reader.size > self._room:
            self._widen(head, before <= LARGE)
        elif before > LARGE:
            self._pace(come)

    def _received(self) -> None:
        self.server.intake.complete(self, self._reader.size)
        self._serve()

    # --- large bodies, as the intake sees them

    def _has_room(self, head: RequestHead, size: int) -> bool:
        """Whether a body can come in; if not, it waits, but no more do than may be served."""
        intake = self.server.intake
        if intake.waiting >= self.server.limits.requests:
            intake.refused += 1
            raise Overloaded(NO_ROOM)
        return intake.ask(self, size, head.tenant or self._address())

    def _address(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def _wait(self) -> None:
        """There is no room for the body: leave it with the client. Its time does not run."""
        self._queued = True
        self._expect(self.server.limits.body_wait_seconds)
        self.rest()

    def enter(self) -> None:
        head = self._reader.head
        if not self._queued or head is None:
            return
        self._queued = False
        try:
            self._begin_body(head)
        except TriptychError as error:
            self.refuse(error)
        except MemoryError:
            self.refuse(OutOfMemory(NO_MEMORY))
        self.wake()

    def rest(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def wake(self) -> None:
        reads = self._lingered >= 0 or (
            self._reader.phase is RequestPhase.BODY and not self._queued
        )
        if reads and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _look(self, come: int) -> None:
        """See after a while what has come by then."""
        self._seen, self._late = come, 0
        self._due = min(self._body_due, self._loop.time() + self._pause())
        self.deadline = min(self._due, self._unread_due)

    def _pause(self) -> float:
        return min(1.0, self.server.limits.body_wait_seconds / LOOKS)

    def _keeps_up(self, head: RequestHead) -> bool:
        """Whether a body may go on coming in.

        While others wait it must come at the pace at which it would be there in time.
        """
        limits, come = self.server.limits, self._reader.size
        whole = come if head.chunked else head.length
        if whole <= LARGE or self._loop.time() >= self._body_due:
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

    def _widen(self, head: RequestHead, first: bool) -> None:
        """Make room for more of a chunked body: how large it will be, nobody knows."""
        intake, size = self.server.intake, self._reader.size
        self._room = min(self.server.limits.body_bytes, max(SHARE, 4 * size))
        if not first:
            if not intake.grow(self, self._room):
                intake.refused += 1
                raise Overloaded(NO_ROOM)
        elif self._has_room(head, self._room):
            self._look(size)
        else:
            self._wait()

    # --- answers going out

    def _serve(self) -> None:
        head, body, size = self._reader.hand_over()
        exchange = self._exchange = HTTPExchange(self, head, body, size)
        if self._ended:  # one that has gone looks the same: probe it at once
            self._expect(OLD_SECONDS if head.old else 0.0)
        else:
            self._due = NO_DEADLINE
            self.deadline = self._unread_due
        self.task = exchange.task = self._loop.create_task(self._answer(exchange))

    async def _answer(self, exchange: HTTPExchange) -> None:
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
            self._finish(exchange)

    def _finish(self, exchange: HTTPExchange) -> None:
        """An exchange is over: only now it is known whether another can follow."""
        if self._reader.phase is RequestPhase.DONE:
            return
        if self.server.draining or not exchange.keeps_connection:
            self.close()
            return
        self._reader.finish()
        self._expect(IDLE_SECONDS)
        if self._ended or self._reader.ahead:
            self._next()

    def _next(self) -> None:
        """Go on with what was sent ahead, or wait for the next request."""
        reader = self._reader
        if self.paused or self._transport is None or reader.phase is RequestPhase.DONE:
            return
        if reader.ahead:
            self._advance()
            full = reader.phase is RequestPhase.ANSWERING and reader.ahead > AHEAD
            if not full and not self._queued and self._transport is not None:
                self._transport.resume_reading()
        if self._ended and reader.phase not in (RequestPhase.ANSWERING, RequestPhase.DONE):
            self.close()  # no further request can become whole

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
        status, body, extra = error_response(error)
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
            b"x-request-id: %b\r\nconnection: close\r\n\r\n%b"
            % (
                STATUS_LINES[status],
                len(body),
                extra,
                new_id("req-").encode(),
                b"" if self._reader.asks_for_head_only else body,
            )
        )
        self._reader.stop()
        self._queued = False
        self._lingered = 0
        self.server.intake.leave(self)
        self._expect(CROWDED_SECONDS if self.crowded else LINGER_SECONDS)
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
        reader, unread = self._reader, self._unread_due <= self._due
        self._due, self.deadline = NO_DEADLINE, self._unread_due
        if unread or reader.phase is RequestPhase.DONE or self._transport is None:
            self.abort()
        elif self.crowded:
            self.refuse(ServiceError(CROWDED))
        elif self._exchange is not None:
            self._probe(self._exchange)
        elif self._queued:
            self.server.intake.refused += 1
            self.refuse(Overloaded(NO_ROOM))
        elif reader.phase is RequestPhase.BODY and reader.head is not None:
            if not self._keeps_up(reader.head):
                self.refuse(RequestTimeout("The request did not come in time."))
        elif reader.phase is RequestPhase.HEAD:
            self.refuse(RequestTimeout("The request did not come in time."))
        else:
            self.close()

    def _probe(self, exchange: HTTPExchange) -> None:
        """Find out whether a client that sends no more still reads.

        The system of one that has gone refuses the first bytes and the second write then fails,
        which cancels the work. A stream's tokens do the same. HTTP/1.0 has no interim answers:
        such a client gets what can be answered at once, and counts as gone after that.
        """
        if exchange.started:
            return
        if exchange.head.old:
            self.abort()
            return
        self.write(CONTINUE)
        self._expect(0.0)  # again at the next look

    def idle(self) -> bool:
        """Nothing is on its way in or being answered."""
        return self._exchange is None and self._reader.phase is not RequestPhase.BODY

    def busy(self) -> bool:
        """Something is, or an answer has not been read to its end."""
        unread = self._transport is not None and self._transport.get_write_buffer_size() > 0
        return unread or not self.idle()

    def cut(self) -> None:
        """End what is being answered: the client is told."""
        if self._exchange is not None and self.task is not None:
            self._exchange.cut = True
            self.task.cancel()

    def close(self) -> None:
        """Take no further request; what is written already may still be read, for a while."""
        self.flush()
        self._reader.stop()
        if self._transport is not None:
            self._expect(self.server.limits.write_seconds)
            self._transport.close()

    def abort(self) -> None:
        self._reader.stop()
        if self._transport is not None:
            self._transport.abort()
