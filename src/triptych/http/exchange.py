"""One request and its answer, as bytes of HTTP/1.1.

What is written goes to a ``Wire`` at once; nothing here waits, and nothing here knows a route.
"""

from __future__ import annotations

import random
from asyncio import Task
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

import msgspec

from triptych.errors import TriptychError
from triptych.http.bodies import LARGE
from triptych.http.buffers import BodyBuffer
from triptych.http.head import RequestHead
from triptych.pipeline.request import Pausable

STATUS_LINES = {s.value: f"{s.value} {s.phrase}".encode() for s in HTTPStatus}
JSON = b"application/json"
LONGEST_MESSAGE = 1000  # characters of an error: whatever it quotes, the answer stays small
LONGEST_PARAM = 200
_EXTRA = {
    401: b"www-authenticate: Bearer\r\n",
    429: b"retry-after: 1\r\n",
    503: b"retry-after: 1\r\n",
}
_random = random.Random()  # seeded by the system; ids must differ, not be secret


def new_id(prefix: str) -> str:
    return f"{prefix}{_random.getrandbits(96):024x}"


def error_response(error: TriptychError) -> tuple[int, bytes, bytes]:
    """Status, body in OpenAI's shape, and extra headers of an error."""
    return error.status, error_body(error), _EXTRA.get(error.status, b"")


def error_body(error: TriptychError) -> bytes:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    message, param = _sayable(error.message, LONGEST_MESSAGE), error.param
    if param is not None:
        param = _sayable(param, LONGEST_PARAM)
    content = {"message": message, "type": kind, "param": param, "code": error.code}
    return msgspec.json.encode({"error": content})


def _sayable(text: str, longest: int) -> str:
    """What clients wrote may be quoted in it: in reason, and where it is text at all."""
    return text[:longest].encode(errors="replace").decode()


class ResponseWriter(Protocol):
    """Where an answer goes."""

    @property
    def closing(self) -> bool:
        """No further request will be taken after this one."""

    def write(self, data: bytes) -> None:
        """Now."""

    def put(self, data: bytes) -> None:
        """Together with whatever else is ready."""

    def answered(self) -> None:
        """The first of an answer has come."""

    def take_back(self, buffer: BodyBuffer) -> None:
        """The memory of a body that has been read."""


class HTTPExchange:
    """One request and its answer: sent whole, or started, written to and ended; each once."""

    __slots__ = (
        "_closes", "_whole", "_wire", "body", "cut", "flow", "head", "id", "large", "size",
        "status", "stream", "streams", "task",
    )  # fmt: skip

    def __init__(
        self, wire: ResponseWriter, head: RequestHead, body: BodyBuffer, size: int
    ) -> None:
        self._wire = wire
        self._whole = False  # the answer was sent at once
        self._closes = not head.keep_alive  # the connection ends with this answer
        self.id = ""  # told in the answer's head; one is made there if there is none
        self.head = head
        self.body = body
        self.size = size  # bytes of the body; its buffer may be larger
        self.large = size > LARGE
        self.flow: Pausable | None = None  # paused while the client does not read
        self.streams = 1  # that the flow is of
        self.stream: StreamingResponse | None = None  # once the answer has started
        self.status = 0
        self.cut = False  # its task is cancelled for our reasons, and not because the client left
        self.task: Task[None] | None = None  # that answers it

    @property
    def started(self) -> bool:
        """The status is on its way, errors can't change it any more."""
        return self.status != 0

    @property
    def ended(self) -> bool:
        """The answer is complete, to its last byte."""
        return self._whole or (self.stream is not None and self.stream.ended)

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow: known when the exchange has ended."""
        return self.ended and not self._closes

    def release(self) -> None:
        """Nobody will look at the body again."""
        if self.size:
            buffer, self.body, self.size = self.body, bytearray(), 0
            self._wire.take_back(buffer)

    def answered(self) -> None:
        """The first of an answer is there, whether or not it is sent already."""
        self._wire.answered()

    def send(
        self, status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b""
    ) -> None:
        """The whole answer at once."""
        self._begin(status)
        self._whole = True
        self._wire.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
            b"x-request-id: %b\r\n%b%b\r\n%b"
            % (
                STATUS_LINES[status],
                content_type,
                len(body),
                (self.id or new_id("req-")).encode(),
                extra,
                self._persistence(),
                b"" if self.head.method == "HEAD" else body,
            )
        )

    def start(self, content_type: bytes, first: bytes) -> StreamingResponse:
        """The head of an answer that comes in pieces, together with the first piece."""
        self._begin(200)
        old = self.head.old
        self._closes = self._closes or old  # where the answer ends, the connection's end tells
        self.stream = StreamingResponse(self._wire, chunked=not old)
        self._wire.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n"
            b"x-request-id: %b\r\n%b%b\r\n%b"
            % (
                content_type,
                (self.id or new_id("req-")).encode(),
                b"" if old else b"transfer-encoding: chunked\r\n",
                self._persistence(),
                first if old else _chunk(first),
            )
        )
        return self.stream

    def _begin(self, status: int) -> None:
        if self.status:
            raise RuntimeError("a request was answered twice")
        self.status = status

    def _persistence(self) -> bytes:
        self._closes = self._closes or self._wire.closing
        if self._closes:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.head.old else b""


class StreamingResponse:
    """The body of an answer that comes in pieces: there is none before its head was written."""

    __slots__ = ("_chunked", "_put", "_write", "ended")

    def __init__(self, wire: ResponseWriter, chunked: bool) -> None:
        self._put = wire.put
        self._write = wire.write
        self._chunked = chunked
        self.ended = False

    def write(self, piece: bytes) -> None:
        """One more piece."""
        self._put(_chunk(piece) if self._chunked else piece)

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """A quicker ``write`` for pieces that differ only in their middle."""
        fixed = len(before) + len(after)
        if not self._chunked:
            return lambda middle: self._put(before + middle + after)
        after += b"\r\n"
        return lambda middle: self._put(
            b"%x\r\n%b%b%b" % (fixed + len(middle), before, middle, after)
        )

    def end(self, piece: bytes = b"") -> None:
        """The last piece. What is written later goes nowhere."""
        if self.ended:
            return
        self.ended, self._put = True, _drop
        self._write(_chunk(piece) + b"0\r\n\r\n" if self._chunked else piece)


def _chunk(piece: bytes) -> bytes:
    """An empty piece is no chunk: that would be the end of all of them."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def _drop(data: bytes) -> None: ...
