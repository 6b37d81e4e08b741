"""The head of an HTTP/1.1 request: read by llhttp, then checked once.

``parse`` gives a Head or raises; what it gives is free of the ambiguities that request smuggling
lives on. Of bodies it knows only how their length is declared.
"""

from __future__ import annotations

import re

import httptools

from triptych.errors import HeadersTooLarge, InvalidHTTP

LENGTH_DIGITS = 19  # of a Content-Length; llhttp takes any number of leading zeros
_ONCE = frozenset((b"host", b"authorization", b"content-type", b"transfer-encoding", b"expect"))
_REQUEST_LINE = re.compile(rb"([A-Z-]+) ([^ \r\n]+) HTTP/1\.([01])\r\n")  # llhttp takes RTSP, ICE
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_ORIGIN = re.compile("https?://[^/?]*", re.IGNORECASE)


class RequestHead:
    """One request head. Names of headers are in lower case, values as they came."""

    __slots__ = (
        "_complete",
        "_count",
        "_parser",
        "_repeated",
        "bodiless",
        "chunked",
        "headers",
        "keep_alive",
        "length",
        "method",
        "old",
        "path",
        "tenant",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""  # nothing in it is decoded or normalised, so nothing can hide in it
        self.headers: dict[bytes, bytes] = {}
        self.length = 0  # declared bytes of the body; 0 when chunked
        self.chunked = False
        self.bodiless = False  # nothing that it may ask for takes a body
        self.keep_alive = True
        self.old = False  # HTTP/1.0: knows no chunks and no interim answers
        self.tenant = ""  # whose request it is, once its key is known
        self._count = 0  # header lines, of whatever names
        self._repeated = b""
        self._complete = False
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for an interim answer before it sends the body."""
        return not self.old and self.headers.get(b"expect", b"").lower() == b"100-continue"

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        name = name.lower()
        if name in self.headers and name in _ONCE:
            self._repeated = name
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        self._complete = True
        if self._parser is not None:
            self.keep_alive = self._parser.should_keep_alive()

    def let_go(self) -> None:
        """The parser holds this head and this head the parser: part them, nobody has to collect."""
        self._parser = None

    def read(self, data: bytes | memoryview, most_headers: int) -> None:
        """Take over what the parser finds, or refuse it."""
        parser, headers = self._parser, self.headers
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise
        except httptools.HttpParserError as error:
            raise InvalidHTTP(f"The request is not valid HTTP/1.1: {error}.") from None
        if self._count > most_headers:
            raise HeadersTooLarge(f"The request has more than {most_headers} headers.")
        line = _REQUEST_LINE.match(data)
        if line is None or not self._complete:
            raise InvalidHTTP("This server speaks HTTP/1.1 and HTTP/1.0 only.")
        if self._repeated:
            name = self._repeated.decode("latin-1")
            raise InvalidHTTP(f"The request has the header {name} twice.")
        self.old = line[3] == b"0"
        if b"host" not in headers and not self.old:
            raise InvalidHTTP("The Host header is missing.")
        self.method = line[1].decode("latin-1")
        target = line[2].decode("latin-1")
        if not target.startswith("/"):
            target = _ORIGIN.sub("", target, count=1)  # as clients write it to a proxy
        self.path = target.partition("?")[0]
        self._measure()

    def _measure(self) -> None:
        """How the body's length is declared: in one way only."""
        coding = self.headers.get(b"transfer-encoding")
        declared = self.headers.get(b"content-length")
        if coding is not None:
            if declared is not None or coding.lower() != b"chunked" or self.old:
                raise InvalidHTTP("Give either Content-Length or Transfer-Encoding: chunked.")
            self.chunked = True
        elif declared is not None:
            if len(declared) > LENGTH_DIGITS:
                raise InvalidHTTP(f"Content-Length has more than {LENGTH_DIGITS} digits.")
            self.length = int(declared)  # llhttp lets only digits through


def parse_head(data: bytes | memoryview, most_headers: int) -> RequestHead:
    """The head in ``data``, which begins with its request line and ends with its empty line."""
    try:
        return _parse(data, most_headers)
    except httptools.HttpParserUpgrade:  # an offer that we need not take: read on without it
        data = _UPGRADE.sub(b"\r\nx-upgrade:", bytes(data))
    try:
        return _parse(data, most_headers)
    except httptools.HttpParserUpgrade:
        raise InvalidHTTP("CONNECT is not supported.") from None


def _parse(data: bytes | memoryview, most_headers: int) -> RequestHead:
    head = RequestHead()
    try:
        head.read(data, most_headers)
    finally:
        head.let_go()
    return head
