"""A reliable stream of bytes over messages that may be lost, as NATS loses them when it restarts.

Every message tells at which byte of its direction it stands, and up to where the sender has what
came from the other side. What is not acknowledged is kept, and sent again from there on when the
peer asks for it (it sees a gap), when the way was broken and is mended, or when nothing moves for a
while. What is on its way is bounded; beyond that the protocol is paused. Messages of a direction do
not overtake each other, or are taken for lost. How they travel is the poster's matter.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from typing import Any, Protocol

from triptych.runtime.planes.base import Buffer, PumpedTransport, feed

FLIGHT = 2 << 20  # bytes on their way, at most
ACK_BYTES = 128 << 10  # bytes that came, after which they are acknowledged at once
TICK_SECONDS = 0.25  # after which they are at any rate
STUCK = 6  # ticks without an acknowledgement, after which all is sent again
ABSENT = 6  # ticks of being told that nobody is there, after which it is believed
SETTLE = 20  # ticks after a mended break in which the peer may still be on its way back
AWAY = 40  # ticks of a break, after which whoever waits is told: a server restarts in less

_HEADER = struct.Struct(">BQQ")  # flags, place of the first byte, place up to which all came


class PacketFlag(enum.IntFlag):
    OPEN = 1  # the caller's first bytes
    LAST = 2  # no bytes follow
    GONE = 4  # this side knows nothing of the connection (any more)
    AGAIN = 8  # send again what did not come


def opens(message: bytes) -> bool:
    """Whether a message is the first of a stream, and one may be made for it."""
    return len(message) > _HEADER.size and message[0] & PacketFlag.OPEN != 0


def gone(message: bytes) -> bytes | None:
    """The answer to a message of a stream that is not there; None: it wants none."""
    if len(message) < _HEADER.size or message[0] & PacketFlag.GONE:
        return None
    return _HEADER.pack(PacketFlag.GONE, 0, 0)


class MessageSender(Protocol):
    """How the messages of one stream leave."""

    @property
    def breaks(self) -> int | None:
        """How often the way was broken and mended so far; None: it is broken now."""

    async def post(self, message: bytes) -> None:
        """Send, or lose, a message. An OSError says that the way is no more."""

    def leave(self, message: bytes) -> None:
        """Send this one as the last, if that is possible, and take no more."""


class ReliableStream(PumpedTransport):
    """One end of a connection."""

    def __init__(
        self, protocol: asyncio.BufferedProtocol, poster: MessageSender, *, opens: bool
    ) -> None:
        super().__init__(protocol)
        self._poster = poster
        self._opens = opens
        self._sent: deque[tuple[int, Buffer]] = deque()  # and not acknowledged, by place
        self._resent = 0  # pieces of these that need not be sent (again) now
        self._next = 0  # place of the first byte that was never sent
        self._came = 0  # place up to which all came,
        self._told = 0  # and up to which the peer knows that
        self._asked = -1  # place of the last gap that the peer was asked to fill
        self._due = PacketFlag(0)  # to be said with the next message,
        self._owing = False  # which leaves even without bytes
        self._met = False  # the peer has shown itself
        self._reading = True
        self._ended = False  # all is sent, and the peer is told so
        self._breaks = poster.breaks
        self._stuck = self._absent = self._broken = 0  # ticks
        self._settling = 0
        self._nobody = False
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        protocol.connection_made(self)

    def take(self, message: bytes) -> None:
        """A message has come. An empty one is NATS's word that nobody took one of ours."""
        if self._lost:
            return
        if len(message) < _HEADER.size:
            self._nobody = True
            if self._opens and not self._met:
                self._lose(ConnectionRefusedError("nobody is there"))
            return
        flags, place, acknowledged = _HEADER.unpack_from(message)
        self._met, self._nobody, self._absent = True, False, 0
        if flags & PacketFlag.GONE:
            self._lose(None if self._closing else ConnectionResetError("the peer is gone"))
            return
        self._acknowledge(acknowledged)
        if flags & PacketFlag.AGAIN:
            self._send_again()
        if self._closing:
            if flags & PacketFlag.LAST:  # both take leave
                self._lose(None)
        elif self._reading:
            self._receive(flags, place, memoryview(message)[_HEADER.size :])

    def _receive(self, flags: int, place: int, data: memoryview) -> None:
        if place > self._came:
            self._ask()
            return
        fresh = data[self._came - place :]
        self._came += len(fresh)
        feed(self._protocol, fresh, lambda: not self._lost)
        if self._came - self._told >= ACK_BYTES:
            self._owe()
        if flags & PacketFlag.LAST and place + len(data) == self._came:
            self._lose(None)

    def _ask(self, *, even_so: bool = False) -> None:
        """Have the peer fill a gap; once, since all that is behind it shows the gap again."""
        if self._asked != self._came or even_so:
            self._asked = self._came
            self._due |= PacketFlag.AGAIN
            self._owe()

    def _owe(self) -> None:
        self._owing = True
        self._start()

    def _acknowledge(self, place: int) -> None:
        while self._sent and self._sent[0][0] + len(self._sent[0][1]) <= place:
            self._sent.popleft()
            self._resent = max(0, self._resent - 1)
            self._stuck = 0
        if self._unsent:
            self._start()

    def _send_again(self) -> None:
        self._resent = self._stuck = 0
        if self._ended:
            self._due |= PacketFlag.LAST
            self._owing = True
        self._start()

    async def _pump(self) -> None:
        while not self._lost and self._poster.breaks is not None:
            if self._resent < len(self._sent):
                place, piece = self._sent[self._resent]
                self._resent += 1
            elif self._unsent and self._in_flight < FLIGHT:
                place, piece = self._next, self._take()
                self._sent.append((place, piece))
                self._resent += 1
                self._next += len(piece)
                self._relax()
            elif self._owing:
                place, piece = self._next, b""
            else:
                break
            await self._poster.post(self._message(place, piece))

    def _message(self, place: int, piece: Buffer) -> bytes:
        flags = self._due
        if place + len(piece) < self._next or self._unsent:
            flags &= ~PacketFlag.LAST
        if self._opens and place == 0:
            flags |= PacketFlag.OPEN
        self._due &= ~flags
        self._owing = bool(self._due)
        self._told = self._came
        return b"".join((_HEADER.pack(flags, place, self._came), piece))

    @property
    def _in_flight(self) -> int:
        return self._next - self._sent[0][0] if self._sent else 0

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            self._due |= PacketFlag.LAST
            self._owe()

    def _cut(self) -> None:
        self._timer.cancel()
        self._sent.clear()
        self._poster.leave(_HEADER.pack(PacketFlag.GONE, self._next, self._came))

    def _tick(self) -> None:
        """Whatever time brings: acknowledgements, repetition, and doubt whether anyone is there."""
        breaks = self._poster.breaks
        if breaks is None:
            self._broken += 1
            if self._broken > AWAY:
                self._lose(ConnectionResetError("NATS is away"))
        elif breaks != self._breaks:
            self._breaks, self._broken, self._settling = breaks, 0, SETTLE
            self._send_again()
            self._ask(even_so=True)
        else:
            self._count()
        if not self._lost:
            self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _count(self) -> None:
        self._settling = max(0, self._settling - 1)
        self._absent = self._absent + 1 if self._nobody and not self._settling else 0
        self._stuck = self._stuck + 1 if self._sent else 0
        if self._absent > ABSENT:
            self._lose(ConnectionResetError("nobody is there any more"))
        elif self._stuck > STUCK:
            self._send_again()
        elif self._came > self._told:
            self._owe()

    # What asyncio's protocols call.

    def pause_reading(self) -> None:
        """What comes meanwhile is taken for lost, and comes again."""
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._ask(even_so=True)

    def get_write_buffer_size(self) -> int:
        return self._unsent_size + self._in_flight

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "away":
            return self._settling > 0 or self._broken > 0
        return default
