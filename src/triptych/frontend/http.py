"""An HTTP/1.1 server of our own: asyncio protocol on uvloop, llhttp for the heads.

It owns connections, limits, timeouts and back pressure, and knows no route: an ``Admit`` looks at
each head before the body is read, an ``Answer`` answers the request. Bodies are received straight
into one buffer. One request at a time is served on a connection; what a client sends ahead waits.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, BufferedProtocol, Task, Transport
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

import msgspec

from triptych.config import Limits
from triptych.errors import (
    HeadersTooLarge,
    PayloadTooLarge,
    RequestTimeout,
    TriptychError,
)
from triptych.frontend.head import Head, parse
from triptych.pipeline.flow import Pausable

SCRATCH = 256 << 10  # bytes taken from a socket at once where no body buffer waits for them
FIRST = 2 << 20  # a declared body gets this much memory before any byte of it has come
AHEAD = 64 << 10  # bytes that a client may send ahead of its answer
HIGH_WATER = 64 << 10  # unread answer bytes at which the token source is paused
UNREAD = 1 << 20  # unread answer bytes at which the client is cut
LINGER_SECONDS = 2.0  # after a refusal: time to read it while what it refuses still pours in
LINGER_BYTES = 16 << 20
IDLE_SECONDS = 75.0  # keep-alive without a request
NO_DEADLINE = float("inf")

REASONS = {s.value: f"{s.value} {s.phrase}".encode() for s in HTTPStatus}
JSON = b"application/json"

Answer = Callable[["Exchange"], Awaitable[None]]
Admit = Callable[[Head], None]


_EXTRA = {
    401: b"www-authenticate: Bearer\r\n",
    429: b"retry-after: 1\r\n",
    503: b"retry-after: 1\r\n",
}


def refusal(error: TriptychError) -> tuple[int, bytes, bytes]:
    """Status, body in OpenAI's shape, and extra headers of an error."""
    return error.status, error_body(error), _EXTRA.get(error.status, b"")


def error_body(error: TriptychError) -> bytes:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    content = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": content})


class Exchange:
    """One request and its answer."""

    __slots__ = ("_connection", "_plain", "body", "flow", "head", "started", "status")

    def __init__(self, connection: Connection, head: Head, body: bytearray | memoryview) -> None:
        self._connection = connection
        self._plain = False  # an answer to HTTP/1.0: its end is the end of the connection
        self.head = head
        self.body = body
        self.flow: Pausable | None = None  # paused while the client does not read
        self.started = False  # the status is on its way, errors can't change it any more
        self.status = 0

    def send(
        self, status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b""
    ) -> None:
        """The whole answer at once."""
        self.started, self.status = True, status
        if self.head.method == "HEAD":
            length, body = len(body), b""
        else:
            length = len(body)
        self._connection.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (REASONS[status], content_type, length, extra, self._closing(), body)
        )

    def start(self, content_type: bytes, extra: bytes, first: bytes) -> None:
        """The head of an answer that comes in pieces, together with the first piece."""
        self.started, self.status = True, 200
        self._plain = self.head.old
        if self._plain:
            self.head.keep_alive = False
        self._connection.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n%b%b%b\r\n%b"
            % (
                content_type,
                b"" if self._plain else b"transfer-encoding: chunked\r\n",
                extra,
                self._closing(),
                first if self._plain else b"%x\r\n%b\r\n" % (len(first), first),
            )
        )

    def write(self, piece: bytes) -> None:
        """One more piece, never empty."""
        if not self._plain:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._connection.write(piece)

    def end(self, piece: bytes = b"") -> None:
        """The last piece, and the end of the answer."""
        if not self._plain:
            last = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            piece = last + b"0\r\n\r\n"
        if piece:
            self._connection.write(piece)

    def _closing(self) -> bytes:
        if self._connection.server.draining:
            self.head.keep_alive = False
        return b"" if self.head.keep_alive else b"connection: close\r\n"


class Connection(BufferedProtocol):
    """A client's connection: takes requests apart and serves them one after the other."""

    __slots__ = (
        "_body",
        "_exchange",
        "_filled",
        "_head",
        "_lingered",
        "_loop",
        "_pending",
        "_stalled",
        "_task",
        "_transport",
        "_view",
        "deadline",
        "paused",
        "server",
    )

    def __init__(self, server: Server) -> None:
        self.server = server
        self.deadline = NO_DEADLINE  # what the client must do next is due then
        self.paused = False  # the client does not read
        self._loop = server.loop
        self._transport: Transport | None = None
        self._pending = bytearray()  # bytes of a head, or sent ahead of the answer
        self._head: Head | None = None  # of the request whose body is coming in
        self._body = bytearray()
        self._view: memoryview | None = None  # the body's buffer while it is received in place
        self._filled = 0
        self._stalled = 0  # bytes of chunked framing without a byte of body
        self._lingered = -1  # bytes thrown away after a refusal; -1: none was given
        self._exchange: Exchange | None = None
        self._task: Task[None] | None = None

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
        self._transport = self._view = None
        self.deadline = NO_DEADLINE
        self.server.settled.set()
        if self._task is not None:
            self._task.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._view is None:
            return self.server.scratch
        if self._filled == len(self._body):
            self._grow()
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._view is not None:
            self._filled += nbytes
            if self._head is not None and self._filled == self._head.length:
                self._received()
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

    def eof_received(self) -> None:
        """A client that has closed its side has gone: None closes ours."""

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = self._loop.time() + self.server.limits.write_seconds
        if self._exchange is not None and self._exchange.flow is not None:
            self._exchange.flow.pause()

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
        if head.length > limits.body_bytes:
            raise PayloadTooLarge(
                f"The body has {head.length} bytes; the limit is {limits.body_bytes}."
            )
        self._expect(head, rest)

    def _expect(self, head: Head, rest: bytes) -> None:
        """Make room for the body that the head declares."""
        if not head.chunked and len(rest) >= head.length:
            self._pending += rest[head.length :]
            self._serve(head, bytearray(rest[: head.length]))
            return
        self.deadline = self._loop.time() + self.server.limits.body_seconds
        self._head = head
        if not rest and head.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            self._body, self._stalled = bytearray(), 0
            if rest:
                self._chunked(rest)
            return
        self._body = bytearray(min(head.length, FIRST))
        self._view = memoryview(self._body)
        self._filled = min(len(rest), len(self._body))
        self._view[: self._filled] = rest[: self._filled]
        while self._filled < len(rest):  # only where one read was larger than the first buffer
            self._grow()
            more = rest[self._filled : len(self._body)]
            self._view[self._filled : self._filled + len(more)] = more
            self._filled += len(more)

    def _grow(self) -> None:
        """Memory follows what has come, not what was declared."""
        assert self._head is not None
        body = bytearray(min(self._head.length, 2 * len(self._body)))
        body[: self._filled] = self._body
        self._body, self._view = body, memoryview(body)

    def _received(self) -> None:
        head, body = self._head, self._body
        assert head is not None
        self._view = self._head = None
        self._body = bytearray()
        self._serve(head, body)

    def _chunked(self, data: bytes | memoryview) -> None:
        head, limits = self._head, self.server.limits
        assert head is not None
        before = len(self._body)
        complete = head.chunks(data, self._body, limits.body_bytes)
        self._stalled = self._stalled + len(data) if len(self._body) == before else 0
        if complete:
            if head.surplus:
                head.keep_alive = False  # where the next request began, the parser can't tell
            self._received()
        elif self._stalled > limits.header_bytes:
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")

    def _ahead(self, data: bytes | memoryview) -> None:
        self._pending += data
        if len(self._pending) > AHEAD and self._transport is not None:
            self._transport.pause_reading()

    # --- answers going out

    def _serve(self, head: Head, body: bytearray) -> None:
        self.deadline = NO_DEADLINE
        exchange = self._exchange = Exchange(self, head, body)
        self._task = self._loop.create_task(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.server.answer(exchange)
        finally:
            self._exchange = self._task = None
            self.server.settled.set()
            if not exchange.started or not exchange.head.keep_alive:
                self._close()
            elif not self.paused:
                self._next()

    def _next(self) -> None:
        """Go on with what was sent ahead, or wait for the next request."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.server.draining:
            self._close()
            return
        if not self._pending:
            self.deadline = self._loop.time() + IDLE_SECONDS
            return
        sent, self._pending = bytes(self._pending), bytearray()
        self._transport.resume_reading()
        self._guard(self._heading, sent)

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if self.paused and transport.get_write_buffer_size() > UNREAD:
            exchange = self._exchange
            if exchange is not None and exchange.flow is not None:
                transport.abort()  # it was told to pause, and has poured on

    def refuse(self, error: TriptychError) -> None:
        """Answer what can't be served, and let the client read that before its socket closes."""
        self.server.refused(error)
        status, body, extra = refusal(error)
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
            b"connection: close\r\n\r\n%b" % (REASONS[status], len(body), extra, body)
        )
        self._view = self._head = None
        self._body, self._pending = bytearray(), bytearray()
        self._lingered = 0
        self.deadline = self._loop.time() + LINGER_SECONDS
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _linger(self, nbytes: int) -> None:
        self._lingered += nbytes
        if self._lingered > LINGER_BYTES:
            self._abort()

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = NO_DEADLINE
        closing = self._transport is None or self._transport.is_closing()
        waiting = self._head is not None or self._pending
        if closing or self._lingered >= 0 or self.paused or self._exchange is not None:
            self._abort()
        elif waiting:
            self.refuse(RequestTimeout("The request did not come in time."))
        else:
            self._close()

    def idle(self) -> bool:
        return self._exchange is None and self._head is None

    def _close(self) -> None:
        if self._transport is not None:
            self.deadline = self._loop.time() + self.server.limits.write_seconds
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _nothing(error: TriptychError) -> None: ...


class Server:
    """Listens, keeps the connections and their deadlines, and drains."""

    def __init__(
        self,
        limits: Limits,
        answer: Answer,
        admit: Admit,
        refused: Callable[[TriptychError], None] = _nothing,
    ) -> None:
        self.limits = limits
        self.answer = answer
        self.admit = admit
        self.refused = refused
        self.loop: AbstractEventLoop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.draining = False
        self.settled = asyncio.Event()  # a connection has become idle or was lost
        self.lag = 0.0  # seconds that the event loop was late, last time it was looked at
        self.scratch = memoryview(bytearray(SCRATCH))
        self._listening: asyncio.Server | None = None
        soonest = min(limits.header_seconds, limits.body_seconds, limits.write_seconds)
        self._tick = min(0.5, soonest / 10)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        assert self._listening is not None
        return int(self._listening.sockets[0].getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        self._listening = await self.loop.create_server(
            lambda: Connection(self), host, port, backlog=4096
        )
        self._watch()

    def _watch(self) -> None:
        """One timer for all connections: cheaper than one each, and as exact as they need."""
        now = self.loop.time()
        self.lag = max(0.0, now - self._due) if self._due else 0.0
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._due = now + self._tick
        self._timer = self.loop.call_at(self._due, self._watch)

    async def drain(self, seconds: float) -> None:
        """Take no new work, let what runs finish, then close.

        The port stays open meanwhile, so that /health can say why.
        """
        self.draining = True
        for connection in [c for c in self.connections if c.idle()]:
            connection._close()
        try:
            async with asyncio.timeout(seconds):
                while any(not c.idle() for c in self.connections):
                    self.settled.clear()
                    await self.settled.wait()
        except TimeoutError:
            pass
        await self.close()

    async def close(self) -> None:
        """Stop at once: running requests are cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listening is not None:
            self._listening.close()
        tasks = [c._task for c in self.connections if c._task is not None]
        for connection in list(self.connections):
            connection._close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
