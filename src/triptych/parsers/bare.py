"""Formats whose calls may stand without a marker, at the beginning of a line."""

from __future__ import annotations

from triptych.parsers.base import KnownFunctions
from triptych.parsers.reader import Markers, Reading, ToolReader


class BareCallReader(ToolReader):
    """Knows whether a line has begun: inside of a line, what looks like a call is content."""

    def __init__(self, functions: KnownFunctions | None = None) -> None:
        super().__init__(functions)
        self._line_is_blank = True

    def say(self, text: str) -> None:
        super().say(text)
        _, line_break, line = text.rpartition("\n")
        self._line_is_blank = (bool(line_break) or self._line_is_blank) and not line.strip()

    def begin(self, name: str) -> None:
        super().begin(name)
        self._line_is_blank = True

    def read_bare(self, markers: Markers, bare: str) -> Reading[str]:
        """As ``read_content``, but the marker ``bare`` counts at the beginning of a line only, and
        stays unread."""
        while True:
            marker = yield from self.read_content(markers)
            if marker != bare:
                return marker
            if self._line_is_blank:
                self.unread(bare)
                return bare
            self.reject()
