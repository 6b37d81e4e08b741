"""The head of an HTTP/1.1 request: read by llhttp, then checked once.

``parse`` gives a Head or raises; what it gives is free of the ambiguities that request smuggling
lives on. Of bodies it knows how their length is declared, and how to take chunks apart.
"""

from __future__ import annotations

import re

import httptools

from triptych.errors import HeadersTooLarge, InvalidHTTP, PayloadTooLarge

_ONCE = frozenset((b"host", b"authorization", b"content-type", b"transfer-encoding", b"expect"))
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_ORIGIN = re.compile("https?://[^/?]*", re.IGNORECASE)


class Head:
    """One request head. Names of headers are in lower case, values as they came."""

    __slots__ = (
        "_body",
        "_complete",
        "_limit",
        "_parser",
        "_repeated",
        "_url",
        "bodiless",
        "chunked",
        "headers",
        "keep_alive",
        "length",
        "method",
        "old",
        "path",
        "surplus",
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
        self.old = False  # HTTP/1.0: knows no chunks
        self.surplus = False  # after chunks: the next request has begun in the same bytes
        self.tenant = ""  # whose request it is, once its key is known
        self._url = b""
        self._repeated = b""
        self._complete = False
        self._body: bytearray | None = None
        self._limit = 0
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def chunks(self, data: bytes | memoryview, body: bytearray, limit: int) -> bool:
        """Add the chunks in ``data`` to ``body``; tell whether the body is complete."""
        self._body, self._limit = body, limit
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.surplus = True
        except httptools.HttpParserError as error:
            if len(body) <= limit:
                raise InvalidHTTP(f"The body is badly chunked: {error}.") from None
        if len(body) > limit:
            raise PayloadTooLarge(f"The body is larger than the limit of {limit} bytes.")
        if self._complete:
            self.let_go()
        return self._complete

    def let_go(self) -> None:
        """The parser holds this head and this head the parser: part them, nobody has to collect."""
        self._parser = None

    def on_message_begin(self) -> None:
        self.surplus = self._complete

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is not None:
            return  # a trailer: nothing in it is for us
        name = name.lower()
        if name in self.headers and name in _ONCE:
            self._repeated = name
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        if self._body is None and self._parser is not None:  # later, the parser has forgotten it
            self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        body = self._body
        if body is not None:
            if len(body) > self._limit:
                raise PayloadTooLarge("")  # ends the parser's loop; chunks() says it in full
            body += data

    def on_message_complete(self) -> None:
        self._complete = True

    def read(self, data: bytes | memoryview, most_headers: int) -> None:
        """Take over what the parser finds, or refuse it."""
        parser, headers = self._parser, self.headers
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise InvalidHTTP(f"The request is no valid HTTP/1.1: {error}.") from None
        if len(headers) > most_headers:
            raise HeadersTooLarge(f"The request has more than {most_headers} headers.")
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidHTTP("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if self._repeated:
            raise InvalidHTTP(f"The header {self._repeated.decode('latin-1')} stands there twice.")
        self.old = version == "1.0"
        if b"host" not in headers and not self.old:
            raise InvalidHTTP("The Host header is missing.")
        self.method = parser.get_method().decode("latin-1")
        target = self._url.decode("latin-1")
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
            self.length = int(declared)  # llhttp lets only digits through


def parse(data: bytes | memoryview, most_headers: int) -> Head:
    """The head in ``data``, which ends with its empty line."""
    try:
        return _parse(data, most_headers)
    except httptools.HttpParserUpgrade:  # an offer that we need not take: read on without it
        data = _UPGRADE.sub(b"\r\nx-upgrade:", bytes(data))
    try:
        return _parse(data, most_headers)
    except httptools.HttpParserUpgrade:
        raise InvalidHTTP("CONNECT is not spoken here.") from None


def _parse(data: bytes | memoryview, most_headers: int) -> Head:
    head = Head()
    try:
        head.read(data, most_headers)
    finally:
        if not head.chunked:
            head.let_go()
    return head
