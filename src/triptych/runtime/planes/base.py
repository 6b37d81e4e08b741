"""What every request plane does: carry the bytes of a connection, both ways and in order.

A plane knows no frames and no calls. It makes connections between protocols of asyncio, and gives
each a transport. Here are also the parts that planes share which have no socket of their own.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

Buffer = bytes | bytearray | memoryview
P = TypeVar("P", bound=asyncio.BufferedProtocol)

HANDSHAKE_SECONDS = 5.0  # for that of TLS
PIECE = 128 << 10  # bytes in a message
HIGH = 64 << 10  # of what waits to be sent, unless the protocol says otherwise


class ListenAddress(Struct, frozen=True):
    """Where a worker is to be found: on an address of its host, or by name and incarnation."""

    host: str
    port: int
    worker: str
    epoch: int


class PlaneListener(Protocol):
    """A worker's open door on a plane."""

    @property
    def address(self) -> str:
        """What callers connect to."""

    @property
    def binding(self) -> bytes:
        """The fingerprint of the certificate that callers see; empty without TLS."""

    def refuse(self) -> None:
        """Take no new connections."""

    async def close(self) -> None:
        """Be gone. The connections are closed before, by those who hold them."""


class Plane(Protocol):
    async def listen(
        self, make: Callable[[], asyncio.BufferedProtocol], place: ListenAddress
    ) -> PlaneListener:
        """Let callers connect, each to a protocol of its own."""

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        """Connect; raises OSError or ValueError when nobody is there."""


def feed(protocol: asyncio.BufferedProtocol, data: Buffer, wanted: Callable[[], bool]) -> None:
    """Give ``data`` to the protocol, as long as it is ``wanted``."""
    rest = memoryview(data)
    while rest and wanted():
        room = memoryview(protocol.get_buffer(len(rest)))
        taken = min(len(room), len(rest))
        room[:taken] = rest[:taken]
        protocol.buffer_updated(taken)
        rest = rest[taken:]


class PumpedTransport(asyncio.Transport):
    """A transport whose bytes leave by a coroutine: ``write`` gathers them, a task sends them.

    What is written in one turn of the loop leaves together. The protocol is told to pause while
    more than its limit waits.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._unsent: deque[Buffer] = deque()
        self._unsent_size = 0
        self._high, self._low = HIGH, HIGH // 4
        self._paused = False
        self._closing = False
        self._lost = False
        self._pumping: asyncio.Task[None] | None = None

    @abstractmethod
    async def _pump(self) -> None:
        """Send what can be sent now. An OSError ends the connection."""

    @abstractmethod
    def _finish(self) -> None:
        """Everything was sent and no more will be written: take leave of the peer."""

    @abstractmethod
    def _cut(self) -> None:
        """Let go of what carries the bytes, at once. Called once, before the protocol hears it."""

    def _start(self) -> None:
        """Have the pump run, unless it does."""
        if self._pumping is None and not self._lost:
            self._pumping = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._pump()
        except OSError as error:
            self._lose(error)
        finally:
            self._pumping = None
        if self._closing and not self._unsent and not self._lost:
            self._finish()

    def _take(self) -> Buffer:
        """The next bytes to send: small ones together, never more than a piece."""
        pieces: list[Buffer] = []
        size = 0
        while self._unsent and size < PIECE:
            piece = self._unsent.popleft()
            if size + len(piece) > PIECE:
                view = memoryview(piece)
                self._unsent.appendleft(view[PIECE - size :])
                piece = view[: PIECE - size]
            pieces.append(piece)
            size += len(piece)
        self._unsent_size -= size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _relax(self) -> None:
        """Tell the protocol that there is room again, when there is."""
        if self._paused and self._unsent_size <= self._low and not self._lost:
            self._paused = False
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        """The connection is no more; the protocol hears it in the next turn of the loop."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._unsent.clear()
        self._unsent_size = 0
        if self._pumping is not None and self._pumping is not asyncio.current_task():
            self._pumping.cancel()
        self._cut()
        self._loop.call_soon(self._protocol.connection_lost, error)

    # What asyncio's protocols call.

    def write(self, data: Buffer) -> None:
        if self._closing or not data:
            return
        self._unsent.append(data)
        self._unsent_size += len(data)
        self._start()
        if self._unsent_size > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._start()  # it finishes after the last bytes

    def abort(self) -> None:
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_size

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
