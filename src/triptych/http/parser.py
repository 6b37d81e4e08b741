"""Where each request begins and ends in a client's bytes: no socket, no clock, no route.

A connection goes through the phases idle, head, body, answering, and again idle, or done. The
phase alone says what a byte is: bytes that come while a request is answered are kept, and read
as the next head when that answer has ended; bytes behind a body are never part of it.
"""

from __future__ import annotations

import re
from enum import Enum

import httptools

from triptych.errors import HeadersTooLarge, InvalidHTTP, PayloadTooLarge
from triptych.http.buffers import BodyBuffer
from triptych.http.head import RequestHead, parse_head

OVERHEAD = 8  # bytes of chunk framing for each byte of body: enough for chunks of one byte
_CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_LINE_END = rb"(?:;[^\r\n]*)?\r\n"
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})" + _LINE_END)
_SMALL_CHUNKS = re.compile(  # any number, of up to 15 bytes each: too many to look at one by one
    rb"(?:0{0,15}(?:%b))*"
    % b"|".join(rb"(?i:%x)%b[\s\S]{%d}\r\n" % (size, _LINE_END, size) for size in range(1, 16))
)
_END = b"\r\n\r\n"  # of the trailer, and of the last size line where there is none


class RequestPhase(Enum):
    """How far the request is that a connection is at."""

    IDLE = "idle"  # nothing of it has come
    HEAD = "head"  # part of its head has come
    BODY = "body"  # its head has come, its body has not
    ANSWERING = "answering"  # it is whole
    DONE = "done"  # there will be no further one


class ChunkDecoder:
    """Takes a chunked body apart, to its last byte and no further.

    llhttp decodes and checks it, but reads on behind the body without saying where that ended. So
    the size lines are read here too, to find the end: data is skipped, not searched. A body that
    the two read differently is refused.
    """

    __slots__ = (
        "_body", "_complete", "_fed", "_in_trailer", "_most", "_most_overhead", "_parser",
        "_skip", "_unread",
    )  # fmt: skip

    def __init__(self, most: int, most_overhead: int) -> None:
        self._most = most  # bytes of body
        self._most_overhead = most_overhead  # bytes of size lines, extensions and trailer
        self._body = bytearray()
        self._complete = False  # as llhttp sees it
        self._fed = 0
        self._skip = 0  # bytes to come that are data of the current chunk
        self._unread = bytearray()  # part of a size line, or of the trailer's end
        self._in_trailer = False
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED)

    def feed(self, data: bytearray, body: bytearray) -> bool:
        """Move chunks from the start of ``data`` into ``body``; tell whether it is complete."""
        self._body = body
        end = self._find_end(data)
        stop = len(data) if end is None else end
        with memoryview(data) as view, view[:stop] as piece:
            self._parse(piece)
        self._body = bytearray()  # it is the caller's
        if self._complete != (end is not None) or (not self._in_trailer and b"\n" in self._unread):
            raise InvalidHTTP("The body is badly chunked.")
        del data[:stop]
        if self._complete:
            self.let_go()
        return self._complete

    def let_go(self) -> None:
        """The parser holds this and this the parser: part them, nobody has to collect."""
        self._parser = None

    def _find_end(self, data: bytearray) -> int | None:
        """Where in ``data`` the body ends, if it does. A line that is no size line stops the
        search: llhttp, which reads it next, says what is wrong with it."""
        if not self._in_trailer and self._skip == 0 and b"\n" not in data:
            self._unread += data
            return None
        before = len(self._unread)
        raw = self._unread + data if before else data
        at = self._skip
        while not self._in_trailer and (line := _SIZE_LINE.match(raw, at)):
            size = int(line[1], 16)
            self._in_trailer = size == 0
            at = line.end() - 2 if size == 0 else line.end() + size + 2
            if 0 < size < 16 and at < len(raw) and (more := _SMALL_CHUNKS.match(raw, at)):
                at = more.end()
        if self._in_trailer:
            end = raw.find(_END, at)
            if end >= 0:
                return end + len(_END) - before
            at = max(at, len(raw) - len(_END) + 1)
        self._skip = max(0, at - len(raw))
        self._unread = raw[at:]
        return None

    def _parse(self, piece: memoryview) -> None:
        body, parser = self._body, self._parser
        assert parser is not None
        self._fed += len(piece)
        try:
            parser.feed_data(piece)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MemoryError):  # in on_body
                raise error.__context__ from None
            if len(body) <= self._most:
                raise InvalidHTTP(f"The body is badly chunked: {error}.") from None
        if len(body) > self._most:
            raise PayloadTooLarge(f"The body is larger than the limit of {self._most} bytes.")
        if self._fed - len(body) > self._most_overhead + OVERHEAD * len(body):
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")

    def on_body(self, data: bytes) -> None:
        if len(self._body) > self._most:
            raise PayloadTooLarge("")  # ends the parser's loop; _parse says it in full
        self._body += data

    def on_message_complete(self) -> None:
        self._complete = True


class RequestParser:
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
        "in_place",
        "phase",
    )

    def __init__(self, header_bytes: int, headers: int) -> None:
        self.phase = RequestPhase.IDLE
        self.head: RequestHead | None = None  # of the request in the phase body or answering
        self._header_bytes = header_bytes
        self._headers = headers
        self._ahead = bytearray()  # bytes that have come and belong to nothing yet
        self._searched = 0  # bytes of these in which no head ends
        self._blank = False  # an empty line before the head was passed over
        self._body: BodyBuffer = bytearray()
        self.in_place = False  # bytes that come now are put into ``space``, and ``fill`` it
        self._view: memoryview | None = None  # the body's memory, then
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
        return self.in_place or self._chunks is not None

    @property
    def asks_for_head_only(self) -> bool:
        """Whether an answer to the request at hand, valid or not, must have no body."""
        if self.head is not None:
            return self.head.method == "HEAD"
        return self._ahead.startswith(b"HEAD ")

    # --- bytes in

    def receive(self, data: bytes | memoryview) -> None:
        """Bytes from the client."""
        if self.phase is not RequestPhase.DONE:
            self._ahead += data

    def space(self, most: int) -> memoryview:
        """Where the next bytes, all of them of the body, are to be put; ``fill`` then."""
        assert self._view is not None
        return self._view[self._filled : self._filled + most]

    def fill(self, size: int) -> bool:
        """So many bytes were put into ``space``; tell whether the body is complete."""
        assert self._view is not None
        self._filled += size
        return self._filled == len(self._view) and self._complete()

    # --- requests out

    def read_head(self) -> RequestHead | None:
        """The next request's head, once it is there."""
        assert self.phase in (RequestPhase.IDLE, RequestPhase.HEAD), self.phase
        ahead = self._ahead
        if not self._blank and ahead.startswith(b"\r\n"):  # as some clients send behind a body
            del ahead[:2]
            self._blank, self._searched = True, 0
        if not ahead:
            self.phase = RequestPhase.IDLE
            return None
        self.phase = RequestPhase.HEAD
        end = ahead.find(b"\r\n\r\n", self._searched)
        if (len(ahead) if end < 0 else end) > self._header_bytes:
            raise HeadersTooLarge(f"The head is larger than {self._header_bytes} bytes.")
        if end < 0:
            self._searched = max(0, len(ahead) - 3)
            return None
        end += 4
        with memoryview(ahead) as view:
            self.head = parse_head(view[:end], self._headers)
        del ahead[:end]
        self._searched, self._blank = 0, False
        self.phase = RequestPhase.BODY
        return self.head

    def take_whole(self) -> bool:
        """Whether the body is there already, as that of a small request, or there is none."""
        assert self.phase is RequestPhase.BODY, self.phase
        assert self.head is not None
        length = self.head.length
        if self.head.chunked or len(self._ahead) < length:
            return False
        if length:
            self._body = self._ahead[:length]
            del self._ahead[:length]
        self._filled = length
        self.phase = RequestPhase.ANSWERING
        return True

    def begin_body(self, memory: BodyBuffer | None, most: int) -> None:
        """Take in a body: into ``memory`` when its length is declared, else up to ``most``."""
        assert self.phase is RequestPhase.BODY, self.phase
        assert self.head is not None
        assert not self.begun
        if memory is None:
            self._chunks = ChunkDecoder(most, self._header_bytes)
            return
        self._body, self.in_place = memory, True
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

    def hand_over(self) -> tuple[RequestHead, BodyBuffer, int]:
        """The whole request: its head, its body and how many bytes of that memory are its own."""
        assert self.phase is RequestPhase.ANSWERING, self.phase
        assert self.head is not None
        body, self._body = self._body, bytearray()
        return self.head, body, self._filled

    def finish(self) -> None:
        """The answer has ended, and the connection goes on."""
        assert self.phase is RequestPhase.ANSWERING, self.phase
        self.phase = RequestPhase.IDLE
        self.head = None
        self._filled = 0

    def stop(self) -> None:
        """No further request is taken: what has come and what will come is for nobody."""
        self.phase = RequestPhase.DONE
        if self._chunks is not None:
            self._chunks.let_go()
        self.head = self._view = self._chunks = None
        self.in_place = False
        self._body, self._ahead = bytearray(), bytearray()

    def _complete(self) -> bool:
        self._filled = self.size
        self._view = self._chunks = None
        self.in_place = False
        self.phase = RequestPhase.ANSWERING
        return True
