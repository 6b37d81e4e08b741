"""Warnings that others can cause as often as they like: few lines, and a count of all.

The first of a kind is logged at once. Those that follow within some seconds are counted, and one
line tells at the end how many they were. ``totals`` counts all of them, ``process_totals`` those of
the whole process, for the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from msgspec import Struct

SECONDS = 10.0
_counts: dict[str, int] = {}  # of this process, by kind


def process_totals() -> dict[str, int]:
    """Warnings of every kind, of all LimitedLogs that this process has made."""
    return dict(_counts)


class _Window(Struct):
    began: float
    left_out: int = 0
    last: str = ""  # of those


class LimitedLog:
    """At most two lines of each kind in ``seconds``. ``kinds`` are counted from 0 on."""

    def __init__(
        self,
        log: logging.Logger,
        *kinds: str,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = dict.fromkeys(kinds, 0)
        for kind in kinds:
            _counts.setdefault(kind, 0)
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def warning(self, kind: str, message: str) -> None:
        self.totals[kind] += 1
        _counts[kind] += 1
        now, window = self._clock(), self._windows.get(kind)
        if window is not None and now - window.began < self._seconds:
            window.left_out += 1
            window.last = message
            if window.left_out == 1:
                self._close_later(window, self._seconds - (now - window.began))
            return
        if window is not None:
            self._close(window)
        self._windows[kind] = _Window(now)
        self._log.warning("%s", message)

    def _close_later(self, window: _Window, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs here: the next of its kind closes it
            asyncio.get_running_loop().call_later(seconds, self._close, window)

    def _close(self, window: _Window) -> None:
        """Tell how many were left out, once."""
        if window.left_out:
            count, window.left_out = window.left_out, 0
            self._log.warning("%s (%d such lines left out)", window.last, count)
