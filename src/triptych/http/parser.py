"""Parses the requests of a connection: where each begins and ends. No socket, no clock, no route.

A connection goes through the phases idle, head, body, handling, and again idle, or done. The phase
alone says what a byte is: bytes that arrive while a request is handled wait, and are parsed as the
next head when its response has ended; bytes behind a body are never part of it.
"""

from __future__ import annotations

import re
from enum import Enum

import httptools

from triptych.errors import HeadersTooLarge, InvalidHTTP, PayloadTooLarge
from triptych.http.bodies import BodyBuffer

TLS_HANDSHAKE = b"\x16"  # the first byte of a client that speaks TLS
MAX_LENGTH_DIGITS = 19  # of a Content-Length; llhttp takes any number of leading zeros
_SINGLE = frozenset(
    (b"host", b"authorization", b"x-api-key", b"content-type", b"transfer-encoding", b"expect")
)
_REQUEST_LINE = re.compile(rb"([A-Z-]+) ([^ \r\n]+) HTTP/1\.([01])\r\n")  # llhttp takes RTSP, ICE
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_ORIGIN = re.compile("https?://[^/?]*", re.IGNORECASE)
MAX_OVERHEAD = 8  # bytes of chunk framing for each byte of body: enough for chunks of one byte
_CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_LINE_END = rb"(?:;[^\r\n]*)?\r\n"
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})" + _LINE_END)
_SMALL_CHUNKS = re.compile(  # any number, of up to 15 bytes each: too many to match one by one
    rb"(?:0{0,15}(?:%b))*"
    % b"|".join(rb"(?i:%x)%b[\s\S]{%d}\r\n" % (size, _LINE_END, size) for size in range(1, 16))
)
_END = b"\r\n\r\n"  # of the trailer, and of the last size line where there is none


class RequestHead:
    """The head of a request: read by llhttp, then checked for what request smuggling relies on.

    Names of headers are in lower case, values as the client sent them.
    """

    __slots__ = (
        "_complete",
        "_count",
        "_parser",
        "_repeated",
        "chunked",
        "headers",
        "http10",
        "ignores_body",
        "keep_alive",
        "length",
        "method",
        "path",
        "record",
        "response_headers",
        "tenant",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""  # neither decoded nor normalised, so that nothing can hide in it
        self.headers: dict[bytes, bytes] = {}
        self.length = 0  # declared bytes of the body; 0 when chunked
        self.chunked = False
        self.ignores_body = False  # set by Application.check_head: no route reads this body
        self.keep_alive = True
        self.http10 = False  # a client of HTTP/1.0 knows no chunks and no interim responses
        self.tenant = ""  # set by Application.check_head
        self.response_headers = b""  # the same: lines for every response, errors too
        self.record: object | None = None  # the same: what the application keeps of the request
        self._count = 0  # header lines
        self._repeated = b""
        self._complete = False
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for an interim response before it sends the body."""
        return not self.http10 and self.headers.get(b"expect", b"").lower() == b"100-continue"

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        name = name.lower()
        if name in self.headers and name in _SINGLE:
            self._repeated = name
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        self._complete = True
        if self._parser is not None:
            self.keep_alive = self._parser.should_keep_alive()

    def drop_parser(self) -> None:
        """Break the cycle of parser and head, so that no garbage collection is needed."""
        self._parser = None

    def read(self, data: bytes | memoryview, max_headers: int) -> None:
        """Parse a head, or refuse it."""
        parser, headers = self._parser, self.headers
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise
        except httptools.HttpParserError as error:
            raise InvalidHTTP(f"The request is not valid HTTP/1.1: {error}.") from None
        if self._count > max_headers:
            raise HeadersTooLarge(f"The request has more than {max_headers} headers.")
        line = _REQUEST_LINE.match(data)
        if line is None or not self._complete:
            raise InvalidHTTP("This server speaks HTTP/1.1 and HTTP/1.0 only.")
        if self._repeated:
            name = self._repeated.decode("latin-1")
            raise InvalidHTTP(f"The request has the header {name} twice.")
        method, target, version = line.groups()
        self.http10 = version == b"0"
        if b"host" not in headers and not self.http10:
            raise InvalidHTTP("The Host header is missing.")
        self.method = method.decode("latin-1")
        path = target.decode("latin-1")
        if not path.startswith("/"):
            path = _ORIGIN.sub("", path, count=1)  # the form that clients send to a proxy
        self.path = path.partition("?")[0]
        self._read_length()

    def _read_length(self) -> None:
        """Read how the length of the body is declared, in one way only."""
        coding = self.headers.get(b"transfer-encoding")
        declared = self.headers.get(b"content-length")
        if coding is not None:
            if declared is not None or coding.lower() != b"chunked" or self.http10:
                raise InvalidHTTP("Give either Content-Length or Transfer-Encoding: chunked.")
            self.chunked = True
        elif declared is not None:
            if len(declared) > MAX_LENGTH_DIGITS:
                raise InvalidHTTP(f"Content-Length has more than {MAX_LENGTH_DIGITS} digits.")
            self.length = int(declared)  # llhttp lets only digits through


def parse_head(data: bytes | memoryview, max_headers: int) -> RequestHead:
    """The head in ``data``, from its request line to its empty line."""
    try:
        return _parse(data, max_headers)
    except (
        httptools.HttpParserUpgrade
    ):  # an offer that servers may ignore: read the head without it
        data = _UPGRADE.sub(b"\r\nx-upgrade:", bytes(data))
    try:
        return _parse(data, max_headers)
    except httptools.HttpParserUpgrade:
        raise InvalidHTTP("CONNECT is not supported.") from None


def _parse(data: bytes | memoryview, max_headers: int) -> RequestHead:
    head = RequestHead()
    try:
        head.read(data, max_headers)
    finally:
        head.drop_parser()
    return head


class RequestPhase(Enum):
    """What a connection expects of its current request."""

    IDLE = "idle"  # nothing has arrived
    HEAD = "head"  # part of the head has arrived
    BODY = "body"  # the head has arrived, the body has not
    HANDLING = "handling"  # the request is complete and being answered
    DONE = "done"  # no further request is taken


# Every request compares its phase about twenty times, and Python 3.11 takes 0.2 us to find a member
# of an Enum.
IDLE, HEAD, BODY, HANDLING, DONE = RequestPhase


class ChunkDecoder:
    """Decodes a chunked body, to its last byte and no further.

    llhttp decodes and checks it, but continues behind the body without saying where that ended. So
    the size lines are read here too, to find the end: data is skipped, not searched. A body that
    the two read differently is refused.
    """

    __slots__ = (
        "_body", "_complete", "_fed", "_in_trailer", "_max_bytes", "_max_overhead", "_parser",
        "_skip", "_unread",
    )  # fmt: skip

    def __init__(self, max_bytes: int, max_overhead: int) -> None:
        self._max_bytes = max_bytes  # of the body
        self._max_overhead = max_overhead  # bytes of size lines, extensions and trailer
        self._body = bytearray()
        self._complete = False  # says llhttp
        self._fed = 0
        self._skip = 0  # bytes of the current chunk that are yet to arrive
        self._unread = bytearray()  # part of a size line, or of the trailer's end
        self._in_trailer = False
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED)

    def feed(self, data: bytearray, body: bytearray) -> bool:
        """Move chunks from the start of ``data`` into ``body``; return whether it is complete."""
        self._body = body
        end = self._find_end(data)
        stop = len(data) if end is None else end
        with memoryview(data) as view, view[:stop] as piece:
            self._parse(piece)
        self._body = bytearray()  # the caller owns it
        if self._complete != (end is not None) or (not self._in_trailer and b"\n" in self._unread):
            raise InvalidHTTP("The body is badly chunked.")
        del data[:stop]
        if self._complete:
            self.drop_parser()
        return self._complete

    def drop_parser(self) -> None:
        """Break the cycle of parser and decoder, so that no garbage collection is needed."""
        self._parser = None

    def _find_end(self, data: bytearray) -> int | None:
        """Where in ``data`` the body ends, if it does. A line that is not a size line stops the
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
            if len(body) <= self._max_bytes:
                raise InvalidHTTP(f"The body is badly chunked: {error}.") from None
        if len(body) > self._max_bytes:
            raise PayloadTooLarge(f"The body is larger than the limit of {self._max_bytes} bytes.")
        if self._fed - len(body) > self._max_overhead + MAX_OVERHEAD * len(body):
            raise HeadersTooLarge("The trailer or a chunk's extension is too large.")

    def on_body(self, data: bytes) -> None:
        if len(self._body) > self._max_bytes:
            raise PayloadTooLarge("")  # ends the loop of llhttp; _parse raises the full error
        self._body += data

    def on_message_complete(self) -> None:
        self._complete = True


class RequestParser:
    """The requests of one connection, one at a time.

    In order: ``receive`` bytes; ``read_head`` until there is one; ``take_whole_body`` or, once it
    is admitted, ``begin_body`` and ``read_body`` until it is complete; ``take_request``; and when
    the response has ended, ``finish``. A method that is called in another phase raises.
    """

    __slots__ = (
        "_blank_skipped",
        "_body",
        "_chunks",
        "_filled",
        "_header_bytes",
        "_headers",
        "_searched",
        "_unparsed",
        "_view",
        "head",
        "in_place",
        "phase",
    )

    def __init__(self, header_bytes: int, headers: int) -> None:
        self.phase = IDLE
        self.head: RequestHead | None = None  # in the phases body and handling
        self._header_bytes = header_bytes
        self._headers = headers
        self._unparsed = bytearray()  # bytes that have arrived and belong to nothing yet
        self._searched = 0  # of these: no head ends in them
        self._blank_skipped = False  # an empty line before the head
        self._body: BodyBuffer = bytearray()
        self.in_place = False  # the socket reads into ``free_space``; then call ``filled``
        self._view: memoryview | None = None  # of the body's memory, if in place
        self._filled = 0
        self._chunks: ChunkDecoder | None = None

    @property
    def unparsed(self) -> int:
        """Bytes that have arrived and belong to nothing yet."""
        return len(self._unparsed)

    @property
    def size(self) -> int:
        """Bytes of the body that have arrived."""
        return len(self._body) if self._chunks is not None else self._filled

    @property
    def body_begun(self) -> bool:
        """Whether ``begin_body`` was called."""
        return self.in_place or self._chunks is not None

    @property
    def is_head_request(self) -> bool:
        """Whether the response to the current request, valid or not, must have no body."""
        if self.head is not None:
            return self.head.method == "HEAD"
        return self._unparsed.startswith(b"HEAD ")

    @property
    def begins_with_tls(self) -> bool:
        """Whether the bytes that have arrived are a TLS handshake. No head begins so."""
        return self._unparsed.startswith(TLS_HANDSHAKE)

    # --- bytes

    def receive(self, data: bytes | memoryview) -> None:
        """Add bytes from the client."""
        if self.phase is not DONE:
            self._unparsed += data

    def free_space(self, size: int) -> memoryview:
        """Where the next bytes of the body go, ``size`` of them at most."""
        assert self._view is not None
        return self._view[self._filled : self._filled + size]

    def filled(self, size: int) -> bool:
        """Count bytes that went into ``free_space``; return whether the body is complete."""
        assert self._view is not None
        self._filled += size
        return self._filled == len(self._view) and self._complete()

    # --- requests

    def read_head(self) -> RequestHead | None:
        """The head of the next request, once it is complete."""
        assert self.phase in (IDLE, HEAD), self.phase
        unparsed = self._unparsed
        if not self._blank_skipped and unparsed.startswith(
            b"\r\n"
        ):  # some clients send it after a body
            del unparsed[:2]
            self._blank_skipped, self._searched = True, 0
        if not unparsed:
            self.phase = IDLE
            return None
        self.phase = HEAD
        end = unparsed.find(b"\r\n\r\n", self._searched)
        if (len(unparsed) if end < 0 else end) > self._header_bytes:
            raise HeadersTooLarge(f"The head is larger than {self._header_bytes} bytes.")
        if end < 0:
            self._searched = max(0, len(unparsed) - 3)
            return None
        end += 4
        with memoryview(unparsed) as view:
            self.head = parse_head(view[:end], self._headers)
        del unparsed[:end]
        self._searched, self._blank_skipped = 0, False
        self.phase = BODY
        return self.head

    def take_whole_body(self) -> bool:
        """Take a body that has arrived with its head, or is empty; return whether it has."""
        assert self.phase is BODY, self.phase
        assert self.head is not None
        length = self.head.length
        if self.head.chunked or len(self._unparsed) < length:
            return False
        if length:
            self._body = self._unparsed[:length]
            del self._unparsed[:length]
        self._filled = length
        self.phase = HANDLING
        return True

    def begin_body(self, memory: BodyBuffer | None, max_bytes: int) -> None:
        """Receive a body: of declared length into ``memory``, a chunked one up to ``max_bytes``."""
        assert self.phase is BODY, self.phase
        assert self.head is not None
        assert not self.body_begun
        if memory is None:
            self._chunks = ChunkDecoder(max_bytes, self._header_bytes)
            return
        self._body, self.in_place = memory, True
        self._view = memoryview(memory)[: self.head.length]
        self._filled = min(len(self._unparsed), self.head.length)
        self._view[: self._filled] = self._unparsed[: self._filled]
        del self._unparsed[: self._filled]

    def read_body(self) -> bool:
        """Decode what has arrived of a chunked body; return whether it is complete."""
        if self._chunks is None or not self._unparsed:
            return False
        assert isinstance(self._body, bytearray)
        return self._chunks.feed(self._unparsed, self._body) and self._complete()

    def take_request(self) -> tuple[RequestHead, BodyBuffer, int]:
        """The complete request: head, memory of the body, and bytes of the body in it."""
        assert self.phase is HANDLING, self.phase
        assert self.head is not None
        body, self._body = self._body, bytearray()
        return self.head, body, self._filled

    def finish(self) -> None:
        """Expect the next request: the response has ended."""
        assert self.phase is HANDLING, self.phase
        self.phase = IDLE
        self.head = None
        self._filled = 0

    def stop(self) -> None:
        """Take no further request: drop what has arrived and what will arrive."""
        self.phase = DONE
        if self._chunks is not None:
            self._chunks.drop_parser()
        self.head = self._view = self._chunks = None
        self.in_place = False
        self._body, self._unparsed = bytearray(), bytearray()

    def _complete(self) -> bool:
        self._filled = self.size
        self._view = self._chunks = None
        self.in_place = False
        self.phase = HANDLING
        return True
