"""What a start is doing, as plain lines on stderr for people."""

from __future__ import annotations

import contextlib
import sys
import time

EVERY_SECONDS = 1.0


def print_status(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone: continue without it
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Call it with an activity and its fraction (0 to 1); it prints once a second."""

    def __init__(self) -> None:
        self._what = self._line = ""
        self._spoke = 0.0

    def __call__(self, what: str, fraction: float) -> None:
        now, line = time.monotonic(), f"{what} ... {fraction:.0%}"
        soon = what == self._what and fraction < 1 and now - self._spoke < EVERY_SECONDS
        if soon or line == self._line:
            return
        self._what, self._line, self._spoke = what, line, now
        print_status(line)
