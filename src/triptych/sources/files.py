"""Media from ``file:`` URLs: regular files below one folder that the operator named.

The folder is opened once; a file is opened from its descriptor, one path component at a time,
without following links. So nothing outside is reached, whatever happens to the folder meanwhile,
and a pipe, a device or a folder is refused before a byte is read. A file that is not permitted and
one that does not exist give the same error: clients do not learn which files exist.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from triptych.errors import InvalidConfig, LocalMediaForbidden, MediaFetchTimeout, MediaTooLarge
from triptych.runtime.concurrency import FairThreadPool

READ_STEP = 1 << 20  # bytes of one read, by which a growing file may exceed the limit
MAX_READS = 32  # at once,
MAX_READS_PER_TENANT = 8  # and for one tenant
_LONGEST = 8192  # characters of a URL
_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC

T = TypeVar("T")


def file_forbidden() -> LocalMediaForbidden:
    return LocalMediaForbidden(
        "The file: URL names nothing that may be read. Regular files below the folder that the "
        "server was started with (--allowed-media-path) may be; send others in the request."
    )


class MediaFolder:
    """The folder below which ``file:`` URLs may name files; an empty path permits none."""

    def __init__(self, path: str) -> None:
        self._folder = -1
        self._roots: tuple[tuple[bytes, ...], ...] = ()
        self._threads = FairThreadPool("file", MAX_READS, MAX_READS_PER_TENANT)
        if not path:
            return
        try:  # the folder itself may be a link; below it none is followed
            self._folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidConfig(
                f"--allowed-media-path {path}: {error.strerror}. Name a folder that exists."
            ) from None
        names = {os.path.abspath(path), os.path.realpath(path)}
        self._roots = tuple(_components(os.fsencode(name)) for name in names)

    def find(self, url: str) -> tuple[bytes, ...]:
        """The path components below the folder that a URL names, else LocalMediaForbidden.

        Looks at the URL only, not at the disk.
        """
        if not self._roots or len(url) > _LONGEST:
            raise file_forbidden()
        components = _components(_path(url))
        for root in self._roots:
            if components[: len(root)] == root and len(components) > len(root):
                return components[len(root) :]
        raise file_forbidden()

    async def size(
        self, components: tuple[bytes, ...], limit: int, seconds: float, tenant: str = ""
    ) -> int:
        """The size of the file that ``find`` returned."""
        return await self._within(seconds, tenant, self._size, components, limit)

    async def read(
        self, components: tuple[bytes, ...], limit: int, seconds: float, tenant: str = ""
    ) -> bytes:
        """The file that ``find`` returned. A disk that hangs blocks only threads of its tenant."""
        return await self._within(seconds, tenant, self._read, components, limit)

    async def _within(
        self, seconds: float, tenant: str, call: Callable[..., T], *args: object
    ) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await self._threads.run(tenant, call, *args)
        except TimeoutError:
            raise MediaFetchTimeout(
                f"The file could not be read within {seconds:g} seconds."
            ) from None

    def _size(self, components: tuple[bytes, ...], limit: int) -> int:
        with self._opened(components, limit) as (_, size):
            return size

    def _read(self, components: tuple[bytes, ...], limit: int) -> bytes:
        with self._opened(components, limit) as (file, _):
            return _all(file, limit)

    @contextmanager
    def _opened(self, components: tuple[bytes, ...], limit: int) -> Iterator[tuple[int, int]]:
        """Its descriptor and size; too large a file is refused before it is read."""
        file = -1
        try:
            file = self._open(components)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise file_forbidden()
            if found.st_size > limit:
                raise _too_large(limit)
            yield file, found.st_size
        except OSError:
            raise file_forbidden() from None
        finally:
            if file >= 0:
                os.close(file)

    def _open(self, components: tuple[bytes, ...]) -> int:
        here = os.dup(self._folder)  # its own: close() may run meanwhile
        try:
            for name in components[:-1]:
                there = os.open(name, _WALK, dir_fd=here)
                os.close(here)
                here = there
            return os.open(components[-1], _READ, dir_fd=here)
        finally:
            os.close(here)

    def close(self) -> None:
        self._threads.close()
        if self._folder >= 0:
            os.close(self._folder)
        self._folder, self._roots = -1, ()


def _path(url: str) -> bytes:
    """The path of ``file:/path`` or ``file://localhost/path``, decoded once."""
    rest = url.partition(":")[2]
    if rest.startswith("//"):
        host, _, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise file_forbidden()
        rest = "/" + path
    if not rest.startswith("/") or any(mark in rest for mark in "?#\\"):
        raise file_forbidden()
    try:
        return unquote_to_bytes(rest)
    except UnicodeEncodeError:  # half a surrogate pair
        raise file_forbidden() from None


def _components(path: bytes) -> tuple[bytes, ...]:
    names = tuple(name for name in path.split(b"/") if name)
    if any(name in (b".", b"..") or b"\0" in name for name in names):
        raise file_forbidden()
    return names


def _all(file: int, limit: int) -> bytes:
    """The whole file, which may grow while it is read."""
    pieces, count = [], 0
    while piece := os.read(file, min(READ_STEP, limit + 1 - count)):
        pieces.append(piece)
        count += len(piece)
        if count > limit:
            raise _too_large(limit)
    return b"".join(pieces)


def _too_large(limit: int) -> MediaTooLarge:
    return MediaTooLarge(f"The file has over {limit} bytes, which is the most that is read.")
