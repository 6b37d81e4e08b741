"""Calls of Llama 3.1 to 4 in JSON: ``{"name": ..., "parameters": {...}}``, several with ``; ``.

They stand at the beginning of a line, or after ``<|python_tag|>`` or ``<|python_start|>``.
"""

from __future__ import annotations

from triptych.parsers.bare import BareCallReader
from triptych.parsers.call_object import read_call
from triptych.parsers.reader import Markers, Reading

_OPENING = Markers("<|python_tag|>", "<|python_start|>", "{")


class LlamaParser(BareCallReader):
    kept_markers = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

    def _read(self) -> Reading[None]:
        while marker := (yield from self.read_bare(_OPENING, "{")):
            yield from self.skip_space()
            called = False
            while (yield from read_call(self, may_lack_arguments=marker != "{")):
                called = True
                yield from self.skip_space()
                if not (yield from self.expect(";")):
                    break
                yield from self.skip_space()
            if called and marker == "<|python_start|>":
                yield from self.close("<|python_end|>")
            else:
                self.reject()
