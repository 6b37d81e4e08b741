"""Parts of a long benchmark that are finished, kept until all are: a run that was broken off goes
on with the next one. What another commit found is not gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks import record


class Kept:
    def __init__(self, name: str) -> None:
        from triptych.engines.torch.tiny_folder import cache

        self._file = cache() / f"{name}-{record.commit()[:10]}.json"
        self.found: dict[str, Any] = {}
        if self._file.is_file():
            self.found = json.loads(self._file.read_text())

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was found before, or is found now."""
        if name not in self.found:
            self.found[name] = measure()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.found))
        return self.found[name]

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)
