"""The interface of a request plane: it carries the bytes of connections, both ways and in order.

A plane knows no frames and no calls. It connects asyncio protocols and gives each a transport. Also
holds the transport that planes without a socket of their own share.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from triptych.runtime.authentication import Buffer

P = TypeVar("P", bound=asyncio.BufferedProtocol)

MESSAGE_BYTES = 128 << 10  # at most
HIGH_WATER = 64 << 10  # bytes that may wait to be sent, unless the protocol sets another limit


class ListenAddress(Struct, frozen=True):
    """Where a worker listens: an address of its host, or a subject of its name and epoch."""

    host: str
    port: int
    worker: str
    epoch: int


class PlaneListener(Protocol):
    """A worker that listens on a plane."""

    @property
    def address(self) -> str:
        """The address that callers connect to."""

    @property
    def binding(self) -> bytes:
        """The fingerprint of the worker's TLS certificate; empty without TLS."""

    def refuse(self) -> None:
        """Accept no new connections."""

    async def close(self) -> None:
        """Stop listening. The owners of the connections close them before."""


class Plane(Protocol):
    async def listen(
        self, make: Callable[[], asyncio.BufferedProtocol], address: ListenAddress
    ) -> PlaneListener:
        """Accept callers; ``make`` creates a protocol for each."""

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        """Connect; raises OSError or ValueError if that fails."""


def feed(protocol: asyncio.BufferedProtocol, data: Buffer, wanted: Callable[[], bool]) -> None:
    """Pass ``data`` to the protocol while ``wanted`` returns true."""
    rest = memoryview(data)
    while rest and wanted():
        buffer = memoryview(protocol.get_buffer(len(rest)))
        size = min(len(buffer), len(rest))
        buffer[:size] = rest[:size]
        protocol.buffer_updated(size)
        rest = rest[size:]


class PumpedTransport(asyncio.Transport):
    """A transport that sends by a coroutine: ``write`` queues bytes and a task sends them.

    Bytes written in one turn of the loop are sent together. The protocol is paused while more than
    its limit is queued.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._unsent: deque[Buffer] = deque()
        self._unsent_size = 0
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._paused = False
        self._closing = False
        self._lost = False
        self._pumping: asyncio.Task[None] | None = None

    @abstractmethod
    async def _pump(self) -> None:
        """Send what can be sent now. An OSError closes the connection."""

    @abstractmethod
    def _finish(self) -> None:
        """All bytes are sent and none will follow: tell the peer."""

    @abstractmethod
    def _cut(self) -> None:
        """Release the underlying connection now. Called once, before ``connection_lost``."""

    def _start(self) -> None:
        """Start the sending task unless it runs."""
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
        """The next bytes to send: small writes together, at most MESSAGE_BYTES."""
        pieces: list[Buffer] = []
        size = 0
        while self._unsent and size < MESSAGE_BYTES:
            piece = self._unsent.popleft()
            if size + len(piece) > MESSAGE_BYTES:
                view = memoryview(piece)
                self._unsent.appendleft(view[MESSAGE_BYTES - size :])
                piece = view[: MESSAGE_BYTES - size]
            pieces.append(piece)
            size += len(piece)
        self._unsent_size -= size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _resume_protocol(self) -> None:
        """Resume the protocol once enough bytes have been sent."""
        if self._paused and self._unsent_size <= self._low and not self._lost:
            self._paused = False
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        """Close the connection; ``connection_lost`` follows in the next turn of the loop."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._unsent.clear()
        self._unsent_size = 0
        if self._pumping is not None and self._pumping is not asyncio.current_task():
            self._pumping.cancel()
        self._cut()
        self._loop.call_soon(self._protocol.connection_lost, error)

    # Called by asyncio's protocols.

    def write(self, data: Buffer) -> None:
        if self._closing or not data:
            return
        self._unsent.append(data)
        self._unsent_size += len(data)
        self._start()
        if self._unsent_size > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._start()  # calls ``_finish`` after the last bytes

    def abort(self) -> None:
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_size

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
