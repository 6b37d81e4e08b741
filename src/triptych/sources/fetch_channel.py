"""What the frontend and its fetching process say to each other, and the socket they say it over.

A message is one packet of msgpack, with a descriptor beside it where it hands over a body. The
process parses what hostile servers send, so the frontend checks all that it says.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from triptych.messages import Failure
from triptych.sources.http_client import FetchRequest

PACKET_BYTES = 128 << 10  # the largest message
_BATCH = 32  # messages that are read before other callbacks run

T = TypeVar("T")


class FetchSetup(Struct, frozen=True, array_like=True, tag="setup"):
    """The first message to a new process."""

    private: bool  # private and loopback addresses are permitted
    media_bytes: int  # the largest file


class FetchStart(Struct, frozen=True, array_like=True, tag="get"):
    id: int
    ask: FetchRequest


class BytesGranted(Struct, frozen=True, array_like=True, tag="granted"):
    """A body may have so many bytes."""

    id: int
    size: int


class FetchCancel(Struct, frozen=True, array_like=True, tag="cancel"):
    id: int


class FetchPing(Struct, frozen=True, array_like=True, tag="ping"):
    """The process answers with Alive."""


class FetchAlive(Struct, frozen=True, array_like=True, tag="alive"):
    """Also the first message of a new process."""


class BytesRequested(Struct, frozen=True, array_like=True, tag="wanted"):
    """A body needs room for so many bytes."""

    id: int
    size: int


class FetchDone(Struct, frozen=True, array_like=True, tag="got"):
    """A response; a body of ``size`` bytes comes as a descriptor."""

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
    when the other end is gone or sends what cannot be read; not after ``close``.
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
        """Never blocks. The descriptor is closed once it is sent."""
        if self._closed:
            _close(fd)
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
            _close(self._unsent.popleft()[1])

    def _writable(self) -> None:
        try:
            while self._unsent:
                packet, fd = self._unsent[0]
                if fd is None:
                    self._sock.send(packet)
                else:
                    socket.send_fds(self._sock, [packet], [fd])
                self._unsent.popleft()
                _close(fd)
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
                _close(fd)
                self._fail(str(error))
                return
            self._receive(message, fd)

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._lost(reason)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
