"""What a decode pool and its processes say to each other over their one socket.

Frames of msgpack, each after its length; the bytes of a file follow their announcement bare. The
process at the other end reads hostile files, so whatever it says is measured before it is believed.
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
from triptych.recipe import Recipes

MAX_FRAME_BYTES = 1 << 20  # bytes of a frame
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class DecoderSetup(Struct, frozen=True, array_like=True):
    """The first word to a new process."""

    recipes: Recipes
    limits: Limits
    allow_torch: bool
    preparer: str  # the module whose ``load``, ``prepare`` and ``self_test`` follow the recipes
    readable: tuple[str, ...]  # folders that hold the code it may still have to load


class DecodeRequest(Struct, frozen=True, array_like=True):
    """A media item to prepare; ``size`` bytes follow."""

    kind: MediaKind
    form: MediaForm
    size: int


class DecoderReady(Struct, frozen=True, array_like=True, tag="ready"):
    """The process is locked in and waits. ``lacking``: the locks that are not to be had here."""

    lacking: tuple[str, ...]


class DecodeResult(Struct, frozen=True, array_like=True, tag="offered"):
    """An item is prepared, and ``size`` bytes of memory are wanted to put it in."""

    meta: MediaMeta
    parts: tuple[TensorSpec, ...]
    size: int
    cost: int
    encoded: bool


class ResultWritten(Struct, frozen=True, array_like=True, tag="written"):
    """The memory is filled, and mapped no more."""


class MediaRejected(Struct, frozen=True, array_like=True, tag="refused"):
    """The item is not what it should be."""

    failure: Failure


class DecoderOutOfMemory(Struct, frozen=True, array_like=True, tag="out_of_memory"):
    """The item needs more memory than there is.

    ``own_limit``: more than the process may have; else the machine had none left below that.
    """

    own_limit: bool


class LibraryMismatch(Struct, frozen=True, array_like=True, tag="misfit"):
    """An error as where our code and a library that is installed do not fit.

    ``package``: which one, "" where that is not known. ``text`` is for the log. ``by_file``: good
    files are decoded in the same process, so the file is at fault and not the installation.
    """

    package: str
    text: str
    by_file: bool = False


class DecoderCrashed(Struct, frozen=True, array_like=True, tag="last_words"):
    """An error that nobody foresaw; the process ends with it. For the log, not for clients."""

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
    """One end of the socket. Blocks: for threads, and for the process at the other end.

    ``patience`` is asked before every wait how many seconds that may take, and again when they have
    passed; it raises when the waiting is over. Without it a wait has no end.
    """

    def __init__(self, door: socket.socket, patience: Callable[[], float] | None = None) -> None:
        self.door = door
        self._patience = patience

    def send(self, message: Struct, data: bytes | memoryview = b"") -> None:
        frame = msgspec.msgpack.encode(message)
        self._send_all(memoryview(_LENGTH.pack(len(frame)) + frame))
        self._send_all(memoryview(data))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """EOFError: the other end is gone. ValueError: it talks nonsense."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError("the frame is too long")
        return decoder.decode(self.read(length))

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._patiently(partial(self.door.recv_into, rest))
            if not count:
                raise EOFError
            rest = rest[count:]
        return data

    def send_file(self, fd: int) -> None:
        self._patiently(lambda: socket.send_fds(self.door, [b"\0"], [fd]))

    def receive_file(self) -> int:
        _, fds, _, _ = self._patiently(lambda: socket.recv_fds(self.door, 1, 1))
        if not fds:
            raise EOFError
        return fds[0]

    def _send_all(self, data: memoryview) -> None:
        while data:
            data = data[self._patiently(partial(self.door.send, data)) :]

    def _patiently(self, step: Callable[[], T]) -> T:
        """One step over the socket, taken as soon as it can be."""
        while True:
            if self._patience is not None:
                self.door.settimeout(self._patience())
            try:
                return step()
            except TimeoutError:
                continue
