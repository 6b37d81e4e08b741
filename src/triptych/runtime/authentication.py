"""Keys from the cluster secret, and the MAC on every frame of a connection.

Each key serves one purpose and is derived from the secret by HKDF (RFC 5869, SHA-256), so that none
says anything about another or about the secret. A connection has two keys, one for each direction,
made from both nonces: no frame is valid in another connection or in the other direction. The MAC
also covers the number of the frame, so that a frame which is replayed, reordered, left out, altered
or injected ends the connection. This module knows no sockets and no structs.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

TAG_BYTES = 16  # HMAC-SHA256, truncated

_SALT = b"triptych"
_COUNTER = struct.Struct(">Q")

Buffer = bytes | bytearray | memoryview


def derive(secret: str, purpose: str, context: bytes = b"") -> bytes:
    """The key of one purpose, 32 bytes. ``purpose`` holds no NUL."""
    extracted = hmac.digest(_SALT, secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\0" + context + b"\x01", "sha256")


def equal(one: Buffer, other: Buffer) -> bool:
    """Whether two tags or proofs are, in constant time."""
    return hmac.compare_digest(one, other)


class Tag:
    """The MAC of one frame, over its bytes as they come or go."""

    __slots__ = ("_state",)

    def __init__(self, state: hmac.HMAC) -> None:
        self._state = state

    def add(self, data: Buffer) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()[:TAG_BYTES]


class FrameMac:
    """Makes the tags of the frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def begin(self) -> Tag:
        """The tag of the next frame, to which its bytes are added piece by piece."""
        state = self._keyed.copy()
        state.update(_COUNTER.pack(self._count))
        self._count += 1
        return Tag(state)

    def tag(self, *pieces: Buffer) -> bytes:
        """The tag of the next frame, all of which is here."""
        state = self._keyed.copy()
        state.update(_COUNTER.pack(self._count))
        self._count += 1
        for piece in pieces:
            state.update(piece)
        return state.digest()[:TAG_BYTES]


class Keys:
    """The two directions of one connection, as one of its ends uses them."""

    def __init__(self, secret: str, side: str, transcript: bytes) -> None:
        other = {"caller": "worker", "worker": "caller"}[side]
        self.sending = FrameMac(derive(secret, f"frames of the {side}", transcript))
        self.receiving = FrameMac(derive(secret, f"frames of the {other}", transcript))


def prove(secret: str, side: str, transcript: bytes) -> bytes:
    """What shows that ``side`` knows the secret, for this hello and no other."""
    return derive(secret, f"proof of the {side}", transcript)
