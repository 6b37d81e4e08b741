"""Parses one HTTP/1.1 response of a server that may be hostile. Does not do I/O.

Everything but the body (interim responses, status lines, headers, chunk sizes and extensions,
trailers) shares one small allowance, so no server can send for long without sending a body; the
caller limits the body. Bytes are parsed in small steps and checked after each.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

import httptools

from triptych.errors import MediaFetchFailed
from triptych.sources.fetch_channel import BodyFile

OVERHEAD_BYTES = 64 << 10  # of everything but the body,
OVERHEAD_SHARE = 8  # and one for so many bytes of body: chunk sizes
MAX_HEADER_LINES = 256  # of all responses together, trailers included
MAX_INTERIM_RESPONSES = 8  # 1xx
MAX_VALUE_CHARACTERS = 8193  # characters of a header that are kept: one more than a URL may have
DECOMPRESS_STEP = 256 << 10  # bytes that are decompressed before other tasks run
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
        self.headers: dict[str, str] = {}  # those that matter, by lower-case name
        self.received = 0  # bytes in all
        self.body_bytes = 0  # of those, still compressed
        self.complete = False
        self.keep_alive = False  # the connection can take another request
        self._parser = httptools.HttpResponseParser(self)
        self._lines = 0
        self._interim = 0
        self._pieces: list[bytes] = []
        self._fault = ""

    @property
    def length(self) -> int | None:
        """The declared length of the body; None if there is none."""
        text = self.headers.get("content-length")
        return None if text is None else int(text)  # the parser takes digits only

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of the body, as they are parsed."""
        rest = memoryview(data)
        while rest and not self.complete:
            step = _BODY_STEP if self.status else _HEAD_STEP
            self._parse(rest[:step])
            rest = rest[step:]
            yield from self._pieces
            self._pieces.clear()
        if rest:  # bytes after the end of the response
            self.received += len(rest)
            self.keep_alive = False

    def end(self) -> None:
        """The server has closed the connection, which ends a body without a declared length."""
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
            self.keep_alive = False  # bytes after the end
        if self.received - self.body_bytes > OVERHEAD_BYTES + self.body_bytes // OVERHEAD_SHARE:
            self._fault = "it sends too much besides the body"
        if self._fault:
            raise BadResponse(self._fault)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > MAX_HEADER_LINES:
            self._fault = "it sends too many headers"
            return
        name = name.lower()
        if name in _KEPT and not self.status:  # trailers are ignored
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


class BodyDecompressor:
    """Writes a gzip or deflate body decompressed, a step at a time, up to the body's limit.

    The whole body is one compressed stream: bytes after its end are an error, also a second gzip
    member, which media servers do not send.
    """

    def __init__(self, body: BodyFile) -> None:
        self._body = body
        self._stream: zlib._Decompress | None = None

    async def write(self, data: bytes) -> None:
        if self._stream is None:
            raw = not data.startswith((b"\x1f", b"\x78"))  # deflate without the zlib header
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        while not self._stream.eof:
            try:
                decompressed = self._stream.decompress(data, DECOMPRESS_STEP)
            except zlib.error:
                raise _bad_compression() from None
            await self._body.write(decompressed)
            data = self._stream.unconsumed_tail or self._stream.unused_data
            if not data and len(decompressed) < DECOMPRESS_STEP:
                return
            await asyncio.sleep(0)
        if data:
            raise _bad_compression()

    def end(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise _bad_compression()


def _bad_compression() -> MediaFetchFailed:
    return MediaFetchFailed("The media URL could not be fetched: its server compressed it wrongly.")
