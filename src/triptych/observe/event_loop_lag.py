"""How late an event loop is: a timer looks at the clock at intervals and keeps the worst values.

Two values tell our own work from a machine that is busy with other processes: how late the timer
fired, and how much CPU time the loop's thread used since the timer fired last.
"""

from __future__ import annotations

import asyncio
import time

INTERVAL = 0.02  # seconds between measurements
STALL_SECONDS = 0.05  # a measurement that is later than this counts as a stall
PERIOD = 10.0  # seconds; the worst values are those of this period and the one before


class EventLoopLag:
    """Measures the running loop from its creation on, until ``stop``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lag = (0.0, 0.0)  # worst of this period and of the one before
        self._cpu = (0.0, 0.0)
        self._period_end = self._loop.time() + PERIOD
        self._due = self._last_cpu = 0.0
        self.stalls = 0
        self._timer = self._loop.call_soon(self._begin)

    @property
    def max_lag(self) -> float:
        """The most seconds by which a recent measurement was late."""
        return max(self._lag)

    @property
    def max_cpu(self) -> float:
        """The most CPU seconds of the loop's thread between two recent measurements."""
        return max(self._cpu)

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._last_cpu = time.thread_time()
        self._schedule(self._loop.time())

    def _schedule(self, now: float) -> None:
        self._due = now + INTERVAL
        self._timer = self._loop.call_at(self._due, self._measure)

    def _measure(self) -> None:
        now, cpu = self._loop.time(), time.thread_time()
        if now > self._period_end:
            self._lag, self._cpu = (0.0, self._lag[0]), (0.0, self._cpu[0])
            self._period_end = now + PERIOD
        lag = now - self._due
        self.stalls += lag > STALL_SECONDS
        self._lag = (max(self._lag[0], lag), self._lag[1])
        self._cpu = (max(self._cpu[0], cpu - self._last_cpu), self._cpu[1])
        self._last_cpu = cpu
        self._schedule(now)
