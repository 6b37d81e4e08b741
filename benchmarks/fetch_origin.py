"""A media server to fetch from, good and hostile: ``python -m benchmarks.fetch_origin``.

Prints its port and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
import zlib

SIZES = {"/100k": 100_000, "/5m": 5_000_000}
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {  # how it begins, and what comes again and again
    "/continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    "/hints": (b"", b"HTTP/1.1 103 Early\r\n" + b"Link: </a.css>\r\n" * 100 + b"\r\n"),
    "/headers": (OK, b"X-A: b\r\n" * 8000),
    "/extension": (CHUNKED + b"5;", b"a" * 65536),
    "/dribble": (OK + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "/bomb": (OK + b"Content-Encoding: gzip\r\n\r\n", b""),
}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode().partition("?")[0]
            if path in SIZES:
                length = f"Content-Length: {SIZES[path]}\r\n\r\n".encode()
                writer.write(OK + length + bytes(SIZES[path]))
                await writer.drain()
            else:
                await _attack(writer, path)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _attack(writer: asyncio.StreamWriter, path: str) -> None:
    start, again = ENDLESS[path]
    writer.write(start)
    packer = zlib.compressobj(9, wbits=31)
    while True:
        writer.write(again or packer.compress(bytes(1 << 20)))
        await writer.drain()
        await asyncio.sleep(0.05 if len(again) == 1 else 0)


async def main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
