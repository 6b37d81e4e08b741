"""The access log (``--access-log``): one line on stderr for each request that was answered.

The event loop only appends an entry to a bounded queue; a thread formats and writes. Requests that
are refused before they are handled can come in floods: some lines a second tell of them, and one
line says how many more there were.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

import msgspec
from msgspec import UNSET, Struct, UnsetType

from triptych.observe.log import LogFormat

WRITE_SECONDS = 0.2  # between writes
MAX_QUEUED = 20_000  # lines that wait to be written; more are dropped and counted
MAX_REFUSED = 20  # lines a second about requests that were refused before they were handled
MAX_PATH = 256  # characters
CLOSE_SECONDS = 1.0
OWN_PROBE = b"triptych-supervisor"  # user agent of ``serve``'s questions to /health during a start

_encode = msgspec.json.encode


class AccessEntry(Struct, frozen=True, kw_only=True):
    """One request. ``key`` is the name of the key, never the key itself."""

    time: float  # when it ended
    request_id: str
    key: str
    method: str
    path: str
    status: int  # 0: the client left before it was answered
    ms: float
    first_token_ms: float | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    media_tokens: dict[str, int] | UnsetType = UNSET  # of the prompt's, by kind
    output_tokens: int | UnsetType = UNSET
    media_bytes: int | UnsetType = UNSET
    stages_ms: dict[str, float] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class AccessLog:
    def __init__(
        self,
        log_format: LogFormat,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._format = _as_json if log_format == "json" else _as_text
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._queue: deque[AccessEntry] = deque()
        self._dropped = 0  # entries, since the last line about them
        self._second = 0  # of the clock, in which refused requests are counted
        self._refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def add(self, entry: AccessEntry) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(entry)
        else:
            self._dropped += 1

    def may_add_refused(self) -> bool:
        """Whether another refused request gets a line this second; it is counted if not."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        if self._refused <= MAX_REFUSED:
            return True
        self._dropped += 1
        return False

    def close(self) -> None:
        """Write what is queued, and end."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(WRITE_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        lines = [self._format(self._queue.popleft()) for _ in range(len(self._queue))]
        dropped = self._dropped
        if dropped:
            self._dropped -= dropped
            lines.append(self._left_out(dropped))
        if lines:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()

    def _left_out(self, count: int) -> str:
        event, now = f"{count} more requests have no line here", time.time()
        if self._format is _as_text:
            return f"{_text_origin(now)} {event}"
        return _encode(_json_origin(now) | {"event": event}).decode()


def _json_origin(when: float) -> dict[str, object]:
    return {"time": round(when, 3), "level": "info", "source": "access", "pid": os.getpid()}


def _as_json(entry: AccessEntry) -> str:
    fields = msgspec.structs.asdict(entry)
    known = {name: value for name, value in fields.items() if value is not UNSET}
    return _encode(known | _json_origin(entry.time) | {"event": "request"}).decode()


def _text_origin(when: float) -> str:
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))
    return f"{second}.{int(when % 1 * 1000):03}Z INFO access[{os.getpid()}]"


def _as_text(entry: AccessEntry) -> str:
    """``... INFO access[4711] POST /v1/chat/completions 200 12.3ms key=alice output_tokens=4``"""
    words = [entry.method, entry.path, str(entry.status), f"{entry.ms:.1f}ms"]
    named = msgspec.structs.asdict(entry)
    for name in ("time", "method", "path", "status", "ms"):
        del named[name]
    for name, value in named.items():
        if isinstance(value, dict):
            words += [f"{name}.{part}={amount}" for part, amount in value.items()]
        elif value is not UNSET and value != "":
            words.append(f"{name}={value}")
    return f"{_text_origin(entry.time)} {' '.join(words)}"


def printable_path(path: str) -> str:
    """A client's path, short and without control characters."""
    path = path[:MAX_PATH]
    return path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
