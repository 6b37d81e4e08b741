"""Which item is decoded next, and when: fair to tenants, and bounded in memory.

A free process goes to the tenant with the fewest running items, of equals to the one that was
served the longest ago. So one tenant alone may use every process, and another one that comes then
waits until one process is free, not for what the first has queued.

No item is started while callers hold more than MAX_HELD_BYTES of prepared media besides what the
cache keeps. So memory holds at most that and one item for each process. Knows neither processes
nor media.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from triptych.errors import Draining
from triptych.runtime.concurrency import FairSemaphore

MAX_HELD_BYTES = 512 << 20
# Callers that hold so much and wait for more would wait for ever. So if nothing was released for
# this time, one more item is started.
RELEASE_SECONDS = 2.0


class DecodeQueue:
    """``cached_bytes`` gives how many of the held bytes belong to the cache."""

    def __init__(self, most: int, cached_bytes: Callable[[], int]) -> None:
        self._slots = FairSemaphore(most, least_held_first=True, may_admit=self._may_start)
        self._cached_bytes = cached_bytes
        self._held = 0
        self._released: deque[int] = deque()  # sizes, appended by any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False  # nothing was released for RELEASE_SECONDS: start one item
        self._closed = False

    @property
    def queued(self) -> int:
        return self._slots.waiting

    @property
    def running(self) -> int:
        return self._slots.in_use

    async def start(self, tenant: str) -> None:
        """Wait for a free process; ``end`` frees it. Cancelled, a caller leaves the queue."""
        if self._closed:
            raise _stopping()
        self._loop = asyncio.get_running_loop()
        await self._slots.acquire(tenant)

    def end(self, tenant: str) -> None:
        self._slots.release(tenant)

    def hold(self, size: int) -> None:
        """A caller holds so many bytes more."""
        self._held += size

    def release(self, size: int) -> None:
        """A caller holds so many bytes less. From any thread; RuntimeError: the loop is closed."""
        self._released.append(size)
        if self.queued and self._loop is not None:
            self._loop.call_soon_threadsafe(self._slots.admit)

    def close(self) -> None:
        """Raise Draining in every ``start`` that waits."""
        self._closed = True
        self._stop_timer()
        self._slots.fail_waiting(_stopping)

    def _may_start(self) -> bool:
        """Whether callers hold little enough memory for one more item."""
        while self._released:
            self._held -= self._released.popleft()
            self._stop_timer()
        if self._held - self._cached_bytes() < MAX_HELD_BYTES:
            return True
        if self._overdue:
            self._overdue = False
            return True
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(RELEASE_SECONDS, self._start_overdue)
        return False

    def _start_overdue(self) -> None:
        self._timer = None
        self._overdue = True
        self._slots.admit()
        self._overdue = False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _stopping() -> Draining:
    return Draining("This process is stopping.")
