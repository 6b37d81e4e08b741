"""An HTTP/1.1 server of our own: an asyncio protocol on uvloop, with llhttp for the heads.

It listens, keeps the connections and their deadlines, and drains. The ``Application`` that it
serves knows the routes.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine
from typing import Any

from triptych.config import Limits
from triptych.http.acceptor import Acceptor
from triptych.http.bodies import BodyAdmission, BufferPool
from triptych.http.connection import NO_DEADLINE, Application, HTTPConnection
from triptych.http.tls import ServerCertificate
from triptych.observe.event_loop_lag import EventLoopLag
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.process import trim_allocator

SCRATCH_BYTES = 256 << 10  # read from a socket at once where no body is received in place
CLOSE_SECONDS = 1.0  # for what was written to reach the clients
TRIM_SECONDS = 5.0  # without a large body, after which their memory goes back to the system


class HTTPServer:
    """``certificate``: None for plain HTTP."""

    def __init__(
        self, limits: Limits, app: Application, certificate: ServerCertificate | None = None
    ) -> None:
        self.limits = limits
        self.app = app
        self.loop: AbstractEventLoop = asyncio.get_running_loop()
        self.connections: set[HTTPConnection] = set()
        self.port = 0  # once it listens
        self.draining = False
        self.settled = asyncio.Event()  # a connection has become idle or was lost
        self.lag = EventLoopLag()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.buffers = BufferPool()
        self.admission = BodyAdmission(
            self.loop, limits.media_in_flight_bytes, limits.media_ahead_bytes
        )
        self._certificate = certificate
        self._acceptor = Acceptor(
            lambda refused: HTTPConnection(self, refused), limits, certificate
        )
        self._background: list[asyncio.Task[None]] = []  # until the server closes
        self._admissions = 0  # at the last tick
        self._trim_at = NO_DEADLINE
        self._unflushed: list[HTTPConnection] = []
        shortest = min(limits.header_seconds, limits.body_seconds, limits.write_seconds)
        self._tick_seconds = min(0.5, shortest / 10)
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> None:
        await self._acceptor.start(host, port)
        self.port = self._acceptor.sockets[0].getsockname()[1]
        self._tick()
        if self._certificate is not None:
            self.run_in_background(self._certificate.watch.run())

    def run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with this server."""
        self._background.append(self.loop.create_task(coroutine))

    def connection_closed(self, connection: HTTPConnection) -> None:
        self.connections.discard(connection)
        self.settled.set()
        self._acceptor.connection_closed(connection.refused)

    def report_tls_client(self) -> None:
        self._acceptor.report_tls_client()

    def flush_soon(self, connection: HTTPConnection) -> None:
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    def _tick(self) -> None:
        """Check all deadlines: one timer is cheaper than one for each connection."""
        now = self.loop.time()
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._trim_memory(now)
        self._timer = self.loop.call_later(self._tick_seconds, self._tick)

    def _trim_memory(self, now: float) -> None:
        """Give memory back to the system some time after the last large body."""
        admission = self.admission
        if admission.admissions != self._admissions or admission.bytes:
            self._admissions, self._trim_at = admission.admissions, now + TRIM_SECONDS
        elif now > self._trim_at:
            self._trim_at = NO_DEADLINE
            self.buffers.clear()
            self.loop.run_in_executor(None, trim_allocator)

    async def drain(self, seconds: float) -> None:
        """Take no new requests, let running ones finish and be read, then close.

        The port stays open meanwhile, so that /health can say why.
        """
        self.draining = True
        for connection in [c for c in self.connections if c.idle()]:
            connection.close()
        await self._wait_while(lambda: any(c.busy() for c in self.connections), seconds)
        await self.close()

    async def _wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while condition():
                    self.settled.clear()
                    await self.settled.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Stop now: running requests end with an error."""
        self.lag.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._acceptor.close()
        for task in self._background:
            await cancel_and_wait(task)
        self.draining = True
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.cut()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for connection in list(self.connections):
            connection.close()
        await self._wait_while(lambda: bool(self.connections), CLOSE_SECONDS)
        for connection in list(self.connections):  # whose clients do not read
            connection.abort()
        await self._wait_while(lambda: bool(self.connections), CLOSE_SECONDS)
