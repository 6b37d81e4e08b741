"""One HTTP/1.1 request and its response, as bytes.

Writes go to a ``ResponseWriter`` at once; nothing here waits, and nothing here knows a route.
"""

from __future__ import annotations

import math
import random
from asyncio import Task
from collections.abc import Callable
from http import HTTPStatus
from time import monotonic
from typing import Protocol

from triptych.errors import RateLimitExceeded, TriptychError
from triptych.http.bodies import LARGE_BODY, BodyBuffer
from triptych.http.parser import RequestHead
from triptych.runtime.concurrency import Pausable

STATUS_LINES = {s.value: f"{s.value} {s.phrase}".encode() for s in HTTPStatus}
ERROR_HEADERS = {
    401: b"www-authenticate: Bearer\r\n",
    429: b"retry-after: 1\r\n",
    503: b"retry-after: 1\r\n",
}
JSON = b"application/json"
_random = random.Random()  # seeded by the system; ids must be unique, not secret


def error_headers(error: TriptychError) -> bytes:
    """The headers that belong to an error."""
    if isinstance(error, RateLimitExceeded):
        return b"retry-after: %d\r\n" % max(1, math.ceil(error.retry_seconds))
    return ERROR_HEADERS.get(error.status, b"")


def new_id(prefix: str) -> str:
    return f"{prefix}{_random.getrandbits(96):024x}"


class ResponseWriter(Protocol):
    """The connection, as an exchange sees it."""

    @property
    def closing(self) -> bool:
        """Whether the connection takes no further request after this one."""

    def write(self, data: bytes) -> None:
        """Write now."""

    def write_soon(self, data: bytes) -> None:
        """Write before the event loop waits again, together with what else is ready then."""

    def response_started(self) -> None:
        """The first of the response is ready: the request has been processed."""

    def release_buffer(self, buffer: BodyBuffer) -> None:
        """The memory of the body is free for others."""


class HTTPExchange:
    """One request and its response: sent whole, or started, written to and ended; each once."""

    __slots__ = (
        "_closes", "_complete", "_writer", "body", "cut", "flow", "head", "id",
        "large", "received", "size", "status", "stream", "streams", "task",
    )  # fmt: skip

    def __init__(
        self, writer: ResponseWriter, head: RequestHead, body: BodyBuffer, size: int
    ) -> None:
        self._writer = writer
        self._complete = False  # the response was sent whole
        self._closes = not head.keep_alive  # the connection ends with this response
        self.id = ""  # for the x-request-id header and the log; set before the response starts
        self.head = head
        self.body = body
        self.size = size  # bytes of the body; its buffer may be larger
        self.large = size > LARGE_BODY
        self.received = monotonic()  # when the request was complete
        self.flow: Pausable | None = None  # paused while the client does not read
        self.streams = 1  # token streams of the flow
        self.stream: StreamingResponse | None = None  # once a streamed response has started
        self.status = 0
        self.cut = False  # the server cancels the task, not a client that left
        self.task: Task[None] | None = None  # handles the request

    @property
    def started(self) -> bool:
        """Whether the status was sent: errors can't change it any more."""
        return self.status != 0

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow: known when the task has ended."""
        ended = self._complete or (self.stream is not None and self.stream.ended)
        return ended and not self._closes

    def release(self) -> None:
        """Give the memory of the body back: nothing refers to it any more."""
        if self.size:
            buffer, self.body, self.size = self.body, bytearray(), 0
            self._writer.release_buffer(buffer)

    def response_started(self) -> None:
        """The first token is there, whether or not it was sent already."""
        self._writer.response_started()

    def send(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """Send the whole response."""
        self._begin(status)
        self._complete = True
        self._writer.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
            b"x-request-id: %b\r\n%b%b%b\r\n%b"
            % (
                STATUS_LINES[status],
                content_type,
                len(body),
                (self.id or new_id("req-")).encode(),
                self.head.response_headers,
                headers,
                self._connection_header(),
                b"" if self.head.method == "HEAD" else body,
            )
        )

    def start(self, content_type: bytes, first: bytes) -> StreamingResponse:
        """Send the head of a streamed response, together with its first bytes."""
        self._begin(200)
        http10 = self.head.http10  # knows no chunks: the response ends with the connection
        self._closes = self._closes or http10
        self.stream = StreamingResponse(self._writer, chunked=not http10)
        self._writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n"
            b"x-request-id: %b\r\n%b%b%b\r\n%b"
            % (
                content_type,
                (self.id or new_id("req-")).encode(),
                self.head.response_headers,
                b"" if http10 else b"transfer-encoding: chunked\r\n",
                self._connection_header(),
                first if http10 else _chunk(first),
            )
        )
        return self.stream

    def _begin(self, status: int) -> None:
        if self.status:
            raise RuntimeError("a request was answered twice")
        self.status = status

    def _connection_header(self) -> bytes:
        self._closes = self._closes or self._writer.closing
        if self._closes:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.head.http10 else b""


class StreamingResponse:
    """The body of a streamed response; it exists once the head was sent."""

    __slots__ = ("_chunked", "_write", "_write_soon", "ended", "error_event")

    def __init__(self, writer: ResponseWriter, chunked: bool) -> None:
        self._write_soon = writer.write_soon
        self._write = writer.write
        self._chunked = chunked
        self.ended = False
        self.error_event: Callable[[TriptychError], bytes] | None = None  # None: OpenAI's own

    def write(self, data: bytes) -> None:
        self._write_soon(_chunk(data) if self._chunked else data)

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """A faster ``write`` for data that differs only in its middle."""
        fixed = len(before) + len(after)
        if not self._chunked:
            return lambda middle: self._write_soon(before + middle + after)
        after += b"\r\n"
        return lambda middle: self._write_soon(
            b"%x\r\n%b%b%b" % (fixed + len(middle), before, middle, after)
        )

    def end(self, data: bytes = b"") -> None:
        """Write the last bytes; later writes are dropped."""
        if self.ended:
            return
        self.ended, self._write_soon = True, _drop
        self._write(_chunk(data) + b"0\r\n\r\n" if self._chunked else data)


def _chunk(data: bytes) -> bytes:
    """Empty data makes no chunk: an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _drop(data: bytes) -> None: ...
