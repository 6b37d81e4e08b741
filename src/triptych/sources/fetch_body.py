"""The body of a fetched file, in memory that one process writes and another reads.

The writer seals the memory before it hands the descriptor over. The reader checks the seals: what
it maps can neither change nor shrink any more, whatever becomes of the writer.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import zlib
from collections.abc import Awaitable, Callable
from typing import Self

from triptych.errors import MediaFetchFailed, MediaTooLarge
from triptych.transfer.segment import byte_view, map_file

COPY_BYTES = 256 << 10  # up to this size a copy is cheaper than a mapping
DECOMPRESS_STEP = 256 << 10  # bytes that are unpacked before other tasks run
_NAME = "triptych-fetched"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

Reserve = Callable[
    [int], Awaitable[int]
]  # asks for room for so many bytes; gives the room there is


def fetched_file_too_large(limit: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"The file at the media URL has over {limit} bytes, the most that is fetched."
    )


class BodyFile:
    """A body that is being received, never larger than the limit nor than the room it was given."""

    def __init__(self, limit: int, grow: Reserve) -> None:
        self.size = 0
        self._limit = limit
        self._grow = grow
        self._room = 0
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def write(self, data: bytes) -> None:
        size = self.size + len(data)
        if size > self._limit:
            raise fetched_file_too_large(self._limit)
        if size > self._room:
            self._room = await self._grow(size)
        if self._fd < 0:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self.size = size

    def sealed(self) -> int | None:
        """The descriptor, which the caller closes; None if the body is empty."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd


class BodyDecompressor:
    """Writes what gzip or deflate packed, a step at a time: no more than the body may hold.

    One compressed stream is the whole body: bytes after its end are an error, a second gzip member
    as well, which media servers do not send.
    """

    def __init__(self, body: BodyFile) -> None:
        self._body = body
        self._stream: zlib._Decompress | None = None

    async def write(self, data: bytes) -> None:
        if self._stream is None:
            raw = not data.startswith((b"\x1f", b"\x78"))  # deflate that lacks its frame
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        while not self._stream.eof:
            try:
                unpacked = self._stream.decompress(data, DECOMPRESS_STEP)
            except zlib.error:
                raise _wrongly_packed() from None
            await self._body.write(unpacked)
            data = self._stream.unconsumed_tail or self._stream.unused_data
            if not data and len(unpacked) < DECOMPRESS_STEP:
                return
            await asyncio.sleep(0)
        if data:
            raise _wrongly_packed()

    def end(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise _wrongly_packed()


def _wrongly_packed() -> MediaFetchFailed:
    return MediaFetchFailed("The media URL could not be fetched: its server packed it wrongly.")


async def read_body(fd: int, size: int, limit: int) -> bytes | memoryview:
    """The bytes behind a descriptor, which is closed. ValueError: it is not a sealed body."""
    if size <= COPY_BYTES:
        return _read(fd, size, limit)
    return await asyncio.to_thread(_read, fd, size, limit)  # to map many pages takes long


def _read(fd: int, size: int, limit: int) -> bytes | memoryview:
    try:
        if not 0 < size <= limit or os.fstat(fd).st_size != size:
            raise ValueError("a body has another size than announced")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("a body is not sealed")
        if size <= COPY_BYTES:
            return os.pread(fd, size, 0)
        # Opened again for reading: older kernels map a sealed file in no other way.
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return byte_view(map_file(reading, size, writable=False)).toreadonly()
        finally:
            os.close(reading)
    finally:
        os.close(fd)
