"""Keys from the cluster secret: MACs on frames and messages, signatures on discovery entries.

Each key serves one purpose and is derived by HKDF (RFC 5869, SHA-256), so that no key reveals
another one or the secret. A connection has two keys, one per direction, from both nonces: a frame
is valid only in its connection and direction. Its MAC covers its number too, so that a replayed,
reordered, missing, altered or injected frame ends the connection. Knows no sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

TAG_BYTES = 16
HASHED = 4 << 10  # of a body with more bytes, the MAC covers its SHA-256

_SALT = b"triptych"
_COUNTER = struct.Struct(">Q")

Buffer = bytes | bytearray | memoryview
E = TypeVar("E")


def derive_key(secret: str, purpose: str, context: bytes = b"") -> bytes:
    """The key for one purpose, 32 bytes. ``purpose`` contains no NUL."""
    extracted = hmac.digest(_SALT, secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\0" + context + b"\x01", "sha256")


def tags_equal(one: Buffer, other: Buffer) -> bool:
    """Compare two tags or proofs in constant time."""
    return hmac.compare_digest(one, other)


class FrameTag:
    """The MAC of one large frame, computed piece by piece."""

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
    """Computes the tags of the frames of one direction, in order: keyed BLAKE2b over the frame's
    number, header and body. Instead of a body over HASHED bytes it covers the body's SHA-256, which
    processors compute twice as fast; the length in the header says which it is."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._count = 0

    def begin(self, header: Buffer) -> FrameTag:
        """The tag of the next frame; add its body, of more than HASHED bytes, in pieces."""
        return FrameTag(self._next(header))

    def tag(self, header: Buffer, *body: Buffer) -> bytes:
        """The tag of the next frame, given as a whole."""
        if sum(map(len, body)) <= HASHED:
            return self._next(header, *body).digest()
        tag = self.begin(header)
        for piece in body:
            tag.add(piece)
        return tag.digest()

    def _next(self, *pieces: Buffer) -> hashlib.blake2b:
        """The state after the number of the next frame and these pieces of it."""
        state = self._keyed.copy()
        state.update(b"".join((_COUNTER.pack(self._count), *pieces)))
        self._count += 1
        return state


class ConnectionKeys:
    """The MACs of both directions of a connection, for one of its ends."""

    def __init__(self, secret: str, side: str, transcript: bytes) -> None:
        other = {"caller": "worker", "worker": "caller"}[side]
        self.sending = FrameMac(derive_key(secret, f"frames of the {side}", transcript))
        self.receiving = FrameMac(derive_key(secret, f"frames of the {other}", transcript))


class MessageMac:
    """Tags on single messages, valid for one purpose and context. They do not protect the order of
    messages: the sender numbers them."""

    def __init__(self, secret: str, purpose: str, context: str) -> None:
        self._key = derive_key(secret, purpose, context.encode())

    def seal(self, message: bytes) -> bytes:
        return self._tag(message) + message

    def open(self, sealed: bytes) -> bytes | None:
        """The message, or None if its tag is wrong."""
        message = sealed[TAG_BYTES:]
        return message if tags_equal(sealed[:TAG_BYTES], self._tag(message)) else None

    def _tag(self, message: bytes) -> bytes:
        return hashlib.blake2b(message, key=self._key, digest_size=TAG_BYTES).digest()


def handshake_proof(secret: str, side: str, transcript: bytes) -> bytes:
    """Proves that ``side`` knows the secret, for this handshake alone."""
    return derive_key(secret, f"proof of the {side}", transcript)


class _Signed(Struct, frozen=True):
    signature: str
    entry: Raw  # the signed bytes, which may have fields of a newer version


_decode_signed = msgspec.json.Decoder(_Signed).decode


class EntrySigner(Generic[E]):
    """Encodes, signs, decodes and checks the discovery entries of one namespace.

    A signature covers the namespace, the worker's id and the entry: only a process that knows the
    cluster secret can announce an address. It does not cover time: an old entry leads to a worker
    that is gone or to the right one, since the handshake names the incarnation.
    """

    def __init__(self, kind: type[E], secret: str, namespace: str = "") -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._key = derive_key(secret, "discovery entries", namespace.encode())

    def encode(self, worker_id: str, entry: E) -> bytes:
        """The JSON of an entry with its signature."""
        encoded = msgspec.json.encode(entry)
        return msgspec.json.encode(_Signed(self._signature(worker_id, encoded), Raw(encoded)))

    def decode(self, worker_id: str, value: bytes) -> tuple[E | None, bool]:
        """The entry, and whether this cluster signed it for this worker. None: undecodable."""
        try:
            try:
                signed = _decode_signed(value)
            except msgspec.MsgspecError:
                return self._decoder.decode(value), False
            encoded = bytes(signed.entry)
            expected = self._signature(worker_id, encoded)
            valid = tags_equal(expected.encode(), signed.signature.encode())
            return self._decoder.decode(encoded), valid
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, False

    def _signature(self, worker_id: str, encoded: bytes) -> str:
        worker = worker_id.encode(errors="surrogateescape")  # a file name may be any bytes
        return hmac.digest(self._key, worker + b"\0" + encoded, "sha256").hex()
