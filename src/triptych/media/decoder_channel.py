"""The messages between a decode pool and its processes, and the socket that carries them.

Each message is a frame of msgpack after its length; the bytes of a file follow their DecodeRequest
as they are. The process reads hostile files, so the pool checks every message from it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct

from triptych.config import Limits
from triptych.messages import Failure, MediaForm, MediaKind, MediaMeta, TensorSpec
from triptych.recipe import MediaOptions, Recipes

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class DecoderSetup(Struct, frozen=True, array_like=True):
    """The first message to a new process."""

    recipes: Recipes
    limits: Limits
    allow_torch: bool
    preparer: str  # the module whose load_libraries, prepare and self_test follow the recipes


class DecodeRequest(Struct, frozen=True, array_like=True):
    """Prepare a media item; its ``size`` bytes follow."""

    kind: MediaKind
    form: MediaForm
    size: int
    options: MediaOptions | None = None


class DecoderReady(Struct, frozen=True, array_like=True, tag="ready"):
    """The process is locked down and waits. ``lacking``: the locks that the kernel lacks."""

    lacking: tuple[str, ...]


class DecodeResult(Struct, frozen=True, array_like=True, tag="offered"):
    """An item is prepared; the process asks for ``size`` bytes of memory to write it to."""

    meta: MediaMeta
    parts: tuple[TensorSpec, ...]
    size: int
    cost: int
    encoded: bool


class ResultWritten(Struct, frozen=True, array_like=True, tag="written"):
    """The process has written the memory, and unmapped it."""


class MediaRejected(Struct, frozen=True, array_like=True, tag="refused"):
    """The file is damaged, too large or of a type that is not taken."""

    failure: Failure


class DecoderOutOfMemory(Struct, frozen=True, array_like=True, tag="out_of_memory"):
    """An allocation failed.

    ``own_limit``: it exceeded the process's own limit. Else the machine has no memory left.
    """

    own_limit: bool


class LibraryMismatch(Struct, frozen=True, array_like=True, tag="misfit"):
    """A library raised an error that suggests that its version does not fit this code.

    ``package``: which one, "" if that is unknown. ``text`` is for the log. ``caused_by_file``: the
    same process decodes good files, so the file is at fault and not the installation.
    """

    package: str
    text: str
    caused_by_file: bool = False


class DecoderCrashed(Struct, frozen=True, array_like=True, tag="last_words"):
    """An unexpected error, with which the process ends. For the log, not for clients."""

    text: str


DecoderMessage = (
    DecoderReady
    | DecodeResult
    | ResultWritten
    | MediaRejected
    | DecoderOutOfMemory
    | LibraryMismatch
    | DecoderCrashed
)


class DecoderChannel:
    """One end of the socket. Blocks: for the process, and for a thread of the pool.

    Before every wait ``next_timeout`` gives the seconds that it may take; when they have passed it
    is called again. It raises to end the waiting. Without it a wait has no end.
    """

    def __init__(
        self, sock: socket.socket, next_timeout: Callable[[], float] | None = None
    ) -> None:
        self.sock = sock
        self._next_timeout = next_timeout

    def send(self, message: Struct, data: bytes | memoryview = b"") -> None:
        frame = msgspec.msgpack.encode(message)
        self._send_all(memoryview(_LENGTH.pack(len(frame)) + frame))
        self._send_all(memoryview(data))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Raises EOFError if the other end is gone, ValueError for an invalid message."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError("the frame is too long")
        return decoder.decode(self.read(length))

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._wait_for(partial(self.sock.recv_into, rest))
            if not count:
                raise EOFError
            rest = rest[count:]
        return data

    def send_file(self, fd: int) -> None:
        self._wait_for(lambda: socket.send_fds(self.sock, [b"\0"], [fd]))

    def receive_file(self) -> int:
        _, fds, _, _ = self._wait_for(lambda: socket.recv_fds(self.sock, 1, 1))
        if not fds:
            raise EOFError
        return fds[0]

    def _send_all(self, data: memoryview) -> None:
        while data:
            data = data[self._wait_for(partial(self.sock.send, data)) :]

    def _wait_for(self, call: Callable[[], T]) -> T:
        """The result of one call of the socket, as soon as it can complete."""
        while True:
            if self._next_timeout is not None:
                self.sock.settimeout(self._next_timeout())
            try:
                return call()
            except TimeoutError:
                continue
