"""What ``GrammarChecker`` and its process send each other: msgpack after its length."""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<I")
T = TypeVar("T", bound=Struct)


class CheckerSetup(Struct, frozen=True, array_like=True):
    folder: str  # of the checkpoint
    end_ids: tuple[int, ...]
    memory: int  # bytes


class CheckedGrammar(Struct, frozen=True, array_like=True):
    """A grammar that compiles, or the reason why not. Both empty: the process is ready."""

    source: str = ""  # as llguidance takes it
    error: str = ""


def send(sock: socket.socket, message: Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket, type: type[T]) -> T:
    """Raises EOFError when the other side has closed the socket."""
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return msgspec.msgpack.decode(_read(sock, size), type=type)


def _read(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not (part := sock.recv(size - len(parts))):
            raise EOFError
        parts += part
    return bytes(parts)
