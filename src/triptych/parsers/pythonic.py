"""Calls written as a Python list: ``[f(a=1), g(b="x")]`` (Llama 4, Llama 3.2, LFM2, ToolACE).

The list stands at the beginning of a line, or between markers. Arguments are literals, given by
name; they are translated to JSON as they arrive. Nothing is evaluated.
"""

from __future__ import annotations

import json
import re

from triptych.parsers.bare import BareCallReader
from triptych.parsers.json_arguments import DEPTH, HEXADECIMAL, copy_number, escape
from triptych.parsers.reader import Markers, Reading

_ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_OPENING = Markers(*_ENDS, "[")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSINGS = {"{": "}", "[": "]", "(": ")"}
_QUOTES = ("'", '"')
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in _QUOTES}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonicParser(BareCallReader):
    kept_markers = (*_ENDS, *_ENDS.values())

    def _read(self) -> Reading[None]:
        while marker := (yield from self.read_bare(_OPENING, "[")):
            yield from self.skip_space()
            whole = yield from self._read_list()
            self.end()
            if whole and marker in _ENDS:
                yield from self.close(_ENDS[marker])
            else:
                self.reject()

    def _read_list(self) -> Reading[bool]:
        if not (yield from self.expect("[")):
            return False
        while True:
            yield from self.skip_space()
            if not (yield from self._read_call()):
                return False
            match (yield from self.skip_space()):
                case ",":
                    self.take()
                case "]":
                    self.take()
                    self.accept()
                    return True
                case _:
                    return False

    def _read_call(self) -> Reading[bool]:
        name = yield from self.read_name()
        if not self.knows(name) or not (yield from self.expect("(")):
            return False
        before = "{"
        while (yield from self.skip_space()) != ")":
            key = yield from self.read_name()
            if not key or (yield from self.skip_space()) != "=":
                return False
            self.take()
            yield from self.skip_space()
            self.begin(name)
            self.write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._copy_value()):
                return False
            match (yield from self.skip_space()):
                case ",":
                    self.take()
                case ")":
                    pass
                case _:
                    return False
        self.take()
        self.begin(name)
        self.write("{}" if before == "{" else "}")
        self.end()
        return True

    def _copy_value(self) -> Reading[bool]:
        closings: list[str] = []  # of open lists, tuples and dictionaries
        first = True  # nothing stands in the innermost one yet
        while True:
            character = yield from self.skip_space() if closings else self.peek()
            if closings and character == closings[-1]:
                self.take()
                self.write("}" if closings.pop() == "}" else "]")
                first = False
            else:
                if closings and not first:
                    if character != ",":
                        return False
                    self.take()
                    if (yield from self.skip_space()) == closings[-1]:
                        continue  # a comma may stand before the end
                    self.write(", ")
                if closings and closings[-1] == "}" and not (yield from self._copy_key()):
                    return False
                opening = yield from self.peek()
                first = opening in _CLOSINGS
                if first:
                    if len(closings) == DEPTH:
                        return False
                    closings.append(_CLOSINGS[self.take()])
                    self.write("{" if opening == "{" else "[")
                elif not (yield from self._copy_scalar()):
                    return False
            if not closings:
                return True

    def _copy_key(self) -> Reading[bool]:
        if not (yield from self._copy_string()) or (yield from self.skip_space()) != ":":
            return False
        self.take()
        self.write(": ")
        yield from self.skip_space()
        return True

    def _copy_scalar(self) -> Reading[bool]:
        if (yield from self.peek()) in _QUOTES:
            return (yield from self._copy_string())
        if word := (yield from self.choose(*_WORDS)):
            self.write(_WORDS[word])
            return True
        return (yield from copy_number(self))

    def _copy_string(self) -> Reading[bool]:
        quote = yield from self.peek()
        if quote not in _QUOTES:
            return False
        self.take()
        self.write('"')
        if (yield from self.expect(quote)):
            if not (yield from self.expect(quote)):
                self.write('"')
                return True
            quote *= 3
        while character := (yield from self.peek()):
            if character == "\\":
                if not (yield from self._copy_escape()):
                    return False
            elif character == quote[0]:
                if (yield from self.expect(quote)):
                    self.write('"')
                    return True
                self.write(escape(self.take()))
            else:
                self.write(escape(self.take_run(_PLAIN[quote[0]])))
        return False

    def _copy_escape(self) -> Reading[bool]:
        self.take()
        kind = yield from self.peek()
        if not kind:
            return False
        if digits := _CODE_DIGITS.get(kind):
            self.take()
            return (yield from self._copy_code(digits))
        if kind in _ESCAPES:
            self.take()
            self.write(escape(_ESCAPES[kind]))
        else:  # as Python reads it: a backslash like any other character
            self.write("\\\\")
        return True

    def _copy_code(self, digits: int) -> Reading[bool]:
        code = ""
        while len(code) < digits:
            if (yield from self.peek()) not in HEXADECIMAL:
                return False
            code += self.take()
        if digits <= 4:  # two halves of a character stand side by side in JSON too
            self.write(f"\\u{code:0>4}")
        elif int(code, 16) <= 0x10FFFF:
            self.write(json.dumps(chr(int(code, 16)))[1:-1])
        else:
            return False
        return True
