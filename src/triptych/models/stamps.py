"""The time of a video's moments in words, as token ids of the checkpoint's own tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

from triptych.errors import UnsupportedModel

TIMESTAMPS_CACHED = (
    4096  # a video has some hundred moments, and most lie at the same seconds as another's
)


class TimestampTokens:
    """Time stamps stand between special tokens, so their ids do not depend on what is around."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        if not self._file.is_file():
            raise UnsupportedModel(f"{folder.name} has no tokenizer.json, which its videos need")
        self._written = functools.lru_cache(TIMESTAMPS_CACHED)(self._write)

    def load(self) -> None:
        """Read the tokenizer now, where prompts will be laid out: later it holds everybody up."""
        _ = self._tokenizer

    def of(self, seconds: float) -> tuple[int, ...]:
        return self._written(f"<{seconds:.1f} seconds>")

    def _write(self, stamp: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(stamp, add_special_tokens=False).ids)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Not read from the start: a worker that encodes lays out nothing."""
        return Tokenizer.from_file(str(self._file))
