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
from triptych.frontend.buffers import Body
from triptych.frontend.head import Head
from triptych.frontend.intake import LARGE
from triptych.pipeline.flow import Pausable

REASONS = {s.value: f"{s.value} {s.phrase}".encode() for s in HTTPStatus}
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


def refusal(error: TriptychError) -> tuple[int, bytes, bytes]:
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


class Wire(Protocol):
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

    def take_back(self, buffer: Body) -> None:
        """The memory of a body that has been read."""


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_plain", "_wire", "body", "cut", "flow", "head", "id", "large", "size", "started",
        "status", "streams", "task",
    )  # fmt: skip

    def __init__(self, wire: Wire, head: Head, body: Body, size: int) -> None:
        self._wire = wire
        self._plain = False  # an answer to HTTP/1.0: its end is the end of the connection
        self.id = ""  # told in the answer's head; one is made there if there is none
        self.head = head
        self.body = body
        self.size = size  # bytes of the body; its buffer may be larger
        self.large = size > LARGE
        self.flow: Pausable | None = None  # paused while the client does not read
        self.streams = 1  # that the flow is of
        self.started = False  # the status is on its way, errors can't change it any more
        self.status = 0
        self.cut = False  # its task is cancelled for our reasons, and not because the client left
        self.task: Task[None] | None = None  # that answers it

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
        self.started, self.status = True, status
        if self.head.method == "HEAD":
            length, body = len(body), b""
        else:
            length = len(body)
        self._wire.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
            b"x-request-id: %b\r\n%b%b\r\n%b"
            % (
                REASONS[status],
                content_type,
                length,
                (self.id or new_id("req-")).encode(),
                extra,
                self._closing(),
                body,
            )
        )

    def start(self, content_type: bytes, first: bytes) -> None:
        """The head of an answer that comes in pieces, together with the first piece."""
        self.started, self.status = True, 200
        self._plain = self.head.old
        if self._plain:
            self.head.keep_alive = False
        self._wire.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n"
            b"x-request-id: %b\r\n%b%b\r\n%b"
            % (
                content_type,
                (self.id or new_id("req-")).encode(),
                b"" if self._plain else b"transfer-encoding: chunked\r\n",
                self._closing(),
                first if self._plain else b"%x\r\n%b\r\n" % (len(first), first),
            )
        )

    def write(self, piece: bytes) -> None:
        """One more piece, never empty."""
        if not self._plain:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._wire.put(piece)

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """A quicker ``write`` for pieces that differ only in their middle."""
        put, fixed = self._wire.put, len(before) + len(after)
        if self._plain:
            return lambda middle: put(before + middle + after)
        after += b"\r\n"
        return lambda middle: put(b"%x\r\n%b%b%b" % (fixed + len(middle), before, middle, after))

    def end(self, piece: bytes = b"") -> None:
        """The last piece, and the end of the answer."""
        if not self._plain:
            last = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            piece = last + b"0\r\n\r\n"
        if piece:
            self._wire.write(piece)

    def _closing(self) -> bytes:
        if self._wire.closing:
            self.head.keep_alive = False
        return b"" if self.head.keep_alive else b"connection: close\r\n"
