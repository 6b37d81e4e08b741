"""Calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]``, and of newer
tokenizers ``[TOOL_CALLS]name[ARGS]{...}`` for each call, with ``[CALL_ID]id`` before the arguments
in some, and without ``[ARGS]`` in others."""

from __future__ import annotations

from triptych.parsers.call_object import read_calls
from triptych.parsers.json_arguments import copy_object
from triptych.parsers.reader import Markers, Reading, ToolReader

_OPENING = Markers("[TOOL_CALLS]")


class MistralParser(ToolReader):
    kept_markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _read(self) -> Reading[None]:
        while (yield from self.read_content(_OPENING)):
            if (yield from self.skip_space()) == "[":
                yield from read_calls(self)
            else:
                yield from self._read_call()
                self.end()
            self.reject()

    def _read_call(self) -> Reading[None]:
        name = yield from self.read_name()
        if not self.knows(name):
            return
        marker = yield from self.choose("[CALL_ID]", "[ARGS]")
        if marker == "[CALL_ID]" and not (
            (yield from self.read_name()) and (yield from self.expect("[ARGS]"))
        ):
            return
        if (yield from self.skip_space()) == "{":
            self.begin(name)
            yield from copy_object(self)
