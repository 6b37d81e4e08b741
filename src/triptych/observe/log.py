"""What a process writes to stderr: a log line per event, and status lines for people.

Modules log with the standard library, as JSON or as text. A line that concerns a request passes its
id as ``extra={"request_id": id}``; both formats print it. The level comes from TRIPTYCH_LOG. Status
lines say what a start is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from triptych.errors import InvalidConfig

LogFormat = Literal["json", "text"]
LEVELS = ("debug", "info", "warning", "error", "critical")
WINDOW_SECONDS = 10.0
PROGRESS_SECONDS = 1.0

_encode = msgspec.json.Encoder(enc_hook=str).encode
_warning_totals: dict[str, int] = {}  # of this process, by kind


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "source": _source(record),
            "event": record.getMessage(),
            "pid": record.process,
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _encode(line).decode()


class _TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z WARNING api.app[4711] worker lost request_id=chatcmpl-1``"""

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\n", "\\n")  # one line per event
        origin = f"{record.levelname} {_source(record)}[{record.process}]"
        line = f"{second}.{int(record.msecs):03}Z {origin} {message}"
        if request_id := _request_id(record):
            line += f" request_id={request_id}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _source(record: logging.LogRecord) -> str:
    return record.name.removeprefix("triptych.")


def _request_id(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "")


def configure(log_format: LogFormat = "json") -> None:
    """Send the log of this process to stderr. Without TRIPTYCH_LOG: warnings and errors."""
    level = os.environ.get("TRIPTYCH_LOG") or "warning"
    if level.lower() not in LEVELS:
        raise InvalidConfig(f"TRIPTYCH_LOG='{level}' is not a log level: use {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("triptych").setLevel(level.upper())


class _Window(Struct):
    start: float
    suppressed: int = 0
    last_message: str = ""  # the newest that was suppressed


class RateLimitedLog:
    """Logs warnings that a peer can cause at any rate: at most two lines of a kind per window.

    It logs the first warning of a kind at once, counts those that follow within ``seconds``, and
    then logs one line with their number. ``totals`` counts all of them, from 0 on for every kind.
    """

    def __init__(
        self,
        log: logging.Logger,
        *kinds: str,
        seconds: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = dict.fromkeys(kinds, 0)
        for kind in kinds:
            _warning_totals.setdefault(kind, 0)
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def warning(self, kind: str, message: str) -> None:
        self.totals[kind] += 1
        _warning_totals[kind] += 1
        now, window = self._clock(), self._windows.get(kind)
        if window is not None and now - window.start < self._seconds:
            window.suppressed += 1
            window.last_message = message
            if window.suppressed == 1:
                self._close_later(window, self._seconds - (now - window.start))
            return
        if window is not None:
            self._close(window)
        self._windows[kind] = _Window(now)
        self._log.warning("%s", message)

    def _close_later(self, window: _Window, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # no running loop: the next warning closes it
            asyncio.get_running_loop().call_later(seconds, self._close, window)

    def _close(self, window: _Window) -> None:
        """Log how many warnings were suppressed, once."""
        if window.suppressed:
            count, window.suppressed = window.suppressed, 0
            self._log.warning("%s (%d similar lines suppressed)", window.last_message, count)


def warning_totals() -> dict[str, int]:
    """How many warnings of each kind all RateLimitedLogs of this process have counted."""
    return dict(_warning_totals)


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
        soon = what == self._what and fraction < 1 and now - self._spoke < PROGRESS_SECONDS
        if soon or line == self._line:
            return
        self._what, self._line, self._spoke = what, line, now
        print_status(line)
