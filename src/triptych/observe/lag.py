"""How late an event loop is: it looks at the clock now and then, and remembers the worst.

Two figures tell our own doing from a machine that is busy with others: how late a look was, and
how much CPU time the loop's thread had spent since the one before. Counts nothing else.
"""

from __future__ import annotations

import asyncio
import time

EVERY = 0.02  # seconds between looks
STALL = 0.05  # a look that is later than this counts as a stall
LATELY = 10.0  # the worst is of the last ten to twenty seconds


class Lag:
    """Of the loop that runs when it is made. ``stop`` it there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late = (0.0, 0.0)  # the worst of this while and of the one before
        self._work = (0.0, 0.0)
        self._until = self._loop.time() + LATELY
        self._due = self._spent = 0.0
        self.stalls = 0
        self._timer = self._loop.call_soon(self._begin)

    @property
    def late(self) -> float:
        """Seconds by which a look was late, at worst, lately."""
        return max(self._late)

    @property
    def work(self) -> float:
        """CPU seconds that the loop's thread spent between two looks, at worst, lately."""
        return max(self._work)

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._spent = time.thread_time()
        self._wait(self._loop.time())

    def _wait(self, now: float) -> None:
        self._due = now + EVERY
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now, spent = self._loop.time(), time.thread_time()
        if now > self._until:
            self._late, self._work = (0.0, self._late[0]), (0.0, self._work[0])
            self._until = now + LATELY
        late, work = now - self._due, spent - self._spent
        self.stalls += late > STALL
        self._late = (max(self._late[0], late), self._late[1])
        self._work = (max(self._work[0], work), self._work[1])
        self._spent = spent
        self._wait(now)
