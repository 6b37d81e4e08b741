"""Calls of Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` tags, each on its own line."""

from __future__ import annotations

from triptych.parsers.reader import Markers, Reading
from triptych.parsers.tagged import TaggedReader

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_OPENING = Markers(_CALL, _FUNCTION)  # models forget the first at times
_VALUE_ENDS = Markers("\n" + _PARAMETER_END, _PARAMETER_END)


class QwenCoderParser(TaggedReader):
    kept_markers = (_CALL, _CALL_END)

    def _read(self) -> Reading[None]:
        while marker := (yield from self.read_content(_OPENING)):
            if marker == _CALL:
                yield from self.skip_space()
                marker = yield from self.choose(_FUNCTION)
            whole = bool(marker) and (yield from self._read_function())
            self.end()
            if whole:
                yield from self.close(_CALL_END)
            else:
                self.reject()

    def _read_function(self) -> Reading[bool]:
        name = yield from self.read_name()
        if not self.knows(name) or not (yield from self.expect(">")):
            return False
        first = True
        while True:
            yield from self.skip_space()
            tag = yield from self.choose(_PARAMETER, _FUNCTION_END)
            if tag == _FUNCTION_END or (not first and self.take_cut(_FUNCTION_END)):
                self.begin(name)
                self.write("{}" if first else "}")
                return True
            key = (yield from self.read_name()) if tag else ""
            if not key or not (yield from self.expect(">")):
                return False
            self.write_key(name, key, first)
            first = False
            yield from self.expect("\n")
            if not (yield from self.copy_text(name, key, _VALUE_ENDS)):
                return False
            yield from self.choose("\n" + _PARAMETER_END, _PARAMETER_END)
            self.accept()
