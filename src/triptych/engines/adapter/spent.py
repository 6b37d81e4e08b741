"""What a stream's time went to, by a clock beside an engine that does not tell itself."""

from __future__ import annotations

import time


class RequestTimer:
    """Of one stream. What precedes the first token is prefill, or at D the coming over of a KV
    cache; an engine's own queue is in it too."""

    def __init__(self, span: str) -> None:
        self._before = "import" if span == "D" else "prefill"
        self._started = time.perf_counter()
        self._first = 0.0

    def until_now(self, *, ended: bool) -> dict[str, float] | None:
        """To be told with what has just come; None: nothing is to be told."""
        now, spent = time.perf_counter(), {}
        if not self._first:
            self._first = now
            spent[self._before] = now - self._started
        if ended:
            spent["decode"] = now - self._first
        return spent or None
