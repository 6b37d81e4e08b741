"""Watches a decoding process from outside: its CPU time, its time on the clock, whether it moves.

The CPU time is the file's doing and is held to what was granted. That a process is stopped, or
starved by others, is not: so time on the clock is granted generously. Knows no media.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from typing import Literal

CHECK_SECONDS = 0.5  # seconds between two looks
STOPPED_SECONDS = 1.0  # for how long it may be stopped, by a signal or a debugger
ASLEEP_SECONDS = 5.0  # for how long it may sleep without an answer: decoding waits for nothing

LossCause = Literal["cpu", "killed", "crashed", "start"]


class DecoderProcessLost(Exception):
    """A decoding process is gone, or has to go. The reason is for the log alone.

    ``cause``: the file took all the CPU time that it may; somebody else killed or stopped the
    process; it crashed, hung or answered nonsense, which a file can bring about; or it never got so
    far as to have a file.
    """

    def __init__(self, reason: str, cause: LossCause = "crashed") -> None:
        super().__init__(reason)
        self.cause: LossCause = cause


class ProcessMonitor:
    """Of the process ``pid``. Call it to learn how long to wait until the next call."""

    def __init__(self, pid: int, seconds: float) -> None:
        """``seconds`` on the clock are granted, without a bound on CPU time."""
        self._pid = pid
        self._deadline = time.monotonic() + seconds
        self._cpu_seconds = self._cpu_end = math.inf
        self._seen = ("", 0.0)  # state and CPU time at the last look
        self._since = self._looked = time.monotonic()  # when it was first seen so, and last

    def grant(self, cpu_seconds: float, seconds: float) -> None:
        """From now on: CPU time for the next item, and time on the clock."""
        self._deadline = time.monotonic() + seconds
        self._cpu_seconds = cpu_seconds
        self._cpu_end = self._cpu() + cpu_seconds
        self._since = self._looked = time.monotonic()
        self._limit_cpu()

    def __call__(self) -> float:
        """Seconds until it is to be looked at again. ChildLost: the waiting is over."""
        now = time.monotonic()
        if now >= self._deadline:
            raise DecoderProcessLost("it took too long")
        used = self._cpu()
        if used >= self._cpu_end:
            raise DecoderProcessLost(f"it took over {self._cpu_seconds:g} s of CPU time", "cpu")
        if now - self._looked >= CHECK_SECONDS:
            self._look(now, used)
        return max(0.001, min(self._deadline - now, self._cpu_end - used, CHECK_SECONDS))

    def _look(self, now: float, used: float) -> None:
        """Is it stopped, or asleep, and for how long?"""
        self._looked = now
        state = _state(self._pid)
        if (state, used) != self._seen:
            self._seen, self._since = (state, used), now
        still = now - self._since
        if state in ("T", "t") and still >= STOPPED_SECONDS:
            raise DecoderProcessLost("it was stopped", "killed")
        if state == "S" and still >= ASLEEP_SECONDS and self._cpu_end < math.inf:
            raise DecoderProcessLost("it sleeps and does not answer")

    def _cpu(self) -> float:
        """CPU time of the process so far; 0 where it is dead or the kernel does not tell."""
        with contextlib.suppress(OSError):
            return time.clock_gettime(((~self._pid) << 3) | 2)  # the CPU clock of that process
        return 0.0

    def _limit_cpu(self) -> None:
        """The kernel ends it too, should we be late: its limits are in whole seconds."""
        with contextlib.suppress(OSError):
            _, hard = resource.prlimit(self._pid, resource.RLIMIT_CPU)
            soft = math.ceil(self._cpu_end) + 1
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.prlimit(self._pid, resource.RLIMIT_CPU, (soft, hard))


def _state(pid: int) -> str:
    """A letter, as the third field of /proc/PID/stat has it; "" where that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
