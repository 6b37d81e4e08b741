"""One connection of the request plane, as both ends see it, whatever plane carries it.

Cuts bytes into frames, gathers what is posted within a tick of the loop into one frame and one
write, shows life by beats and gives up on a peer that shows none. It knows nothing of calls.
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
from triptych.runtime.authentication import ConnectionKeys, FrameMac, FrameTag
from triptych.runtime.frames import BrokenFrame, Buffer, ForgedFrame, FrameKind, Inbox

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 4.0  # a peer that says nothing for so long is lost
HELLO_SECONDS = 5.0  # time for a peer to show the secret
CLOSE_SECONDS = 1.0  # time for the last bytes to leave
WRITE_BUFFER = 256 << 10  # bytes in the transport above which posts wait
PIECE = 256 << 10  # bytes of something large that are written at once,
TURN = 1 << 20  # and in one turn of the loop
FORGED = (
    "a connection is closed over a forged frame: what its two ends send is changed on the way "
    "between them"
)


class Link(asyncio.BufferedProtocol, ABC):
    """Frames in, frames out. The subclasses are the two ends."""

    def __init__(
        self, posts: FrameKind, limited: RateLimitedLog, silence: float = SILENCE_SECONDS
    ) -> None:
        self._limited = limited  # tells of frames_broken and frames_forged
        self._loop = asyncio.get_running_loop()
        self._posts = posts  # the kind of frame that gathers posted items
        self._posted: list[Any] = []
        self._flushing = False
        # Pieces that wait, and what must not overtake them. Each is added to the tag of its frame
        # when it leaves; without a piece the tag itself is due.
        self._large: deque[tuple[Buffer | None, FrameTag | None]] = deque()
        self._mac: FrameMac | None = None  # of our frames, when the hello is done
        self._pumping = False
        self._writable = True
        self._inbox = Inbox(frames.MAX_HELLO)
        self.familiar = False  # both sides have shown the secret
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent = 0  # beats of ours since the peer's last bytes
        self._most_silent = max(2, round(silence / BEAT_SECONDS))
        self._why = ""
        self.gone = asyncio.Event()

    @abstractmethod
    def on_frame(self, kind: int, body: Buffer) -> None:
        """A whole frame has come. It may raise what is UNREADABLE: that ends us."""

    @abstractmethod
    def on_gone(self, why: str) -> None:
        """The connection is no more. Called once."""

    def post(self, item: Any) -> None:
        """Send ``item`` with everything else that is posted in this tick of the loop."""
        self._posted.append(item)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was posted, unless the transport has enough to do: then it goes later."""
        self._flushing = False
        if self._posted and self._writable and not self.gone.is_set():
            items, self._posted = self._posted, []
            self._send(items)

    def _send(self, items: list[Any]) -> None:
        body = frames.pack(items)
        if len(body) <= frames.MAX_FRAME:
            self.write(self._posts, body)
        elif len(items) > 1:
            self._send(items[: len(items) // 2])
            self._send(items[len(items) // 2 :])
        else:
            self._send([self.too_large(items[0])])

    def too_large(self, item: Any) -> Any:
        """What to send instead of an item that fits no frame."""
        raise BrokenFrame("an item fits no frame")

    def write(self, kind: FrameKind, body: bytes = b"") -> None:
        self.write_pieces((frames.header(kind, len(body)), body))

    def write_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Write one frame: its header and its body. A large one goes out as it is taken, a share in
        each turn of the loop: to write or to hash much at once holds all other connections up."""
        if self._transport is None:
            return
        if sum(map(len, pieces)) > WRITE_BUFFER:
            self._write_large(*pieces)
            return
        tag = b"" if self._mac is None else self._mac.tag(*pieces)
        frame = b"".join((*pieces, tag))
        if self._large:
            self._large.append((frame, None))
        else:
            self._transport.write(frame)

    def _write_large(self, header: Buffer, *body: Buffer) -> None:
        tag = None if self._mac is None else self._mac.begin(header)
        self._large.append((header, None))
        for piece in body:
            view = memoryview(piece)
            self._large += ((view[at : at + PIECE], tag) for at in range(0, len(view), PIECE))
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
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        written = 0
        while self._large and self._writable and written < TURN and self._transport is not None:
            piece = self._next_piece()
            written += len(piece)
            self._transport.write(piece)
        self._pump_soon()

    @property
    def closing(self) -> bool:
        """Whether it is gone or about to be: a broken one is so some moments before ``gone``."""
        return self._transport is None or self._transport.is_closing()

    def drop(self, why: str) -> None:
        """End the connection now; nothing more is sent."""
        if not self.gone.is_set():
            self._why = why
            if self._transport is not None:
                self._transport.abort()

    async def shut(self, why: str) -> None:
        """End the connection after the last bytes have left, or soon at any rate."""
        if self._transport is None or self.gone.is_set():
            return
        self._why = why
        self._writable = True
        self.flush()
        while self._large:
            self._transport.write(self._next_piece())
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.gone.wait()
        except TimeoutError:
            self._transport.abort()
            await self.gone.wait()

    def greeted(self, keys: ConnectionKeys) -> None:
        """The hello is done: frames have tags from now on, may be large, and silence counts."""
        self.familiar = True
        self._mac, self._inbox.mac = keys.sending, keys.receiving
        self._inbox.limit = frames.MAX_FRAME
        self._start_timer(BEAT_SECONDS, self._beat)

    def _start_timer(self, seconds: float, then: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)

    def _beat(self) -> None:
        # Silence is counted in our own beats, not read from a clock: if this process was stopped
        # or its loop was stuck, one beat is late and the peer has not been silent. Nor has it been
        # while the way between us is broken and about to be mended, where a plane says so.
        away = self._transport is not None and self._transport.get_extra_info("away", False)
        self._silent = 0 if away else self._silent + 1
        if self._silent > self._most_silent:
            self.drop("the other side fell silent")
            return
        if self._writable:
            self.write(FrameKind.BEAT)
        self._start_timer(BEAT_SECONDS, self._beat)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_timer(HELLO_SECONDS, lambda: self.drop("the hello took too long"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._silent = 0
        try:
            for kind, body in self._inbox.take(nbytes):
                if kind != FrameKind.BEAT or not self.familiar:
                    self.on_frame(kind, body)
                if self.closing:
                    return
        except frames.UNREADABLE as error:
            # The peer's bytes are not repeated: they may hold anything.
            if isinstance(error, ForgedFrame):
                self._limited.warning("frames_forged", FORGED)
                self.drop("a frame was changed on its way")
            else:
                self._limited.warning(
                    "frames_broken",
                    f"a connection is closed over a broken frame ({type(error).__name__})",
                )
                self.drop("a broken frame came")

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
        self._large.clear()
        self.gone.set()
        self._why = self._why or str(exc or "the connection was closed")
        self.on_gone(self._why)
