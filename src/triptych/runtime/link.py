"""One connection of the request plane, as both ends see it, whatever plane carries it.

Splits bytes into frames, batches what is sent within a turn of the loop (posted items into one
frame, small frames into one write), sends heartbeats, and drops a peer that is silent for too long.
Knows nothing about calls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from triptych.observe.log import RateLimitedLog
from triptych.runtime import frames
from triptych.runtime.authentication import Buffer, ConnectionKeys, FrameMac, FrameTag
from triptych.runtime.concurrency import wait_at_most
from triptych.runtime.frames import BrokenFrame, ForgedFrame, FrameKind, Inbox

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 4.0  # a peer that sends nothing for so long is lost
HELLO_SECONDS = 5.0  # for a peer to prove that it knows the secret
FLUSH_SECONDS = 1.0  # for the last bytes to leave
WRITE_BUFFER = 256 << 10  # bytes in the transport above which posts wait
WRITE_BATCH = 4 << 10  # bytes of small frames that wait for others of the same turn
WRITE_PIECE = 256 << 10  # bytes of a large frame in one write,
WRITE_TURN = 1 << 20  # and in one turn of the loop
FORGED = (
    "closed a connection that carried a forged frame: something between its two ends changes "
    "what they send"
)


class Link(asyncio.BufferedProtocol, ABC):
    """Frames in, frames out. Has a subclass for each end."""

    def __init__(
        self, batch_kind: FrameKind, limited: RateLimitedLog, silence: float = SILENCE_SECONDS
    ) -> None:
        self._limited = limited  # counts frames_broken and frames_forged
        self.loop = asyncio.get_running_loop()
        self._batch_kind = batch_kind  # of the frames that hold posted items
        self._posted: list[Any] = []
        self._flushing = False
        self._batch: list[bytes] = []  # small frames that are written together
        self._batch_bytes = 0
        # Queued pieces of large frames, and frames behind them. A piece is added to its frame's tag
        # when it is written; an entry without a piece is the tag itself.
        self._large: deque[tuple[Buffer | None, FrameTag | None]] = deque()
        self._mac: FrameMac | None = None  # of our frames, after the handshake
        self._pumping = False
        self._writable = True
        self._inbox = Inbox(frames.MAX_HELLO)
        self.authenticated = False  # both sides have proved that they know the secret
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent = 0  # heartbeats of ours since the peer's last bytes
        self._max_silent = max(2, round(silence / HEARTBEAT_SECONDS))
        self.reason = ""
        self.closed = asyncio.Event()

    @abstractmethod
    def on_frame(self, kind: int, body: Buffer) -> None:
        """Handle a whole frame. An error of UNREADABLE closes the connection."""

    @abstractmethod
    def on_closed(self, reason: str) -> None:
        """The connection is closed. Called once."""

    def post(self, item: Any) -> None:
        """Send ``item`` in one frame with all others posted in this turn of the loop."""
        self._posted.append(item)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the batch and the posted items; while the transport is full, these wait."""
        self._flushing = False
        if self._posted and self._writable and not self.closed.is_set():
            items, self._posted = self._posted, []
            self._send(items)
        self._write_batch()

    def _send(self, items: list[Any]) -> None:
        body = frames.pack(items)
        if len(body) <= frames.MAX_FRAME:
            self.write(self._batch_kind, body)
        elif len(items) > 1:
            self._send(items[: len(items) // 2])
            self._send(items[len(items) // 2 :])
        else:
            self._send([self.too_large(items[0])])

    def too_large(self, item: Any) -> Any:
        """The item to send instead of one that is too large for a frame."""
        raise BrokenFrame("an item is too large for a frame")

    def write(self, kind: FrameKind, body: bytes = b"") -> None:
        self.write_pieces((frames.header(kind, len(body)), body))

    def write_pieces(self, pieces: Sequence[Buffer], *, batch: bool = False) -> None:
        """Write one frame: its header and its body. ``batch``: a small one may wait for others of
        this turn of the loop, since a system call costs more than the rest of a frame. A large one
        is written and hashed in pieces, a bounded amount in each turn, so that it delays no other
        connection."""
        if self._transport is None:
            return
        if sum(map(len, pieces)) > WRITE_BUFFER:
            self._write_large(*pieces)
            return
        tag = b"" if self._mac is None else self._mac.tag(*pieces)
        frame = b"".join((*pieces, tag))
        if self._large:
            self._large.append((frame, None))
            return
        self._batch.append(frame)
        self._batch_bytes += len(frame)
        if batch and self._batch_bytes < WRITE_BATCH:
            self._flush_soon()
        else:
            self._write_batch()

    def _write_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch and self._transport is not None:
            self._transport.write(b"".join(batch))

    def _write_large(self, header: Buffer, *body: Buffer) -> None:
        self._write_batch()
        tag = None if self._mac is None else self._mac.begin(header)
        self._large.append((header, None))
        for piece in body:
            view = memoryview(piece)
            self._large += (
                (view[at : at + WRITE_PIECE], tag) for at in range(0, len(view), WRITE_PIECE)
            )
        if tag is not None:
            self._large.append((None, tag))
        self._pump_soon()

    def _next_piece(self) -> Buffer:
        piece, tag = self._large.popleft()
        if piece is None:
            assert tag is not None
            return tag.digest()
        if tag is not None:
            tag.add(piece)
        return piece

    def _pump_soon(self) -> None:
        if self._large and self._writable and not self._pumping:
            self._pumping = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        written = 0
        while (
            self._large and self._writable and written < WRITE_TURN and self._transport is not None
        ):
            piece = self._next_piece()
            written += len(piece)
            self._transport.write(piece)
        self._pump_soon()

    @property
    def closing(self) -> bool:
        """Whether it is closed or about to be: a broken one is, some moments before ``closed``."""
        return self._transport is None or self._transport.is_closing()

    def abort(self, reason: str) -> None:
        """Close the connection now; queued bytes are lost."""
        if not self.closed.is_set():
            self.reason = reason
            if self._transport is not None:
                self._transport.abort()

    async def close_gracefully(self, reason: str) -> None:
        """Close the connection after the queued bytes have left, or after FLUSH_SECONDS."""
        if self._transport is None or self.closed.is_set():
            return
        self.reason = reason
        self._writable = True
        self.flush()
        while self._large:
            self._transport.write(self._next_piece())
        self._transport.close()
        if not await wait_at_most(self.closed, FLUSH_SECONDS):
            self._transport.abort()
            await self.closed.wait()

    def authenticate(self, keys: ConnectionKeys) -> None:
        """The handshake is done: from now on frames carry tags and may be large, and heartbeats are
        sent and expected."""
        self.authenticated = True
        self._mac, self._inbox.mac = keys.sending, keys.receiving
        self._inbox.limit = frames.MAX_FRAME
        self._start_timer(HEARTBEAT_SECONDS, self._heartbeat)

    def _start_timer(self, seconds: float, callback: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, callback)

    def _heartbeat(self) -> None:
        # Silence is counted in our own heartbeats, not by a clock: if this process was stopped or
        # its loop was stuck, one heartbeat is late and the peer was not silent. Silence does not
        # count while the plane reconnects either.
        away = self._transport is not None and self._transport.get_extra_info("away", False)
        self._silent = 0 if away else self._silent + 1
        if self._silent > self._max_silent:
            self.abort("the other side fell silent")
            return
        if self._writable:
            self.write(FrameKind.HEARTBEAT)
        self._start_timer(HEARTBEAT_SECONDS, self._heartbeat)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_timer(HELLO_SECONDS, lambda: self.abort("the handshake took too long"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._silent = 0
        try:
            for kind, body in self._inbox.received(nbytes):
                if kind != FrameKind.HEARTBEAT or not self.authenticated:
                    self.on_frame(kind, body)
                if self.closing:
                    return
        except frames.UNREADABLE as error:
            # Do not log the peer's bytes: they may be anything.
            if isinstance(error, ForgedFrame):
                self._limited.warning("frames_forged", FORGED)
                self.abort("a frame was changed on its way")
            else:
                self._limited.warning(
                    "frames_broken",
                    f"closed a connection that sent a broken frame ({type(error).__name__})",
                )
                self.abort("a broken frame arrived")

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._pump_soon()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._posted.clear()
        self._batch.clear()
        self._large.clear()
        self.closed.set()
        self.reason = self.reason or str(exc or "the connection was closed")
        self.on_closed(self.reason)
