"""An HTTP/1.1 server of our own: asyncio protocol on uvloop, llhttp for the heads.

It listens, keeps the connections and their deadlines, and drains. It knows no route: an ``Admit``
looks at each head before the body is read, an ``Answer`` answers the request.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable

from triptych.config import Limits
from triptych.errors import TriptychError
from triptych.http.acceptor import Acceptor
from triptych.http.bodies import BodyAdmission
from triptych.http.buffers import BufferPool
from triptych.http.connection import (
    NO_DEADLINE,
    HeadCheck,
    HTTPConnection,
    OnRejected,
    RequestHandler,
)
from triptych.observe.event_loop_lag import EventLoopLag
from triptych.runtime.process import trim_allocator

SCRATCH = 256 << 10  # bytes taken from a socket at once where no body buffer waits for them
CLOSE_SECONDS = 1.0  # for what is written already to reach the clients
TRIM_SECONDS = 5.0  # without a large body, after which their memory goes back to the system


def _nothing(error: TriptychError) -> None: ...


class HTTPServer:
    """Listens, keeps the connections and their deadlines, and drains."""

    def __init__(
        self,
        limits: Limits,
        answer: RequestHandler,
        admit: HeadCheck,
        refused: OnRejected = _nothing,
    ) -> None:
        self.limits = limits
        self.answer = answer
        self.admit = admit
        self.refused = refused
        self.loop: AbstractEventLoop = asyncio.get_running_loop()
        self.connections: set[HTTPConnection] = set()
        self.port = 0  # the one it listens on, once it does
        self.draining = False
        self.settled = asyncio.Event()  # a connection has become idle or was lost
        self.lag = EventLoopLag()
        self.scratch = memoryview(bytearray(SCRATCH))
        self.buffers = BufferPool()
        self.intake = BodyAdmission(
            self.loop, limits.media_in_flight_bytes, limits.media_ahead_bytes
        )
        self._acceptor = Acceptor(lambda crowded: HTTPConnection(self, crowded))
        self._entered = 0  # large bodies, when it was last looked
        self._trim_at = NO_DEADLINE
        self._unflushed: list[HTTPConnection] = []
        soonest = min(limits.header_seconds, limits.body_seconds, limits.write_seconds)
        self._tick = min(0.5, soonest / 10)
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> None:
        await self._acceptor.start(host, port)
        self.port = self._acceptor.sockets[0].getsockname()[1]
        self._watch()

    def lost(self, connection: HTTPConnection) -> None:
        self.connections.discard(connection)
        self.settled.set()
        self._acceptor.left(connection.crowded)

    def flush_soon(self, connection: HTTPConnection) -> None:
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    def _watch(self) -> None:
        """One timer for all connections: cheaper than one each, and as exact as they need."""
        now = self.loop.time()
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._trim(now)
        self._timer = self.loop.call_later(self._tick, self._watch)

    def _trim(self, now: float) -> None:
        """Give back what large bodies have left behind, once they are gone."""
        intake = self.intake
        if intake.entered != self._entered or intake.bytes:
            self._entered, self._trim_at = intake.entered, now + TRIM_SECONDS
        elif now > self._trim_at:
            self._trim_at = NO_DEADLINE
            self.buffers.clear()
            self.loop.run_in_executor(None, trim_allocator)

    async def drain(self, seconds: float) -> None:
        """Take no new work, let what runs finish and be read, then close.

        The port stays open meanwhile, so that /health can say why.
        """
        self.draining = True
        for connection in [c for c in self.connections if c.idle()]:
            connection.close()
        await self._settle(seconds, lambda: any(c.busy() for c in self.connections))
        await self.close()

    async def _settle(self, seconds: float, waits: Callable[[], bool]) -> None:
        """Until connections have settled, or so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while waits():
                    self.settled.clear()
                    await self.settled.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Stop at once: running requests end with an error."""
        self.lag.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._acceptor.close()
        self.draining = True
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.cut()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for connection in list(self.connections):
            connection.close()
        await self._settle(CLOSE_SECONDS, lambda: bool(self.connections))
        for connection in list(self.connections):  # whose clients do not read
            connection.abort()
        await self._settle(CLOSE_SECONDS, lambda: bool(self.connections))
