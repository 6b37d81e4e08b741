"""The wire format of the request plane: length-prefixed msgpack frames, authenticated one by one.

A frame is a length (4 bytes), a kind (1 byte), a body of that length and, after the handshake, a
tag (16 bytes): a MAC over the frame and its number (``authentication``). Bodies are structs encoded
as msgpack and decoded by type; anything else is refused. Media bytes travel behind the msgpack of
their request and are not copied into or out of it. Knows no sockets.

The secret never travels: each side proves with an HMAC over both nonces that it knows it. Frames
are not encrypted here: the plane does that (``--worker-tls``).
"""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from triptych.messages import Failure, Job, WorkerAnswer, WorkerRequest
from triptych.runtime.authentication import TAG_BYTES, Buffer, FrameMac, FrameTag, tags_equal
from triptych.runtime.process import allocate_lazily

PROTOCOL_VERSION = 3  # 2 named reports differently, 1 had no tags
MAX_FRAME = 256 << 20
MAX_HELLO = 1024  # bytes in a frame of a peer that has not proved that it knows the secret
NONCE_BYTES = 32
WINDOW = 64  # answers of a call that a worker may send ahead of its caller

_HEADER = struct.Struct(">IB")
_COUNT = struct.Struct(">I")
_SMALL_FRAMES = 64 << 10  # bytes of the buffer that small frames share
_VERY_LARGE = 1 << 20
_READ = 128 << 10  # bytes read at once: an event loop reads some dozens of times in a row


class BrokenFrame(Exception):
    """The bytes are not a valid frame; the connection is closed."""


class ForgedFrame(BrokenFrame):
    """The tag of a frame is wrong: something between the two ends changed what was sent."""


# All errors of decoding a peer's bytes.
UNREADABLE = (BrokenFrame, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FrameKind(enum.IntEnum):
    HEARTBEAT = 0
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    OPEN = 6  # caller: a new call
    CONTROL = 7  # caller: window grants and closed calls
    ANSWERS = 8  # worker: answers and ends of all calls


class Hello(Struct, frozen=True, array_like=True):
    """The caller's first frame: the worker and the epoch that it wants to reach."""

    version: int
    worker: str
    epoch: int
    nonce: bytes


class Challenge(Struct, frozen=True, array_like=True):
    nonce: bytes


class Proof(Struct, frozen=True, array_like=True):
    mac: bytes


class HandshakeRefused(Struct, frozen=True, array_like=True):
    reason: str


class OpenCall(Struct, frozen=True, array_like=True):
    call: int
    request: WorkerRequest
    blobs: tuple[int, ...]  # bytes of each media item's data, which follow this struct


class WindowGrant(Struct, frozen=True, array_like=True, tag=1):
    """The worker may send so many more answers."""

    call: int
    answers: int


class CloseCall(Struct, frozen=True, array_like=True, tag=2):
    """The caller wants no more answers of this call."""

    call: int


class CallEnd(Struct, frozen=True, array_like=True, tag=0):
    """A call has ended: without a failure, or with one."""

    failure: Failure | None = None


Control = WindowGrant | CloseCall
Answers = list[tuple[int, WorkerAnswer | CallEnd]]

pack = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
decode_proof = msgspec.msgpack.Decoder(Proof).decode
decode_refused = msgspec.msgpack.Decoder(HandshakeRefused).decode
decode_control = msgspec.msgpack.Decoder(list[Control]).decode
decode_answers = msgspec.msgpack.Decoder(Answers).decode
_decode_open = msgspec.msgpack.Decoder(OpenCall).decode


def header(kind: FrameKind, size: int) -> bytes:
    return _HEADER.pack(size, kind)


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    """A frame without a tag, as in the handshake."""
    return header(kind, len(body)) + body


def open_frame(call: int, request: WorkerRequest) -> list[Buffer]:
    """The pieces of an OPEN frame, to be written one after the other."""
    blobs: list[Buffer] = []
    sizes: tuple[int, ...] = ()
    if isinstance(request, Job) and request.work.media:
        media = request.work.media
        blobs = [_flat(item.data) for item in media]
        sizes = tuple(map(len, blobs))
        bare = tuple(replace(item, data=b"") for item in media)
        request = replace(request, work=replace(request.work, media=bare))
    head = pack(OpenCall(call, request, sizes))
    size = _COUNT.size + len(head) + sum(sizes)
    if size > MAX_FRAME:
        raise BrokenFrame(f"a call of {size} bytes is more than {MAX_FRAME}")
    pieces: list[Buffer] = [header(FrameKind.OPEN, size), _COUNT.pack(len(head)) + head]
    return pieces + [blob for blob in blobs if len(blob)]


def decode_open(body: Buffer) -> tuple[int, WorkerRequest]:
    """The call and its request; media data are views into the body, which they keep alive."""
    view = memoryview(body).toreadonly()
    if len(view) < _COUNT.size:
        raise BrokenFrame("a call without a head")
    at = _COUNT.size + _COUNT.unpack_from(view)[0]
    head = _decode_open(view[_COUNT.size : at])
    if at + sum(head.blobs) != len(view) or any(size < 0 for size in head.blobs):
        raise BrokenFrame("the media of a call have another length than it says")
    request = head.request
    if isinstance(request, Job) and head.blobs:
        if len(head.blobs) != len(request.work.media):
            raise BrokenFrame("a call has another number of media than it says")
        media = []
        for item, size in zip(request.work.media, head.blobs, strict=True):
            media.append(replace(item, data=view[at : at + size]))
            at += size
        request = replace(request, work=replace(request.work, media=tuple(media)))
    return head.call, request


def _flat(data: Buffer) -> Buffer:
    return data.cast("B") if isinstance(data, memoryview) else data


class Inbox:
    """Splits received bytes into frames: put bytes into ``get_buffer``, then call ``received``.

    Small frames share one buffer; a large one is received directly into memory of its own, and its
    tag is computed piece by piece, so that no single call takes long. Yields no frame before
    checking its tag.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # of a body; raised after the handshake
        self.mac: FrameMac | None = None  # of the peer's frames, after the handshake
        self._buffer = memoryview(bytearray(_SMALL_FRAMES))
        self._start = self._end = 0
        self._large: _Large | None = None

    def get_buffer(self) -> memoryview:
        if self._large is not None:
            return self._large.get_buffer()
        return self._buffer[self._end :]

    def received(self, count: int) -> Iterator[tuple[int, Buffer]]:
        """The frames that ``count`` more bytes complete. Each owns its memory."""
        if self._large is not None:
            if self._large.received(count):
                large, self._large = self._large, None
                yield large.kind, large.body()
            return
        self._end += count
        while self._end - self._start >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._buffer, self._start)
            if size > self.limit:
                raise BrokenFrame("a frame is too long")
            begin = self._start + _HEADER.size
            end = begin + size
            tagged = end if self.mac is None else end + TAG_BYTES
            if tagged <= self._end:
                body = bytes(self._buffer[begin:end])
                if self.mac is not None:
                    expected = self.mac.tag(_HEADER.pack(size, kind), body)
                    if not tags_equal(expected, self._buffer[end:tagged]):
                        raise ForgedFrame("the tag of a frame is wrong")
                self._start = tagged
                yield kind, body
            elif tagged - self._start > _SMALL_FRAMES:
                tag = None if self.mac is None else self.mac.begin(_HEADER.pack(size, kind))
                self._large = _Large(kind, size, tag, self._buffer[begin : self._end])
                self._start = self._end = 0
                return
            else:
                break
        rest = self._end - self._start
        self._buffer[:rest] = self._buffer[self._start : self._end]
        self._start, self._end = 0, rest


class _Large:
    """A large frame that is being received, in memory of its own."""

    def __init__(self, kind: int, size: int, tag: FrameTag | None, start: memoryview) -> None:
        self.kind = kind
        self._size = size  # of the body
        self._tag = tag
        whole = size if tag is None else size + TAG_BYTES
        self._memory = memoryview(
            allocate_lazily(whole) if whole > _VERY_LARGE else bytearray(whole)
        )
        self._filled = len(start)
        self._memory[: self._filled] = start
        if tag is not None:
            tag.add(start[:size])

    def get_buffer(self) -> memoryview:
        return self._memory[self._filled : self._filled + _READ]

    def received(self, count: int) -> bool:
        """Note that bytes have arrived. True: the frame is complete."""
        before, self._filled = self._filled, self._filled + count
        if self._tag is not None and before < self._size:
            self._tag.add(self._memory[before : min(self._filled, self._size)])
        return self._filled == len(self._memory)

    def body(self) -> Buffer:
        if self._tag is not None and not tags_equal(self._tag.digest(), self._memory[self._size :]):
            raise ForgedFrame("the tag of a large frame is wrong")
        return self._memory[: self._size]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def transcript(hello: Hello, challenge: Challenge, binding: bytes = b"") -> bytes:
    """The handshake as both sides must have seen it; proofs and keys are valid for it alone.
    ``binding`` is the fingerprint of the worker's certificate where the plane is encrypted."""
    if not len(hello.nonce) == NONCE_BYTES == len(challenge.nonce):
        raise BrokenFrame("a nonce has the wrong length")
    return pack((hello, challenge, binding))
