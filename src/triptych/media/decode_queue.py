"""Which item is decoded next: fair queueing over tenants.

A free place goes to the tenant with the fewest running items, among equals to the one that was
served the longest ago. So one tenant may use every place while it is alone, and another one that
comes then waits until one place is free, not for what the first has queued.

As many items run at once as there are processes, and none is begun while callers hold more than
HELD_BYTES of prepared media besides what the cache keeps. So at most that, and one item for each
process, is there. Knows neither processes nor media.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.errors import Draining

MAX_HELD_BYTES = 512 << 20
# Callers that hold so much and wait for more would wait for ever: so after this time with nothing
# given back one more item is begun.
STALL_SECONDS = 2.0

_Turn = asyncio.Future[bool]  # False: it never comes


@dataclass(slots=True)
class _Tenant:
    """What one tenant has in the queue and under way."""

    waiting: deque[_Turn] = field(default_factory=deque)
    running: int = 0
    served: int = 0  # number of the last turn that it got, of all turns; 0: none yet

    @property
    def rank(self) -> tuple[int, int]:
        return self.running, self.served


class DecodeQueue:
    """``kept`` tells how many of the held bytes are the cache's."""

    def __init__(self, most: int, kept: Callable[[], int]) -> None:
        self._most = most
        self._kept = kept
        self._tenants: dict[str, _Tenant] = {}  # those with anything queued or running
        self._served = 0
        self._held = 0
        self._given_back: deque[int] = deque()  # sizes, from any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._closed = False
        self.queued = 0
        self.running = 0

    async def take(self, tenant: str) -> None:
        """Wait for a turn, which ``end`` ends. A caller that is cancelled leaves the queue."""
        if self._closed:
            raise Draining("This process is stopping.")
        self._loop = asyncio.get_running_loop()
        turn: _Turn = self._loop.create_future()
        self._tenants.setdefault(tenant, _Tenant()).waiting.append(turn)
        self.queued += 1
        self._go_on()
        try:
            granted = await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            elif turn.result():  # it came at the same moment
                self.end(tenant)
            raise
        if not granted:
            raise Draining("This process is stopping.")

    def end(self, tenant: str) -> None:
        self.running -= 1
        self._tenants[tenant].running -= 1
        self._forget(tenant)
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
        """End the waiting of all who are queued: each gets Draining."""
        self._closed = True
        self._calm()
        while self.queued:
            name, turn = self._next()
            self._forget(name)
            if not turn.done():
                turn.set_result(False)

    def _go_on(self, *, regardless: bool = False) -> None:
        while self._given_back:
            self._held -= self._given_back.popleft()
            self._calm()
        while self.queued and self.running < self._most:
            if self._held - self._kept() >= MAX_HELD_BYTES and not regardless:
                self._be_patient()
                return
            tenant, turn = self._next()
            if turn.done():  # cancelled, and about to leave
                self._forget(tenant)
                continue
            regardless = False
            self.running += 1
            self._served += 1
            self._tenants[tenant].running += 1
            self._tenants[tenant].served = self._served
            turn.set_result(True)

    def _next(self) -> tuple[str, _Turn]:
        """The turn that comes next, out of the queue. ``min`` takes the first of equals."""
        queued = (name for name, tenant in self._tenants.items() if tenant.waiting)
        name = min(queued, key=lambda name: self._tenants[name].rank)
        self.queued -= 1
        return name, self._tenants[name].waiting.popleft()

    def _leave(self, name: str, turn: _Turn) -> None:
        tenant = self._tenants.get(name)
        if tenant is None or turn not in tenant.waiting:
            return  # it was passed over since it was cancelled
        tenant.waiting.remove(turn)
        self.queued -= 1
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Drop a tenant that has nothing here any more."""
        tenant = self._tenants[name]
        if not tenant.running and not tenant.waiting:
            del self._tenants[name]

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
