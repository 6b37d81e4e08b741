"""Whose item is decoded next: who came first, the tenants taking turns.

As many at once as there are processes, and none is begun while callers hold more than HELD_BYTES of
prepared media besides what the cache keeps. So at most that, and one item for each process, is
there. Knows neither processes nor media.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from triptych.errors import Draining

HELD_BYTES = 512 << 20
# Callers that hold so much and wait for more would wait for ever: so after this time with nothing
# given back one more item is begun.
STALL_SECONDS = 2.0

Turn = asyncio.Future[bool]  # False: it never comes


class Turns:
    """``kept`` tells how many of the held bytes are the cache's."""

    def __init__(self, most: int, kept: Callable[[], int]) -> None:
        self._most = most
        self._kept = kept
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()  # by tenant
        self._held = 0
        self._given_back: deque[int] = deque()  # sizes, from any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._closed = False
        self.queued = 0
        self.running = 0

    async def take(self, tenant: str) -> None:
        """Wait for a turn, which ``end`` ends. Cancelled, one leaves the line."""
        if self._closed:
            raise Draining("This process is stopping.")
        self._loop = asyncio.get_running_loop()
        turn: Turn = self._loop.create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        self.queued += 1
        self._go_on()
        try:
            granted = await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            elif turn.result():  # it came at the same moment
                self.end()
            raise
        if not granted:
            raise Draining("This process is stopping.")

    def end(self) -> None:
        self.running -= 1
        self._go_on()

    def hold(self, size: int) -> None:
        """A caller holds so many bytes more."""
        self._held += size

    def give_back(self, size: int) -> None:
        """From any thread: so many bytes are held no more. RuntimeError: the loop is closed."""
        self._given_back.append(size)
        if self.queued and self._loop is not None:
            self._loop.call_soon_threadsafe(self._go_on)

    def close(self) -> None:
        """Who still waits, waits no longer."""
        self._closed = True
        self._calm()
        while self.queued:
            if not (turn := self._next()).done():
                turn.set_result(False)

    def _go_on(self, *, regardless: bool = False) -> None:
        while self._given_back:
            self._held -= self._given_back.popleft()
            self._calm()
        while self.queued and self.running < self._most:
            if self._held - self._kept() >= HELD_BYTES and not regardless:
                self._be_patient()
                return
            if (turn := self._next()).done():
                continue  # cancelled, and about to leave
            regardless = False
            self.running += 1
            turn.set_result(True)

    def _next(self) -> Turn:
        tenant, line = next(iter(self._lines.items()))
        turn = line.popleft()
        self._lines.move_to_end(tenant)
        if not line:
            del self._lines[tenant]
        self.queued -= 1
        return turn

    def _leave(self, tenant: str, turn: Turn) -> None:
        line = self._lines.get(tenant)
        if line is None or turn not in line:
            return  # it was passed over since it was cancelled
        line.remove(turn)
        if not line:
            del self._lines[tenant]
        self.queued -= 1

    def _be_patient(self) -> None:
        if self._stalled is None and self._loop is not None:
            self._stalled = self._loop.call_later(STALL_SECONDS, self._stir)

    def _stir(self) -> None:
        self._stalled = None
        self._go_on(regardless=True)

    def _calm(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
