"""A program at a terminal of its own, typed at by a test."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Makes the terminal the controlling one, so that Ctrl-C is a signal; a new session has none.
_START = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a script starts in the background
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
CTRL_D = "\x04"


class TypedTerminal:
    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self.shown = ""  # all of it
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def expect(self, text: str, seconds: float = 60) -> str:
        """What was shown since the last call, up to the end of this text."""
        assert self.shows(text, seconds), f"{text!r} was not shown:\n{self.shown!r}"
        at = self.shown.find(text, self._seen)
        start, self._seen = self._seen, at + len(text)
        return self.shown[start : self._seen]

    def interrupt(self, until: str) -> None:
        """Ctrl-C, again where a signal came just before the program began to wait for input."""
        for _ in range(60):
            self.type("\x03")
            if self.shows(until, 1):
                self.expect(until)
                return
        raise AssertionError(f"{until!r} was not shown:\n{self.shown!r}")

    def shows(self, text: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while text not in self.shown[self._seen :]:
            read = self._read(max(0.0, end - time.monotonic()))
            if not read and (time.monotonic() > end or self.process.poll() is not None):
                return False
        return True

    def wait(self, seconds: float = 60) -> int:
        """Until it ends by itself."""
        while self._read(seconds):
            pass
        return self.process.wait(seconds)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # nobody has the terminal open
            return False
        self.shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))
        return bool(data)


@contextmanager
def typed_terminal(argv: Sequence[str], **env: str) -> Iterator[TypedTerminal]:
    ours, theirs = pty.openpty()
    start = [sys.executable, "-c", _START, *argv]
    try:
        process = subprocess.Popen(
            start, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"} | env,
        )  # fmt: skip
        os.close(theirs)
        try:
            yield TypedTerminal(process, ours)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)
