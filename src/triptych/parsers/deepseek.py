"""Calls of DeepSeek V3, R1 and V3.1, each between markers, and all of them between two more.

V3 and R1 write ``function``, a separator, the name and a fenced block of JSON; V3.1 writes the
name, a separator and JSON.
"""

from __future__ import annotations

from triptych.parsers.json_arguments import copy_object
from triptych.parsers.reader import Markers, Reading, ToolReader

_BEGIN_ALL = "<｜tool▁calls▁begin｜>"
_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"
_END_ALL = "<｜tool▁calls▁end｜>"
_OPENING = Markers(_BEGIN_ALL, _BEGIN)


class DeepSeekParser(ToolReader):
    kept_markers = (_BEGIN_ALL, _BEGIN, _SEPARATOR, _END, _END_ALL)

    def _read(self) -> Reading[None]:
        while marker := (yield from self.read_content(_OPENING)):
            if marker == _BEGIN_ALL:
                yield from self.skip_space()
                marker = yield from self.choose(_BEGIN)
            while marker == _BEGIN and (yield from self._read_call()):
                yield from self.skip_space()
                marker = yield from self.choose(_BEGIN, _END_ALL)
                if marker == _END_ALL or self.take_cut(_END_ALL) is not None:
                    self.accept()
            self.reject()

    def _read_call(self) -> Reading[bool]:
        name = yield from self.read_name()
        if not (yield from self.expect(_SEPARATOR)):
            return False
        ends: tuple[str, ...] = (_END,)
        if name == "function" and (yield from self.skip_space()) != "{":
            name = yield from self.read_name()
            yield from self.skip_space()
            if not (yield from self.expect("```json")):
                return False
            ends = ("```", _END)
        if not self.knows(name) or (yield from self.skip_space()) != "{":
            return False
        self.begin(name)
        whole = yield from copy_object(self)
        self.end()
        return whole and (yield from self.close(*ends))
