"""A client's connection: the asyncio protocol around the requests and responses of one client.

``parser`` says where requests begin and end; here is what depends on sockets, clocks and other
connections: deadlines, admission of large bodies (``bodies``), and pausing the tokens of a client
that does not read. Requests are served one at a time; those that a client sends ahead wait. Every
wait has a deadline, which the server checks.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, BufferedProtocol, Event, Task, Transport
from typing import Protocol, cast

from triptych.config import Limits
from triptych.errors import (
    InvalidHTTP,
    OutOfMemory,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    ServiceError,
    TriptychError,
)
from triptych.http.bodies import (
    LARGE_BODY,
    MIN_UNPROCESSED,
    BodyAdmission,
    BodyBuffer,
    BufferPool,
)
from triptych.http.exchange import STATUS_LINES, HTTPExchange, error_headers, new_id
from triptych.http.parser import (
    BODY,
    DONE,
    HANDLING,
    HEAD,
    IDLE,
    RequestHead,
    RequestParser,
    RequestPhase,
)

HEAD_READ_BYTES = 64 << 10  # read at once where no body is expected
MAX_AHEAD_BYTES = 64 << 10  # that a client may send ahead of its response
HIGH_WATER = 64 << 10  # unread response bytes at which the token source is paused
MAX_UNREAD_BYTES = 1 << 20  # that a paused stream may still add: its worker's window fits in
LINGER_SECONDS = 2.0  # after a rejection: time to read it while the client still sends
LINGER_BYTES = 16 << 20
REFUSAL_SECONDS = 0.5  # for a connection that is refused: to send its request, and to read that
IGNORED_BODY_BYTES = 16 << 10  # of a body that no route reads
PACE_CHECKS = 60  # of a large body, during the longest time that others may wait,
MAX_SLOW_CHECKS = 5  # and how many in a row it may be too slow while others do wait
IDLE_SECONDS = 75.0  # keep-alive without a request
HTTP10_SECONDS = 1.0  # for a whole response to an HTTP/1.0 client that has closed its side
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_DEADLINE = float("inf")
BODIES_FULL = "The server is receiving too many large bodies at the moment. Try again."
CONNECTIONS_FULL = "The server has too many connections at the moment. Try again."
NO_MEMORY = "The server has no memory for the request at the moment. Try again."
TOO_SLOW = "The request did not arrive in time."
SPEAKS_TLS = "This port speaks plain HTTP, not TLS."


class Application(Protocol):
    """What a server serves."""

    def check_head(self, head: RequestHead) -> None:
        """Raise to reject a request before its body is read; else set ``head.tenant`` and
        ``head.ignores_body``. May set ``head.response_headers`` and ``head.record``."""

    async def handle(self, exchange: HTTPExchange) -> None:
        """Respond to a complete request."""

    def reject(self, error: TriptychError, head: RequestHead | None, request_id: str) -> bytes:
        """The body of the response to a request that never reaches ``handle``. ``head``: None if
        it could not be read."""


class ServerContext(Protocol):
    """What all connections of a server share."""

    loop: AbstractEventLoop
    limits: Limits
    app: Application
    connections: set[HTTPConnection]
    draining: bool
    settled: Event  # set when a connection has become idle or was lost
    scratch: memoryview  # to read into where there is no body
    buffers: BufferPool
    admission: BodyAdmission

    def connection_closed(self, connection: HTTPConnection) -> None: ...

    def report_tls_client(self) -> None:
        """A client began a TLS handshake on a connection without TLS."""

    def flush_soon(self, connection: HTTPConnection) -> None:
        """Have ``connection.flush`` called before the event loop waits again."""


class HTTPConnection(BufferedProtocol):
    """One client's connection."""

    __slots__ = (
        "_admitted_bytes",
        "_body_due",
        "_checked_bytes",
        "_due",
        "_eof",
        "_exchange",
        "_lingered",
        "_loop",
        "_max_unread",
        "_out",
        "_parser",
        "_queued",
        "_slow_checks",
        "_tls",
        "_transport",
        "_unread_due",
        "deadline",
        "paused",
        "refused",
        "server",
        "task",
    )

    def __init__(self, server: ServerContext, refused: bool = False) -> None:
        self.server = server
        self.refused = refused  # descriptors are scarce: its request gets a 503
        self.deadline = NO_DEADLINE  # the earlier of the two that follow
        self._due = NO_DEADLINE  # of what this phase waits for
        self._unread_due = NO_DEADLINE  # while paused: the client must have read something
        self.paused = False  # the client does not read
        self._max_unread = 0  # bytes at which the connection is aborted, while paused
        self._eof = False  # the client sends no more, but waits for a response
        self._loop = server.loop
        self._transport: Transport | None = None
        self._tls = False
        self._parser = RequestParser(server.limits.header_bytes, server.limits.headers)
        self._out: list[bytes] = []  # written together by ``flush``
        self._queued = False  # the body waits for admission
        self._body_due = 0.0  # when the body must be complete
        self._checked_bytes = 0  # of it, at the last check of its pace
        self._slow_checks = 0  # in a row at which too little had arrived
        self._admitted_bytes = 0  # of a chunked body; for more it needs admission again
        self._lingered = -1  # bytes dropped after a rejection; -1: there was none
        self._exchange: HTTPExchange | None = None
        self.task: Task[None] | None = None

    @property
    def closing(self) -> bool:
        return self.server.draining or (self._eof and not self._parser.unparsed)

    def response_started(self) -> None:
        self.server.admission.processed(self)

    def release_buffer(self, buffer: BodyBuffer) -> None:
        self.server.buffers.release(buffer)

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._tls = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections.add(self)
        self._expect_within(REFUSAL_SECONDS if self.refused else self.server.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._queued = False
        self.deadline = self._due = self._unread_due = NO_DEADLINE
        self._parser.stop()
        self.server.admission.release(self)
        self.server.connection_closed(self)
        if self.task is not None:
            self.task.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._parser.in_place:
            return self._parser.free_space(self.server.admission.read_bytes)
        if self._lingered >= 0:
            return self.server.scratch[: self.server.admission.read_bytes]
        return self.server.scratch[:HEAD_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        parser = self._parser
        if parser.in_place:
            if parser.filled(nbytes):
                self._body_complete()
            elif parser.head is not None and parser.head.length > LARGE_BODY:
                self._share_turn(nbytes)
        elif self._lingered >= 0:
            self._linger(nbytes)
        else:
            parser.receive(self.server.scratch[:nbytes])
            self._advance()

    def eof_received(self) -> bool:
        """Keep the connection open (True) if the client may wait for a response.

        A client that has gone looks the same until something is written: see ``_probe``. With TLS
        there is no open half: the connection closes.
        """
        if self._tls:
            return False
        if self._exchange is not None:
            self._eof = True
            self._expect_within(HTTP10_SECONDS if self._exchange.head.http10 else 0.0)
        elif self.paused and self._parser.phase is IDLE and self._parser.unparsed:
            self._eof = True  # serve what was sent ahead once the response before it is read
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
            unread = self._transport.get_write_buffer_size()
            self._max_unread = unread + MAX_UNREAD_BYTES * streams

    def resume_writing(self) -> None:
        self.paused = False
        self._unread_due = NO_DEADLINE
        self.deadline = self._due
        if self._exchange is None:
            self._serve_next()
        elif self._exchange.flow is not None:
            self._exchange.flow.resume()

    # --- requests

    def _expect_within(self, seconds: float) -> None:
        """Set the deadline of what this phase waits for."""
        self._due = self._loop.time() + seconds
        self.deadline = min(self._due, self._unread_due)

    def _advance(self) -> None:
        """Process what has arrived, as far as it reaches."""
        phase = self._parser.phase
        try:
            if phase is BODY:
                self._read_body()
            elif phase is HANDLING or self.paused:
                self._limit_ahead()
            elif phase is not DONE:
                self._read_head(phase)
        except TriptychError as error:
            self.reject(error)
        except MemoryError:
            self.reject(OutOfMemory(NO_MEMORY))

    def _limit_ahead(self) -> None:
        """Stop reading when a client has sent too many bytes ahead of its response."""
        if self._parser.unparsed > MAX_AHEAD_BYTES:
            self.pause_reading()

    def _read_head(self, before: RequestPhase) -> None:
        if self.refused:
            raise ServiceError(CONNECTIONS_FULL)
        head = self._parser.read_head()
        if head is not None:
            self.server.app.check_head(head)
            self._expect_body(head)
        elif before is IDLE and self._parser.phase is HEAD:
            if self._parser.begins_with_tls and not self._tls:  # no head would ever be complete
                self.server.report_tls_client()
                raise InvalidHTTP(SPEAKS_TLS)
            self._expect_within(self.server.limits.header_seconds)

    def _max_body_bytes(self, head: RequestHead) -> int:
        return IGNORED_BODY_BYTES if head.ignores_body else self.server.limits.body_bytes

    def _expect_body(self, head: RequestHead) -> None:
        """Receive the body that the head declares, once it is admitted."""
        if head.length > (limit := self._max_body_bytes(head)):
            raise PayloadTooLarge(f"The body has {head.length} bytes; the limit is {limit}.")
        self._admitted_bytes = LARGE_BODY
        if self._parser.take_whole_body():
            self._serve()
        elif head.length <= LARGE_BODY or self._admit(head, head.length):
            self._receive_body(head)
        else:
            self._wait_for_admission()

    def _receive_body(self, head: RequestHead) -> None:
        """Begin to receive an admitted body, or continue."""
        parser = self._parser
        self._expect_within(self.server.limits.body_seconds)
        self._body_due = self._due
        if not parser.body_begun:
            nothing_arrived = not parser.unparsed
            memory = None if head.chunked else self.server.buffers.acquire(head.length)
            parser.begin_body(memory, self._max_body_bytes(head))
            if nothing_arrived and head.expects_continue:
                self.write(CONTINUE)
        if head.length > LARGE_BODY or parser.size > LARGE_BODY:
            self._schedule_pace_check(parser.size)
        self._read_body()

    def _read_body(self) -> None:
        """Decode what has arrived of a chunked body. Others are received in place."""
        parser = self._parser
        head = parser.head
        if self._queued or head is None or not head.chunked:
            return
        before, arrived = parser.size, parser.unparsed
        if parser.read_body():
            self._body_complete()
        elif parser.size > self._admitted_bytes:
            self._admit_more(head, before <= LARGE_BODY)
        elif before > LARGE_BODY:
            self._share_turn(arrived)

    def _body_complete(self) -> None:
        self.server.admission.complete(self, self._parser.size)
        self._serve()

    # --- large bodies

    def _admit(self, head: RequestHead, size: int) -> bool:
        """Whether a body is admitted; if not, it waits. No more wait than may be served."""
        admission = self.server.admission
        if admission.waiting >= self.server.limits.requests:
            admission.refused += 1
            raise Overloaded(BODIES_FULL)
        return admission.admit(self, size, head.tenant or self._client_address())

    def _client_address(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def _wait_for_admission(self) -> None:
        """Leave the body with the client. The time to send it does not run."""
        self._queued = True
        self._expect_within(self.server.limits.body_wait_seconds)
        self.pause_reading()

    def admitted(self) -> None:
        head = self._parser.head
        if not self._queued or head is None:
            return
        self._queued = False
        try:
            self._receive_body(head)
        except TriptychError as error:
            self.reject(error)
        except MemoryError:
            self.reject(OutOfMemory(NO_MEMORY))
        self.resume_reading()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        reads = self._lingered >= 0 or (self._parser.phase is BODY and not self._queued)
        if reads and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _schedule_pace_check(self, arrived: int) -> None:
        self._checked_bytes, self._slow_checks = arrived, 0
        self._due = min(self._body_due, self._loop.time() + self._pace_check_seconds())
        self.deadline = min(self._due, self._unread_due)

    def _pace_check_seconds(self) -> float:
        return min(1.0, self.server.limits.body_wait_seconds / PACE_CHECKS)

    def _keeps_pace(self, head: RequestHead) -> bool:
        """Whether a body arrives fast enough: while others wait, fast enough to be in time."""
        limits, arrived = self.server.limits, self._parser.size
        size = arrived if head.chunked else head.length
        if size <= LARGE_BODY or self._loop.time() >= self._body_due:
            return False
        slow_checks = 0
        if self.server.admission.waiting:
            self.server.admission.slow_down(self, arrived)
            expected = size * self._pace_check_seconds() / limits.body_seconds
            if arrived - self._checked_bytes < expected:
                slow_checks = self._slow_checks + 1
        self._schedule_pace_check(arrived)
        self._slow_checks = slow_checks
        return slow_checks < MAX_SLOW_CHECKS

    def _share_turn(self, nbytes: int) -> None:
        """Count bytes that were read, and let other connections read before more."""
        if not self.server.admission.count_read(nbytes):
            self.server.admission.pause(self)

    def _admit_more(self, head: RequestHead, first: bool) -> None:
        """Get admission for more of a chunked body, whose size nobody knows in advance."""
        admission, size = self.server.admission, self._parser.size
        limit = self.server.limits.body_bytes
        self._admitted_bytes = min(limit, max(MIN_UNPROCESSED, 4 * size))
        if not first:
            if not admission.grow(self, self._admitted_bytes):
                admission.refused += 1
                raise Overloaded(BODIES_FULL)
        elif self._admit(head, self._admitted_bytes):
            self._schedule_pace_check(size)
        else:
            self._wait_for_admission()

    # --- responses

    def _serve(self) -> None:
        head, body, size = self._parser.take_request()
        exchange = self._exchange = HTTPExchange(self, head, body, size)
        if self._eof:  # a client that has gone looks the same: probe it at once
            self._expect_within(HTTP10_SECONDS if head.http10 else 0.0)
        else:
            self._due = NO_DEADLINE
            self.deadline = self._unread_due
        self.task = exchange.task = self._loop.create_task(self._handle(exchange))

    async def _handle(self, exchange: HTTPExchange) -> None:
        try:
            await self.server.app.handle(exchange)
        except asyncio.CancelledError:
            pass  # in the task it would keep the frames of the request alive, and these the task
        finally:
            self._exchange = self.task = exchange.task = None
            exchange.release()
            if exchange.large:
                self.server.admission.release(self)
            self.server.settled.set()
            self._finish(exchange)

    def _finish(self, exchange: HTTPExchange) -> None:
        """Expect the next request, or close the connection."""
        if self._parser.phase is DONE:
            return
        if self.server.draining or not exchange.keeps_connection:
            self.close()
            return
        self._parser.finish()
        self._expect_within(IDLE_SECONDS)
        if self._eof or self._parser.unparsed:
            self._serve_next()

    def _serve_next(self) -> None:
        """Process what was sent ahead, or wait for the next request."""
        parser = self._parser
        if self.paused or self._transport is None or parser.phase is DONE:
            return
        if parser.unparsed:
            self._advance()
            full = parser.phase is HANDLING and parser.unparsed > MAX_AHEAD_BYTES
            if not full and not self._queued and self._transport is not None:
                self._transport.resume_reading()
        if self._eof and parser.phase not in (HANDLING, DONE):
            self.close()  # no further request can become complete

    def write_soon(self, data: bytes) -> None:
        out = self._out
        if not out:
            self.server.flush_soon(self)
        out.append(data)

    def write(self, data: bytes) -> None:
        """Write now, after what ``write_soon`` has collected."""
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
        if self.paused and transport.get_write_buffer_size() > self._max_unread:
            transport.abort()  # the token source was paused and has sent on

    def reject(self, error: TriptychError) -> None:
        """Respond with an error, and let the client read that before its socket closes."""
        head, request_id = self._parser.head, new_id("req-")
        body = self.server.app.reject(error, head, request_id)
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b"
            b"x-request-id: %b\r\nconnection: close\r\n\r\n%b"
            % (
                STATUS_LINES[error.status],
                len(body),
                error_headers(error),
                b"" if head is None else head.response_headers,
                request_id.encode(),
                b"" if self._parser.is_head_request else body,
            )
        )
        self._parser.stop()
        self._queued = False
        self._lingered = 0
        self.server.admission.release(self)
        self._expect_within(REFUSAL_SECONDS if self.refused else LINGER_SECONDS)
        if self._transport is not None:
            self._transport.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def _linger(self, nbytes: int) -> None:
        self._lingered += nbytes
        if self._lingered > LINGER_BYTES:
            self.abort()
        else:
            self._share_turn(nbytes)

    def expire(self) -> None:
        """The deadline has passed."""
        parser, unread = self._parser, self._unread_due <= self._due
        self._due, self.deadline = NO_DEADLINE, self._unread_due
        if unread or parser.phase is DONE or self._transport is None:
            self.abort()
        elif self.refused:
            self.reject(ServiceError(CONNECTIONS_FULL))
        elif self._exchange is not None:
            self._probe(self._exchange)
        elif self._queued:
            self.server.admission.refused += 1
            self.reject(Overloaded(BODIES_FULL))
        elif parser.phase is BODY and parser.head is not None:
            if not self._keeps_pace(parser.head):
                self.reject(RequestTimeout(TOO_SLOW))
        elif parser.phase is HEAD:
            self.reject(RequestTimeout(TOO_SLOW))
        else:
            self.close()

    def _probe(self, exchange: HTTPExchange) -> None:
        """Find out whether a client that sends no more still reads.

        The host of a client that has gone rejects the first bytes, and the second write then fails,
        which cancels the request. The tokens of a stream do the same. HTTP/1.0 has no interim
        responses: such a client counts as gone unless its response is ready at once.
        """
        if exchange.started:
            return
        if exchange.head.http10:
            self.abort()
            return
        self.write(CONTINUE)
        self._expect_within(0.0)  # again at the next tick

    def idle(self) -> bool:
        """Whether no request is being received or handled."""
        return self._exchange is None and self._parser.phase is not BODY

    def busy(self) -> bool:
        """Whether one is, or the client has not read all of its response."""
        unread = self._transport is not None and self._transport.get_write_buffer_size() > 0
        return unread or not self.idle()

    def cut(self) -> None:
        """Cancel the request that is being handled; its response is an error."""
        if self._exchange is not None and self.task is not None:
            self._exchange.cut = True
            self.task.cancel()

    def close(self) -> None:
        """Take no further request; the client may still read what was written, for a while."""
        self.flush()
        self._parser.stop()
        if self._transport is not None:
            self._expect_within(self.server.limits.write_seconds)
            self._transport.close()

    def abort(self) -> None:
        self._parser.stop()
        if self._transport is not None:
            self._transport.abort()
