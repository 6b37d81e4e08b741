"""A reliable stream of bytes over messages that may be lost, as NATS loses them when it restarts.

Every message names the offset of its first byte, and acknowledges the bytes received from the other
side. Unacknowledged bytes are kept, and sent again when the peer reports a gap, after a reconnect,
or when nothing is acknowledged for a while. The bytes in flight are bounded; beyond that the
protocol is paused. A message that overtakes another one counts as lost.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from typing import Any, Protocol

from triptych.runtime.authentication import Buffer
from triptych.runtime.planes.base import PumpedTransport, feed

MAX_IN_FLIGHT = 2 << 20  # bytes
ACK_BYTES = 128 << 10  # received bytes that are acknowledged at once
TICK_SECONDS = 0.25  # after which fewer are
RESEND_TICKS = 6  # without an acknowledgement, after which all is sent again
ABSENT_TICKS = 6  # of messages without a receiver, after which the peer is gone
SETTLE_TICKS = 20  # after a reconnect, in which the peer may not be back yet
AWAY_TICKS = 40  # of an outage, after which the stream ends: a server restarts in less

_HEADER = struct.Struct(">BQQ")  # flags, offset of the first byte, bytes received so far


class PacketFlag(enum.IntFlag):
    OPEN = 1  # the caller's first bytes
    LAST = 2  # no bytes follow
    GONE = 4  # this side does not know the connection (any more)
    AGAIN = 8  # send again from the acknowledged offset


def opens(message: bytes) -> bool:
    """Whether a message is the first of a stream."""
    return len(message) > _HEADER.size and message[0] & PacketFlag.OPEN != 0


def gone_message(message: bytes) -> bytes | None:
    """The answer to a message of an unknown stream; None: it needs none."""
    if len(message) < _HEADER.size or message[0] & PacketFlag.GONE:
        return None
    return _HEADER.pack(PacketFlag.GONE, 0, 0)


class MessageSender(Protocol):
    """Sends the messages of one stream."""

    @property
    def reconnects(self) -> int | None:
        """How often the connection was lost and restored; None: it is lost now."""

    async def send(self, message: bytes) -> None:
        """Send, or lose, a message. An OSError means that the connection is closed for good."""

    def close(self, message: bytes) -> None:
        """Send this last message if possible, and accept no more."""


class ReliableStream(PumpedTransport):
    """One end of a stream."""

    def __init__(
        self, protocol: asyncio.BufferedProtocol, sender: MessageSender, *, opens: bool
    ) -> None:
        super().__init__(protocol)
        self._sender = sender
        self._opens = opens
        self._unacknowledged: deque[tuple[int, Buffer]] = deque()  # sent, with their offsets
        self._resend_at = 0  # index in there of the next piece to send again
        self._next = 0  # offset of the first byte that was never sent
        self._received = 0  # bytes from the peer,
        self._acknowledged = 0  # of which the peer knows
        self._gap = -1  # offset of the last gap that was reported
        self._flags = PacketFlag(0)  # of the next message,
        self._message_due = False  # which is sent even without bytes
        self._peer_seen = False
        self._reading = True
        self._finished = False  # all is sent, and the peer knows that no bytes follow
        self._reconnects = sender.reconnects
        self._stuck = self._absent = self._away = self._settling = 0  # ticks
        self._no_receiver = False
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        protocol.connection_made(self)

    def receive(self, message: bytes) -> None:
        """Handle a message. NATS sends an empty one when nobody received one of ours."""
        if self._lost:
            return
        if len(message) < _HEADER.size:
            self._no_receiver = True
            if self._opens and not self._peer_seen:
                self._lose(ConnectionRefusedError("no worker receives at this subject"))
            return
        flags, offset, acknowledged = _HEADER.unpack_from(message)
        self._peer_seen, self._no_receiver, self._absent = True, False, 0
        if flags & PacketFlag.GONE:
            self._lose(None if self._closing else ConnectionResetError("the peer is gone"))
            return
        self._drop_acknowledged(acknowledged)
        if flags & PacketFlag.AGAIN:
            self._send_again()
        if self._closing:
            if flags & PacketFlag.LAST:  # both sides have finished
                self._lose(None)
        elif self._reading:
            self._receive_data(flags, offset, memoryview(message)[_HEADER.size :])

    def _receive_data(self, flags: int, offset: int, data: memoryview) -> None:
        if offset > self._received:
            self._report_gap()
            return
        fresh = data[self._received - offset :]
        self._received += len(fresh)
        feed(self._protocol, fresh, lambda: not self._lost)
        if self._received - self._acknowledged >= ACK_BYTES:
            self._send_message()
        if flags & PacketFlag.LAST and offset + len(data) == self._received:
            self._lose(None)

    def _report_gap(self, *, repeat: bool = False) -> None:
        """Ask the peer to send again; once, since every message behind the gap shows it again."""
        if self._gap != self._received or repeat:
            self._gap = self._received
            self._flags |= PacketFlag.AGAIN
            self._send_message()

    def _send_message(self) -> None:
        self._message_due = True
        self._start()

    def _drop_acknowledged(self, offset: int) -> None:
        sent = self._unacknowledged
        while sent and sent[0][0] + len(sent[0][1]) <= offset:
            sent.popleft()
            self._resend_at = max(0, self._resend_at - 1)
            self._stuck = 0
        if self._unsent:
            self._start()

    def _send_again(self) -> None:
        self._resend_at = self._stuck = 0
        if self._finished:
            self._flags |= PacketFlag.LAST
            self._message_due = True
        self._start()

    async def _pump(self) -> None:
        while not self._lost and self._sender.reconnects is not None:
            if self._resend_at < len(self._unacknowledged):
                offset, piece = self._unacknowledged[self._resend_at]
                self._resend_at += 1
            elif self._unsent and self._in_flight < MAX_IN_FLIGHT:
                offset, piece = self._next, self._take()
                self._unacknowledged.append((offset, piece))
                self._resend_at += 1
                self._next += len(piece)
                self._resume_protocol()
            elif self._message_due:
                offset, piece = self._next, b""
            else:
                break
            await self._sender.send(self._message(offset, piece))

    def _message(self, offset: int, piece: Buffer) -> bytes:
        flags = self._flags
        if offset + len(piece) < self._next or self._unsent:
            flags &= ~PacketFlag.LAST
        if self._opens and offset == 0:
            flags |= PacketFlag.OPEN
        self._flags &= ~flags
        self._message_due = bool(self._flags)
        self._acknowledged = self._received
        return b"".join((_HEADER.pack(flags, offset, self._received), piece))

    @property
    def _in_flight(self) -> int:
        return self._next - self._unacknowledged[0][0] if self._unacknowledged else 0

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._flags |= PacketFlag.LAST
            self._send_message()

    def _cut(self) -> None:
        self._timer.cancel()
        self._unacknowledged.clear()
        self._sender.close(_HEADER.pack(PacketFlag.GONE, self._next, self._received))

    def _tick(self) -> None:
        """Acknowledge, send again, and detect outages and absent peers."""
        reconnects = self._sender.reconnects
        if reconnects is None:
            self._away += 1
            if self._away > AWAY_TICKS:
                self._lose(ConnectionResetError("NATS is away"))
        elif reconnects != self._reconnects:
            self._reconnects, self._away, self._settling = reconnects, 0, SETTLE_TICKS
            self._send_again()
            self._report_gap(repeat=True)
        else:
            self._count_ticks()
        if not self._lost:
            self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _count_ticks(self) -> None:
        self._settling = max(0, self._settling - 1)
        self._absent = self._absent + 1 if self._no_receiver and not self._settling else 0
        self._stuck = self._stuck + 1 if self._unacknowledged else 0
        if self._absent > ABSENT_TICKS:
            self._lose(ConnectionResetError("the peer no longer receives at its subject"))
        elif self._stuck > RESEND_TICKS:
            self._send_again()
        elif self._received > self._acknowledged:
            self._send_message()

    # Called by asyncio's protocols.

    def pause_reading(self) -> None:
        """Ignore messages: the peer sends them again."""
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._report_gap(repeat=True)

    def get_write_buffer_size(self) -> int:
        return self._unsent_size + self._in_flight

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "away":
            return self._settling > 0 or self._away > 0
        return default
