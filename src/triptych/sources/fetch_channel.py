"""The messages between the frontend and its fetching process, and the socket that carries them.

A message is one packet of msgpack. A body travels beside it as the descriptor of sealed memory: the
frontend maps what can neither change nor shrink, whatever happens to the process. The process
parses what hostile servers send, so the frontend checks every message from it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import MediaFetchFailed, MediaTooLarge
from triptych.messages import Failure
from triptych.transfer.segment import byte_view, map_sealed_file

PACKET_BYTES = 128 << 10  # the largest message
COPY_BYTES = 256 << 10  # up to this size a copy is cheaper than a mapping
_BATCH = 32  # messages that are read before other callbacks run
_MEMORY_NAME = "triptych-fetched"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

T = TypeVar("T")
# Reserves memory for a body of so many bytes; returns how many bytes are reserved.
Reserve = Callable[[int], Awaitable[int]]


class FetchRequest(Struct, frozen=True, array_like=True):
    """One GET of a URL that was parsed and permitted."""

    tenant: str
    secure: bool
    name: str  # of the host, for its look-up
    port: int
    host: str  # for the Host header, with the port unless it is the default
    path: str  # with the query
    conditions: dict[str, str]  # headers that ask for the file only if it has changed
    limit: int  # bytes of the body


class FetchResponse(Struct, frozen=True):
    """The final response to one GET. Only a 200 has a body."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes | memoryview = b""


class FetchSetup(Struct, frozen=True, array_like=True, tag="setup"):
    """The first message to a new process."""

    private: bool  # private and loopback addresses are permitted
    media_bytes: int  # the largest file


class FetchStart(Struct, frozen=True, array_like=True, tag="get"):
    id: int
    request: FetchRequest


class BytesGranted(Struct, frozen=True, array_like=True, tag="granted"):
    """Memory for a body of so many bytes is reserved."""

    id: int
    size: int


class FetchCancel(Struct, frozen=True, array_like=True, tag="cancel"):
    id: int


class FetchPing(Struct, frozen=True, array_like=True, tag="ping"):
    """The process answers with FetchAlive."""


class FetchAlive(Struct, frozen=True, array_like=True, tag="alive"):
    """Also the first message of a new process."""


class BytesRequested(Struct, frozen=True, array_like=True, tag="wanted"):
    """A body needs memory for so many bytes."""

    id: int
    size: int


class FetchDone(Struct, frozen=True, array_like=True, tag="got"):
    """A response; its body of ``size`` bytes comes as a descriptor."""

    id: int
    status: int
    headers: dict[str, str]
    size: int


class FetchFailed(Struct, frozen=True, array_like=True, tag="failed"):
    id: int
    failure: Failure


ToFetchProcess = FetchSetup | FetchStart | BytesGranted | FetchCancel | FetchPing
FromFetchProcess = FetchAlive | BytesRequested | FetchDone | FetchFailed


class FetchChannel(Generic[T]):
    """One end of the socket, on the event loop that runs when it is made.

    ``receive`` gets each message and owns its descriptor. ``lost`` is called once, with the reason,
    when the other end is gone or sends an invalid message; not after ``close``.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[T],
        receive: Callable[[T, int | None], None],
        lost: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = decoder
        self._receive = receive
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._closed = False
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Struct, fd: int | None = None) -> None:
        """Never blocks. Closes the descriptor once it is sent."""
        if self._closed:
            close_file(fd)
            return
        self._unsent.append((msgspec.msgpack.encode(message), fd))
        if len(self._unsent) == 1:
            self._writable()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._unsent:
            close_file(self._unsent.popleft()[1])

    def _writable(self) -> None:
        try:
            while self._unsent:
                packet, fd = self._unsent[0]
                if fd is None:
                    self._sock.send(packet)
                else:
                    socket.send_fds(self._sock, [packet], [fd])
                self._unsent.popleft()
                close_file(fd)
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._writable)
            return
        except OSError as error:
            self._fail(f"cannot send: {error.strerror}")
            return
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                packet, fds, flags, _ = socket.recv_fds(
                    self._sock, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(f"cannot receive: {error.strerror}")
                return
            fd = fds[0] if fds else None
            try:
                if not packet:
                    raise ValueError("it has ended")
                if flags & socket.MSG_TRUNC:
                    raise ValueError("a message is too long")
                message = self._decoder.decode(packet)
            except ValueError as error:  # also of msgspec
                close_file(fd)
                self._fail(str(error))
                return
            self._receive(message, fd)

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._lost(reason)


def close_file(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class BodyFile:
    """A body that is being received, never larger than the limit and the memory reserved for it."""

    def __init__(self, limit: int, reserve: Reserve) -> None:
        self.size = 0
        self._limit = limit
        self._reserve = reserve
        self._reserved = 0
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
        if size > self._reserved:
            self._reserved = await self._reserve(size)
        if self._fd < 0:
            self._fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self.size = size

    def seal(self) -> int | None:
        """The sealed descriptor, which the caller closes; None if the body is empty."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd


async def read_body(fd: int, size: int, limit: int) -> bytes | memoryview:
    """The body behind a descriptor, which is closed. Raises ValueError if it is not sealed."""
    if size <= COPY_BYTES:
        return _read_body(fd, size, limit)
    return await asyncio.to_thread(_read_body, fd, size, limit)  # mapping many pages takes long


def _read_body(fd: int, size: int, limit: int) -> bytes | memoryview:
    try:
        if not 0 < size <= limit or os.fstat(fd).st_size != size:
            raise ValueError("a body has another size than announced")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("a body is not sealed")
        if size <= COPY_BYTES:
            return os.pread(fd, size, 0)
        return byte_view(map_sealed_file(fd, size)).toreadonly()
    finally:
        os.close(fd)


def fetch_failed(why: str) -> MediaFetchFailed:
    return MediaFetchFailed(f"The media URL could not be fetched: {why}.")


def fetched_file_too_large(limit: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"The file at the media URL has over {limit} bytes, the most that is fetched."
    )
