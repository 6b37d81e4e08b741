"""The wire format of the request plane: length-prefixed msgpack frames, authenticated one by one.

A frame is a length (4 bytes), a kind (1 byte), a body of that length and, after the hello, a tag
(16 bytes): a MAC over the frame and its number (``authentication``). Bodies are structs encoded as
msgpack and decoded by type, so whatever is no such struct is refused. The bytes of media travel
behind the msgpack of their ask: they are never copied into it nor out of it. This module knows no
sockets.

The secret never travels: each side proves by an HMAC over both nonces that it knows the cluster's.
Frames are not encrypted here: that is the plane's (``--worker-tls``).
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
from triptych.runtime.authentication import TAG_BYTES, FrameMac, FrameTag, tags_equal
from triptych.runtime.process import allocate_lazily

PROTOCOL_VERSION = 2  # 1 had no tags
MAX_FRAME = 256 << 20
MAX_HELLO = 1024  # bytes in a frame of a peer that has not shown the secret
NONCE_BYTES = 32
WINDOW = 64  # answers of a call that a worker may send ahead of its caller

Buffer = bytes | memoryview

_HEADER = struct.Struct(">IB")
_COUNT = struct.Struct(">I")
_RING = 64 << 10
_VERY_LARGE = 1 << 20
_SLICE = 128 << 10  # read at once: an event loop reads some dozens of times in a row


class BrokenFrame(Exception):
    """What arrived is no frame of ours; the connection ends."""


class ForgedFrame(BrokenFrame):
    """A frame whose tag is wrong: someone between the two ends has changed what was sent."""


# All that can come of reading a stranger's bytes.
UNREADABLE = (BrokenFrame, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FrameKind(enum.IntEnum):
    BEAT = 0  # nothing but a sign of life
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    OPEN = 6  # caller: a new call
    CONTROL = 7  # caller: what is new about calls
    ANSWERS = 8  # worker: answers and ends of all calls


class Hello(Struct, frozen=True, array_like=True):
    """The caller's first word: which incarnation of which worker it wants to talk to."""

    version: int
    worker: str
    epoch: int
    nonce: bytes


class Challenge(Struct, frozen=True, array_like=True):
    nonce: bytes


class Proof(Struct, frozen=True, array_like=True):
    mac: bytes


class HandshakeRefused(Struct, frozen=True, array_like=True):
    why: str


class OpenCall(Struct, frozen=True, array_like=True):
    call: int
    ask: WorkerRequest
    blobs: tuple[int, ...]  # length of each media item's data, which stands behind this struct


class WindowGrant(Struct, frozen=True, array_like=True, tag=1):
    """The worker may send so many answers more."""

    call: int
    answers: int


class CloseCall(Struct, frozen=True, array_like=True, tag=2):
    """The caller wants no more of this call."""

    call: int


class CallEnd(Struct, frozen=True, array_like=True, tag=0):
    """The last word on a call."""

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
    """A frame without a tag, as those of the hello are."""
    return header(kind, len(body)) + body


def open_frame(call: int, ask: WorkerRequest) -> list[Buffer]:
    """The pieces of an OPEN frame, ready to be written in a row."""
    blobs: list[Buffer] = []
    if isinstance(ask, Job) and ask.work.media:
        media = ask.work.media
        blobs = [_flat(item.data) for item in media]
        bare = tuple(replace(item, data=b"") for item in media)
        ask = replace(ask, work=replace(ask.work, media=bare))
    head = pack(OpenCall(call, ask, tuple(map(len, blobs))))
    size = _COUNT.size + len(head) + sum(map(len, blobs))
    if size > MAX_FRAME:
        raise BrokenFrame(f"a call of {size} bytes is more than {MAX_FRAME}")
    return [header(FrameKind.OPEN, size), _COUNT.pack(len(head)) + head, *filter(len, blobs)]


def decode_open(body: Buffer) -> tuple[int, WorkerRequest]:
    """Call and ask; media data are views into the body, which they keep alive."""
    view = memoryview(body).toreadonly()
    if len(view) < _COUNT.size:
        raise BrokenFrame("a call without a head")
    at = _COUNT.size + _COUNT.unpack_from(view)[0]
    head = _decode_open(view[_COUNT.size : at])
    if at + sum(head.blobs) != len(view) or any(size < 0 for size in head.blobs):
        raise BrokenFrame("the media of a call are not as long as it says")
    ask = head.ask
    if isinstance(ask, Job) and head.blobs:
        if len(head.blobs) != len(ask.work.media):
            raise BrokenFrame("a call has not as many media as it says")
        media = []
        for item, size in zip(ask.work.media, head.blobs, strict=True):
            media.append(replace(item, data=view[at : at + size]))
            at += size
        ask = replace(ask, work=replace(ask.work, media=tuple(media)))
    return head.call, ask


def _flat(data: Buffer) -> Buffer:
    return data.cast("B") if isinstance(data, memoryview) else data


class Inbox:
    """Cuts arriving bytes into frames: ``room`` says where to put bytes, ``take`` gives frames.

    Small frames share one buffer; a large one is received straight into memory of its own, and its
    tag is computed as it comes, so that no single call takes long. No frame is given out before its
    tag was checked.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # of a body; raised when the hello is done
        self.mac: FrameMac | None = None  # of the peer's frames, when the hello is done
        self._ring = memoryview(bytearray(_RING))
        self._start = self._end = 0
        self._large: _Large | None = None

    def room(self) -> memoryview:
        if self._large is not None:
            return self._large.room()
        return self._ring[self._end :]

    def take(self, arrived: int) -> Iterator[tuple[int, Buffer]]:
        """Whole frames after ``arrived`` more bytes. Each owns its memory."""
        if self._large is not None:
            if self._large.take(arrived):
                large, self._large = self._large, None
                yield large.kind, large.body()
            return
        self._end += arrived
        while self._end - self._start >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._ring, self._start)
            if size > self.limit:
                raise BrokenFrame("a frame is too long")
            begin = self._start + _HEADER.size
            end = begin + size
            tagged = end if self.mac is None else end + TAG_BYTES
            if tagged <= self._end:
                body = bytes(self._ring[begin:end])
                if self.mac is not None:
                    expected = self.mac.tag(_HEADER.pack(size, kind), body)
                    if not tags_equal(expected, self._ring[end:tagged]):
                        raise ForgedFrame("the tag of a frame is wrong")
                self._start = tagged
                yield kind, body
            elif tagged - self._start > _RING:
                tag = None if self.mac is None else self.mac.begin(_HEADER.pack(size, kind))
                self._large = _Large(kind, size, tag, self._ring[begin : self._end])
                self._start = self._end = 0
                return
            else:
                break
        rest = self._end - self._start
        self._ring[:rest] = self._ring[self._start : self._end]
        self._start, self._end = 0, rest


class _Large:
    """A large frame on its way, in memory of its own."""

    def __init__(self, kind: int, size: int, tag: FrameTag | None, begun: memoryview) -> None:
        self.kind = kind
        self._size = size  # of the body
        self._tag = tag
        whole = size if tag is None else size + TAG_BYTES
        self._memory = memoryview(
            allocate_lazily(whole) if whole > _VERY_LARGE else bytearray(whole)
        )
        self._filled = len(begun)
        self._memory[: self._filled] = begun
        if tag is not None:
            tag.add(begun[:size])

    def room(self) -> memoryview:
        return self._memory[self._filled : self._filled + _SLICE]

    def take(self, arrived: int) -> bool:
        """Note that bytes have come. True: it is whole."""
        before, self._filled = self._filled, self._filled + arrived
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
    """What both sides must have seen alike: proofs and keys hold for nothing else. ``binding`` is
    the fingerprint of the worker's certificate where the plane is encrypted."""
    if not len(hello.nonce) == NONCE_BYTES == len(challenge.nonce):
        raise BrokenFrame("a nonce is not as long as it must be")
    return pack((hello, challenge, binding))
