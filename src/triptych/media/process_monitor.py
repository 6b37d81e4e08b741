"""Monitors a decoding process from outside: its CPU time, its wall-clock time, its state.

CPU time is the file's doing, so it is bounded strictly. A stopped or starved process is not the
file's doing, so the wall-clock limit is generous. Does not know media.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from typing import Literal

CHECK_SECONDS = 0.5  # between two checks of the state
STOPPED_SECONDS = 1.0  # that it may be stopped, by a signal or a debugger
ASLEEP_SECONDS = 5.0  # that it may sleep without an answer: decoding waits for nothing

LossCause = Literal["cpu", "killed", "crashed", "start"]


class DecoderProcessLost(Exception):
    """A decoding process is gone, or must be killed. The reason is for the log only.

    ``cause``: "cpu": the file used up its CPU time. "killed": something else killed or stopped the
    process. "crashed": it crashed, hung or sent nonsense, which a file can cause. "start": it never
    became ready for a file.
    """

    def __init__(self, reason: str, cause: LossCause = "crashed") -> None:
        super().__init__(reason)
        self.cause: LossCause = cause


class ProcessMonitor:
    """Checks the process ``pid`` against its limits each time that it is called."""

    def __init__(self, pid: int, seconds: float) -> None:
        """``seconds``: wall-clock time until it must be ready. Without a bound on CPU time."""
        self._pid = pid
        self._deadline = time.monotonic() + seconds
        self._cpu_seconds = self._cpu_end = math.inf
        self._seen = ("", 0.0)  # state and CPU time at the last check
        self._since = self._checked = time.monotonic()  # when that state began; the last check

    def start_item(self, cpu_seconds: float, seconds: float) -> None:
        """Set the limits of the next item: CPU time and wall-clock time from now on."""
        self._deadline = time.monotonic() + seconds
        self._cpu_seconds = cpu_seconds
        self._cpu_end = self._cpu() + cpu_seconds
        self._since = self._checked = time.monotonic()
        self._limit_cpu()

    def __call__(self) -> float:
        """Seconds until the next check is due. Raises DecoderProcessLost beyond a limit."""
        now = time.monotonic()
        if now >= self._deadline:
            raise DecoderProcessLost("it took too long")
        used = self._cpu()
        if used >= self._cpu_end:
            raise DecoderProcessLost(f"it took over {self._cpu_seconds:g} s of CPU time", "cpu")
        if now - self._checked >= CHECK_SECONDS:
            self._check_state(now, used)
        return max(0.001, min(self._deadline - now, self._cpu_end - used, CHECK_SECONDS))

    def _check_state(self, now: float, used: float) -> None:
        """Whether it has been stopped or asleep for too long."""
        self._checked = now
        state = _state(self._pid)
        if (state, used) != self._seen:
            self._seen, self._since = (state, used), now
        still = now - self._since
        if state in ("T", "t") and still >= STOPPED_SECONDS:
            raise DecoderProcessLost("it was stopped", "killed")
        if state == "S" and still >= ASLEEP_SECONDS and self._cpu_end < math.inf:
            raise DecoderProcessLost("it sleeps and sends no answer")

    def _cpu(self) -> float:
        """CPU time of the process so far; 0 if it is dead or the kernel does not say."""
        with contextlib.suppress(OSError):
            return time.clock_gettime(((~self._pid) << 3) | 2)  # the CPU clock of that process
        return 0.0

    def _limit_cpu(self) -> None:
        """Let the kernel end it too, should we be late: its limit is in whole seconds."""
        with contextlib.suppress(OSError):
            _, hard = resource.prlimit(self._pid, resource.RLIMIT_CPU)
            soft = math.ceil(self._cpu_end) + 1
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.prlimit(self._pid, resource.RLIMIT_CPU, (soft, hard))


def _state(pid: int) -> str:
    """The letter in the third field of /proc/PID/stat; "" if that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
