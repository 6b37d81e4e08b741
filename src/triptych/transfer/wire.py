"""What the two agents of a transfer say to each other. Never a pickle: NIXL's own lists are one."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

PATIENCE = 20.0  # seconds for a transfer, and one more for every so many bytes
SLOWEST = 10 << 20


class ByteRange(Struct, frozen=True, array_like=True):
    """Bytes behind the first page of a ticket's piece."""

    piece: int
    offset: int
    size: int


class WriteRequest(Struct, frozen=True, array_like=True, tag=1):
    """A reader asks for its ticket's bytes, one range behind the other from ``target`` on."""

    token: bytes  # names the transfer
    generation: int
    key: bytes  # the first piece's nonce: only who has the ticket knows it
    metadata: bytes
    target: int
    ranges: tuple[ByteRange, ...]


class StatusQuery(Struct, frozen=True, array_like=True, tag=2):
    """Is it? A refusal is the answer where it is not; none while it is."""

    token: bytes
    metadata: bytes


class WriteDone(Struct, frozen=True, array_like=True, tag=3):
    token: bytes
    generation: int
    checksum: int


class WriteRefused(Struct, frozen=True, array_like=True, tag=4):
    token: bytes


decode_message = msgspec.msgpack.Decoder(
    WriteRequest | StatusQuery | WriteDone | WriteRefused
).decode
encode_message = msgspec.msgpack.encode


def transfer_deadline(size: int) -> float:
    """When to give a transfer up: NIXL has no deadline."""
    return time.monotonic() + PATIENCE + size / SLOWEST
