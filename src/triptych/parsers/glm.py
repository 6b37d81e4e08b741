"""Calls of GLM-4.5 and later: the name, then each argument as a key and a value between tags."""

from __future__ import annotations

import re

from triptych.parsers.reader import Markers, Reading
from triptych.parsers.tagged import TaggedReader

_OPENING = Markers("<tool_call>")
_END = "</tool_call>"
_VALUE_END = "</arg_value>"
_VALUE_ENDS = Markers(_VALUE_END)
_KEY = re.compile("[^<]+")


class GLMParser(TaggedReader):
    kept_markers = (
        "<tool_call>",
        _END,
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        _VALUE_END,
    )

    def _read(self) -> Reading[None]:
        while (yield from self.read_content(_OPENING)):
            yield from self._read_call()
            self.end()
            self.reject()

    def _read_call(self) -> Reading[None]:
        yield from self.skip_space()
        name = yield from self.read_name()
        if not self.knows(name):
            return
        first = True
        while True:
            yield from self.skip_space()
            tag = yield from self.choose("<arg_key>", _END)
            if tag == _END or (not first and self.take_cut(_END)):
                self.begin(name)
                self.write("{}" if first else "}")
                return
            key = (yield from self._read_key()) if tag else ""
            if not key:
                return
            self.write_key(name, key, first)
            first = False
            if not (yield from self.copy_text(name, key, _VALUE_ENDS)):
                return
            yield from self.expect(_VALUE_END)
            self.accept()

    def _read_key(self) -> Reading[str]:
        parts: list[str] = []
        while (yield from self.peek()) and (part := self.take_run(_KEY)):
            parts.append(part)
        if not (yield from self.expect("</arg_key>")):
            return ""
        yield from self.skip_space()
        return "".join(parts).strip() if (yield from self.expect("<arg_value>")) else ""
