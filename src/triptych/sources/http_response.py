"""Reads one HTTP/1.1 response from a server that may be hostile. No network here.

Everything that is not body (interim responses, status lines, headers, chunk sizes and extensions,
trailers) shares one small allowance, so no server can send for long without sending a body, and
the body has the caller's limit. Bytes are parsed in small steps and checked after each.
"""

from __future__ import annotations

from collections.abc import Iterator

import httptools

OVERHEAD_BYTES = 64 << 10  # that are not body, and besides
OVERHEAD_SHARE = 8  # one for each so many bytes of body: chunk sizes
MAX_HEADER_LINES = 256  # of all responses together, trailers included
MAX_INTERIM_RESPONSES = 8  # 1xx
MAX_VALUE_CHARACTERS = 8193  # characters of a header that are kept: one more than a URL may have
_HEAD_STEP = 4 << 10
_BODY_STEP = 16 << 10
_KEPT = frozenset(
    b"location etag last-modified cache-control age vary content-encoding content-length "
    b"transfer-encoding".split()
)


class BadResponse(ValueError):
    """The server does not speak HTTP, or sends too much that is not body."""


class ResponseReader:
    """``feed`` it what arrives, then ``end`` it when the server closes the connection."""

    def __init__(self) -> None:
        self.status = 0  # of the final response, once its head is complete
        self.headers: dict[str, str] = {}  # of those that matter, by small letters
        self.received = 0  # bytes, of whatever they were
        self.body_bytes = 0  # of those, as they came: packed, if they are packed
        self.complete = False
        self.keep_alive = False  # the connection can take another request
        self._parser = httptools.HttpResponseParser(self)
        self._lines = 0
        self._interim = 0
        self._pieces: list[bytes] = []
        self._fault = ""

    @property
    def length(self) -> int | None:
        """Bytes of the body as declared; None if they are not."""
        text = self.headers.get("content-length")
        return None if text is None else int(text)  # the parser takes digits only

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of the body, as they are found."""
        rest = memoryview(data)
        while rest and not self.complete:
            step = _BODY_STEP if self.status else _HEAD_STEP
            self._parse(rest[:step])
            rest = rest[step:]
            yield from self._pieces
            self._pieces.clear()
        if rest:  # after its end; what it is does not matter
            self.received += len(rest)
            self.keep_alive = False

    def end(self) -> None:
        """The server has closed the connection: the end of a body that nothing else ends."""
        self.keep_alive = False
        if self.complete:
            return
        if not self.status or {"content-length", "transfer-encoding"} & self.headers.keys():
            raise BadResponse("it broke off")
        self.complete = True

    def _parse(self, data: memoryview) -> None:
        self.received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise BadResponse("it is not HTTP") from error
            self.keep_alive = False  # something follows the end
        if self.received - self.body_bytes > OVERHEAD_BYTES + self.body_bytes // OVERHEAD_SHARE:
            self._fault = "it sends too much besides the body"
        if self._fault:
            raise BadResponse(self._fault)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > MAX_HEADER_LINES:
            self._fault = "it sends too many headers"
            return
        name = name.lower()
        if name in _KEPT and not self.status:  # a trailer says nothing
            key, text = name.decode("ascii"), value[:MAX_VALUE_CHARACTERS].decode("latin-1")
            before = self.headers.get(key)
            self.headers[key] = (
                text if before is None else f"{before}, {text}"[:MAX_VALUE_CHARACTERS]
            )

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.complete:
            return
        if 100 <= status < 200 and status != 101:
            self._interim += 1
            if self._interim > MAX_INTERIM_RESPONSES:
                self._fault = "it sends too many interim responses"
            self.headers.clear()
            return
        self.status = status
        if self.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
            self._fault = "its transfer encoding is unknown"

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.body_bytes += len(data)
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self.status and not self.complete:
            self.complete = True
            self.keep_alive = self._parser.should_keep_alive()
