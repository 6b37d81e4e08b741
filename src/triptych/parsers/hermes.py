"""Calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from triptych.parsers.call_object import read_call
from triptych.parsers.reader import Markers, Reading, ToolReader

_OPENING = Markers("<tool_call>")


class HermesParser(ToolReader):
    kept_markers = ("<tool_call>", "</tool_call>")

    def _read(self) -> Reading[None]:
        while (yield from self.read_content(_OPENING)):
            yield from self.skip_space()
            if (yield from read_call(self)):
                yield from self.close("</tool_call>")
            else:
                self.reject()
