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

import msgspec
from msgspec import Raw, Struct

TAG_BYTES = 16
HASHED = 4 << 10  # bytes of a body above which its hash is authenticated instead of it

_SALT = b"triptych"
_COUNTER = struct.Struct(">Q")

Buffer = bytes | bytearray | memoryview


def derive_key(secret: str, purpose: str, context: bytes = b"") -> bytes:
    """The key of one purpose, 32 bytes. ``purpose`` holds no NUL."""
    extracted = hmac.digest(_SALT, secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\0" + context + b"\x01", "sha256")


def tags_equal(one: Buffer, other: Buffer) -> bool:
    """Whether two tags or proofs are, in constant time."""
    return hmac.compare_digest(one, other)


class FrameTag:
    """The MAC of one large frame, over its body as it comes or goes."""

    __slots__ = ("_body", "_state")

    def __init__(self, state: hashlib.blake2b) -> None:
        self._state = state
        self._body = hashlib.sha256()

    def add(self, piece: Buffer) -> None:
        self._body.update(piece)

    def digest(self) -> bytes:
        self._state.update(self._body.digest())
        return self._state.digest()


class FrameMac:
    """Makes the tags of the frames of one direction, in their order: BLAKE2b with a key over the
    number of the frame, its header and its body. Of a body over HASHED bytes the SHA-256 stands for
    it, which processors compute twice as fast; the header says which it is."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._count = 0

    def begin(self, header: Buffer) -> FrameTag:
        """The tag of the next frame, whose body of more than HASHED bytes is added in pieces."""
        return FrameTag(self._next(header))

    def tag(self, header: Buffer, *body: Buffer) -> bytes:
        """The tag of the next frame, all of which is here."""
        state = self._next(header)
        if len(body) == 1 and len(body[0]) <= HASHED:
            state.update(body[0])
            return state.digest()
        if sum(map(len, body)) <= HASHED:
            for piece in body:
                state.update(piece)
            return state.digest()
        tag = FrameTag(state)
        for piece in body:
            tag.add(piece)
        return tag.digest()

    def _next(self, header: Buffer) -> hashlib.blake2b:
        state = self._keyed.copy()
        state.update(_COUNTER.pack(self._count) + header)
        self._count += 1
        return state


class ConnectionKeys:
    """The two directions of one connection, as one of its ends uses them."""

    def __init__(self, secret: str, side: str, transcript: bytes) -> None:
        other = {"caller": "worker", "worker": "caller"}[side]
        self.sending = FrameMac(derive_key(secret, f"frames of the {side}", transcript))
        self.receiving = FrameMac(derive_key(secret, f"frames of the {other}", transcript))


class MessageMac:
    """Tags on messages that stand alone. They hold for one purpose and context, and say nothing
    about their order: who sends them numbers them."""

    def __init__(self, secret: str, purpose: str, context: str) -> None:
        self._key = derive_key(secret, purpose, context.encode())

    def seal(self, message: bytes) -> bytes:
        return self._tag(message) + message

    def open(self, sealed: bytes) -> bytes | None:
        """The message; None: its tag is wrong."""
        message = sealed[TAG_BYTES:]
        return message if tags_equal(sealed[:TAG_BYTES], self._tag(message)) else None

    def _tag(self, message: bytes) -> bytes:
        return hashlib.blake2b(message, key=self._key, digest_size=TAG_BYTES).digest()


def handshake_proof(secret: str, side: str, transcript: bytes) -> bytes:
    """What shows that ``side`` knows the secret, for this hello and no other."""
    return derive_key(secret, f"proof of the {side}", transcript)


class _Signed(Struct, frozen=True):
    signature: str
    entry: Raw  # the bytes that were signed, whatever a newer version has put there


_decode = msgspec.json.Decoder(_Signed).decode


class Signer:
    """Signs and checks the entries of one namespace."""

    def __init__(self, secret: str, namespace: str = "") -> None:
        self._key = derive_key(secret, "discovery entries", namespace.encode())

    def sign(self, worker_id: str, entry: bytes) -> bytes:
        """The JSON of an entry, with its signature."""
        return msgspec.json.encode(_Signed(self._signature(worker_id, entry), Raw(entry)))

    def open(self, worker_id: str, value: bytes) -> tuple[bytes, bool]:
        """The entry in ``value``, and whether this cluster has signed it for this worker."""
        try:
            signed = _decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return value, False
        entry = bytes(signed.entry)
        expected = self._signature(worker_id, entry)
        return entry, tags_equal(expected.encode(), signed.signature.encode())

    def _signature(self, worker_id: str, entry: bytes) -> str:
        worker = worker_id.encode(errors="surrogateescape")  # a file's name may be any bytes
        return hmac.digest(self._key, worker + b"\0" + entry, "sha256").hex()
