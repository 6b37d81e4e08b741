"""Answers without end, for an Origin: what a media server sends to keep its client busy."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections import Counter
from itertools import chain, repeat

from support.origin import Act, Asked

BLOCK = 64 << 10  # bytes of one write, about
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HINT = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: </a.css>\r\n" * 100 + b"\r\n"
ENDLESS = {  # how it begins, and what comes again and again
    "/continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "/hints": (b"", HINT),
    "/header-lines": (HEAD, b"X-A: b\r\n"),
    "/header-line": (HEAD + b"X-A: ", b"b"),
    "/extension": (CHUNKED + b"5;", b"a"),
    "/extensions": (CHUNKED, b"1;" + b"a" * 1000 + b"\r\nx\r\n"),
    "/trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n"),
    "/status": (b"HTTP/1.1 200 ", b"O"),
}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


GZIP = HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
UNPACKS_TO_NOTHING = {  # packed bodies: bytes after the end of the stream, and empty blocks
    "/junk": (GZIP + _chunk(gzip.compress(b"hello")), _chunk(bytes(BLOCK))),
    "/empty-blocks": (GZIP, _chunk(b"\0\0\0\xff\xff" * (BLOCK // 5))),
}


class Sent(Counter[str]):
    """Bytes that were written, by path; and the routes that write them."""

    def routes(self) -> dict[str, bytes | Act]:
        endless = ENDLESS | UNPACKS_TO_NOTHING
        found: dict[str, bytes | Act] = {path: self._endless(*endless[path]) for path in endless}
        return found | {"/dribble": self._dribble, "/bomb": self._bomb}

    def _endless(self, start: bytes, again: bytes) -> Act:
        block = again * max(1, BLOCK // len(again))

        async def send(writer: asyncio.StreamWriter, asked: Asked) -> None:
            for piece in chain([start], repeat(block)):
                writer.write(piece)
                self[asked.path] += len(piece)
                await writer.drain()

        return send

    async def _dribble(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def _bomb(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """A thousand times its size when it is unpacked, without end."""
        writer.write(HEAD + b"Content-Encoding: gzip\r\n\r\n")
        packer = zlib.compressobj(9, wbits=31)
        while True:
            piece = packer.compress(bytes(1 << 20))
            self[asked.path] += len(piece)
            writer.write(piece)
            await writer.drain()
