"""Parts of a long benchmark that are finished, kept until all are: a run that was broken off goes
on with the next one. What other code found is not gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from benchmarks import record


class Kept:
    def __init__(self, name: str) -> None:
        from triptych.checkpoint import cache_folder

        self._file = cache_folder() / f"{name}-{record.code()}.json"
        self.found: dict[str, Any] = {}
        self.when: dict[str, str] = {}  # each part was finished
        if self._file.is_file():
            kept = json.loads(self._file.read_text())
            self.found, self.when = kept["found"], kept["when"]

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was found before, or is found now."""
        if name not in self.found:
            self.found[name] = measure()
            self.when[name] = datetime.now(UTC).isoformat(timespec="seconds")
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps({"found": self.found, "when": self.when}))
        return self.found[name]

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)
