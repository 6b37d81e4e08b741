"""Where each request begins and ends in a client's bytes: no socket, no clock, no route.

A connection goes through the phases idle, head, body, answering, and again idle, or done. The
phase alone says what a byte is: bytes that come while a request is answered are kept, and read
as the next head when that answer has ended; bytes behind a body are never part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from triptych.errors import HeadersTooLarge, InvalidHTTP, PayloadTooLarge
from triptych.frontend.buffers import Body
from triptych.frontend.head import Head, parse

OVERHEAD = 8  # bytes of chunk framing for each byte of body: enough for chunks of one byte
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_SIZE_BEGUN = re.compile(rb"(?:[0-9A-Fa-f]{1,16}(?:;[\t\x20-\x7e\x80-\xff]*)?)?\r?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class Phase(Enum):
    """How far the request is that a connection is at."""

    IDLE = "idle"  # nothing of it has come
    HEAD = "head"  # part of its head has come
    BODY = "body"  # its head has come, its body has not
    ANSWERING = "answering"  # it is whole
    DONE = "done"  # there will be no further one


class ChunkDecoder:
    """Takes a chunked body apart, to its last byte and no further."""

    __slots__ = ("_left", "_most", "_most_overhead", "_overhead", "_step")

    def __init__(self, most: int, most_overhead: int) -> None:
        self._most = most  # bytes of body
        self._most_overhead = most_overhead  # bytes of size lines, extensions and trailer
        self._overhead = 0
        self._left = 0  # bytes of the chunk that are still to come
        self._step: _Step = ChunkDecoder._chunk

    def feed(self, data: bytearray, body: bytearray) -> bool:
        """Move chunks from the start of ``data`` into ``body``; tell whether it is complete."""
        raw, at = bytes(data), 0
        while (used := self._step(self, raw, at, body)) > 0:
            at += used
        del data[:at]
        if self._overhead > self._most_overhead + OVERHEAD * len(body):
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")
        return used < 0

    # Each step gives how many bytes it has used; 0: more must come; -1: the body is complete.

    def _chunk(self, data: bytes, at: int, body: bytearray) -> int:
        """A chunk's size, and all of the chunk if it is there."""
        start = data.find(b"\r\n", at) + 2
        if start < 2:
            if not _SIZE_BEGUN.fullmatch(data, at):
                raise InvalidHTTP("The body is badly chunked: a chunk's size is not valid.")
            return self._wait(len(data) - at, body)
        line = _SIZE_LINE.fullmatch(data, at, start - 2)
        if line is None:
            raise InvalidHTTP("The body is badly chunked: a chunk's size is not valid.")
        size = int(line[1], 16)
        if len(body) + size > self._most:
            raise PayloadTooLarge(f"The body is larger than the limit of {self._most} bytes.")
        self._overhead += start - at
        end = start + size
        if size and data.startswith(b"\r\n", end):
            body += data[start:end]
            return end + 2 - at
        self._left = size
        self._step = ChunkDecoder._data if size else ChunkDecoder._trailer
        return start - at

    def _data(self, data: bytes, at: int, body: bytearray) -> int:
        size = min(self._left, len(data) - at)
        body += data[at : at + size]
        self._left -= size
        if not self._left:
            self._step = ChunkDecoder._data_end
        return size

    def _data_end(self, data: bytes, at: int, body: bytearray) -> int:
        """The line break behind a chunk."""
        if data.startswith(b"\r\n", at):
            self._step = ChunkDecoder._chunk
            return 2
        if data[at:] not in (b"", b"\r"):
            raise InvalidHTTP("The body is badly chunked: a chunk is longer than its size.")
        return 0

    def _trailer(self, data: bytes, at: int, body: bytearray) -> int:
        """A line of the trailer, of which nothing is used."""
        end = data.find(b"\r\n", at)
        if end < 0:
            return self._wait(len(data) - at, body)
        if end == at:
            self._step = ChunkDecoder._end
        elif not _TRAILER.fullmatch(data, at, end):
            raise InvalidHTTP("The body is badly chunked: its trailer is not valid.")
        self._overhead += end + 2 - at
        return end + 2 - at

    def _end(self, data: bytes, at: int, body: bytearray) -> int:
        return -1

    def _wait(self, more: int, body: bytearray) -> int:
        """A line is not complete, and may not become too long."""
        if self._overhead + more > self._most_overhead + OVERHEAD * len(body):
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")
        return 0


_Step = Callable[[ChunkDecoder, bytes, int, bytearray], int]


class RequestReader:
    """The requests of one connection, one at a time.

    In order: ``receive`` bytes; ``read_head`` until there is one; ``take_whole`` or, when there is
    room for it, ``begin_body`` and ``read_body`` until that is complete; ``hand_over``; and when
    the answer has ended, ``finish``. A method that is called in another phase raises.
    """

    __slots__ = (
        "_ahead",
        "_blank",
        "_body",
        "_chunks",
        "_filled",
        "_header_bytes",
        "_headers",
        "_searched",
        "_view",
        "head",
        "phase",
    )

    def __init__(self, header_bytes: int, headers: int) -> None:
        self.phase = Phase.IDLE
        self.head: Head | None = None  # of the request in the phase body or answering
        self._header_bytes = header_bytes
        self._headers = headers
        self._ahead = bytearray()  # bytes that have come and belong to nothing yet
        self._searched = 0  # bytes of these in which no head ends
        self._blank = False  # an empty line before the head was passed over
        self._body: Body = bytearray()
        self._view: memoryview | None = None  # the body's memory while it is received in place
        self._filled = 0
        self._chunks: ChunkDecoder | None = None

    @property
    def ahead(self) -> int:
        """Bytes that have come and belong to nothing yet."""
        return len(self._ahead)

    @property
    def size(self) -> int:
        """Bytes of the body that are in their place."""
        return len(self._body) if self._chunks is not None else self._filled

    @property
    def begun(self) -> bool:
        """The body has its place: bytes of it are taken in."""
        return self._view is not None or self._chunks is not None

    @property
    def asks_for_head_only(self) -> bool:
        """Whether an answer to the request at hand, valid or not, must have no body."""
        if self.head is not None:
            return self.head.method == "HEAD"
        return self._ahead.startswith(b"HEAD ")

    # --- bytes in

    def receive(self, data: bytes | memoryview) -> None:
        """Bytes from the client."""
        if self.phase is not Phase.DONE:
            self._ahead += data

    def space(self, most: int) -> memoryview | None:
        """Where the next bytes, all of them of the body, can be put; ``fill`` then."""
        if self._view is None:
            return None
        return self._view[self._filled : self._filled + most]

    def fill(self, size: int) -> bool:
        """So many bytes were put into ``space``; tell whether the body is complete."""
        assert self._view is not None
        self._filled += size
        return self._filled == len(self._view) and self._complete()

    # --- requests out

    def read_head(self) -> Head | None:
        """The next request's head, once it is there."""
        assert self.phase in (Phase.IDLE, Phase.HEAD), self.phase
        ahead = self._ahead
        if not self._blank and ahead.startswith(b"\r\n"):  # as some clients send behind a body
            del ahead[:2]
            self._blank, self._searched = True, 0
        if not ahead:
            self.phase = Phase.IDLE
            return None
        self.phase = Phase.HEAD
        end = ahead.find(b"\r\n\r\n", self._searched)
        if (len(ahead) if end < 0 else end) > self._header_bytes:
            raise HeadersTooLarge(f"The head is larger than {self._header_bytes} bytes.")
        if end < 0:
            self._searched = max(0, len(ahead) - 3)
            return None
        end += 4
        with memoryview(ahead) as view:
            self.head = parse(view[:end], self._headers)
        del ahead[:end]
        self._searched, self._blank = 0, False
        self.phase = Phase.BODY
        return self.head

    def take_whole(self) -> bool:
        """Whether the body is there already, as that of a small request, or there is none."""
        assert self.phase is Phase.BODY, self.phase
        assert self.head is not None
        length = self.head.length
        if self.head.chunked or len(self._ahead) < length:
            return False
        if length:
            self._body = self._ahead[:length]
            del self._ahead[:length]
        self._filled = length
        return self._complete()

    def begin_body(self, memory: Body | None, most: int) -> None:
        """Take in a body: into ``memory`` when its length is declared, else up to ``most``."""
        assert self.phase is Phase.BODY, self.phase
        assert self.head is not None
        assert not self.begun
        if memory is None:
            self._chunks = ChunkDecoder(most, self._header_bytes)
            return
        self._body = memory
        self._view = memoryview(memory)[: self.head.length]
        self._filled = min(len(self._ahead), self.head.length)
        self._view[: self._filled] = self._ahead[: self._filled]
        del self._ahead[: self._filled]

    def read_body(self) -> bool:
        """Take in what has come of a chunked body; tell whether it is complete."""
        if self._chunks is None or not self._ahead:
            return False
        assert isinstance(self._body, bytearray)
        return self._chunks.feed(self._ahead, self._body) and self._complete()

    def hand_over(self) -> tuple[Head, Body, int]:
        """The whole request: its head, its body and how many bytes of that memory are its own."""
        assert self.phase is Phase.ANSWERING, self.phase
        assert self.head is not None
        body, self._body = self._body, bytearray()
        return self.head, body, self._filled

    def finish(self) -> None:
        """The answer has ended, and the connection goes on."""
        assert self.phase is Phase.ANSWERING, self.phase
        self.phase = Phase.IDLE
        self.head = None
        self._filled = 0

    def stop(self) -> None:
        """No further request is taken: what has come and what will come is for nobody."""
        self.phase = Phase.DONE
        self.head = self._view = self._chunks = None
        self._body, self._ahead = bytearray(), bytearray()

    def _complete(self) -> bool:
        self._filled = self.size
        self._view = self._chunks = None
        self.phase = Phase.ANSWERING
        return True
