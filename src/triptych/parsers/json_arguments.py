"""Copies JSON from the output to the arguments of a call as it arrives, and checks it.

Inside of strings it repairs what models often write and JSON forbids: control characters are
escaped, and a backslash that escapes nothing is doubled. All else is copied as it is.
"""

from __future__ import annotations

import json
import re

from triptych.parsers.reader import Reading, ToolReader

DEPTH = 64  # of nested objects and arrays

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_ESCAPED = frozenset('"\\/bfnrtu')
HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_DIGITS = re.compile("[0-9]+")


def copy_object(reader: ToolReader) -> Reading[bool]:
    """Read one JSON object and write it. False at the first character that does not fit."""
    if (yield from reader.peek()) != "{":
        return False
    reader.write(reader.take())
    closings = ["}"]  # of open objects and arrays
    first = True  # nothing stands in the innermost one yet
    while closings:
        character = yield from copy_space(reader)
        if character == closings[-1] and character:
            reader.write(reader.take())
            closings.pop()
            first = False
            continue
        if not first:
            if character != ",":
                return False
            reader.write(reader.take())
            yield from copy_space(reader)
        if closings[-1] == "}" and not (yield from _copy_key(reader)):
            return False
        opening = yield from reader.peek()
        if opening in ("{", "["):
            if len(closings) == DEPTH:
                return False
            reader.write(reader.take())
            closings.append("}" if opening == "{" else "]")
            first = True
        elif not (yield from _copy_scalar(reader)):
            return False
        else:
            first = False
    return True


def copy_space(reader: ToolReader) -> Reading[str]:
    """Copy white space, and peek."""
    while (yield from reader.peek()) and (space := reader.take_run(_SPACE)):
        reader.write(space)
    return (yield from reader.peek())


def _copy_key(reader: ToolReader) -> Reading[bool]:
    if not (yield from _copy_string(reader)) or (yield from copy_space(reader)) != ":":
        return False
    reader.write(reader.take())
    yield from copy_space(reader)
    return True


def _copy_scalar(reader: ToolReader) -> Reading[bool]:
    character = yield from reader.peek()
    if character == '"':
        return (yield from _copy_string(reader))
    if word := _WORDS.get(character):
        for expected in word:
            if (yield from reader.peek()) != expected:
                return False
            reader.write(reader.take())
        return True
    return (yield from copy_number(reader))


def _copy_string(reader: ToolReader) -> Reading[bool]:
    if (yield from reader.peek()) != '"':
        return False
    reader.write(reader.take())
    while character := (yield from reader.peek()):
        if character == '"':
            reader.write(reader.take())
            return True
        if character == "\\":
            if not (yield from _copy_escape(reader)):
                return False
        elif character < " ":
            reader.write(escape(reader.take()))
        else:
            reader.write(reader.take_run(_PLAIN))
    return False


def _copy_escape(reader: ToolReader) -> Reading[bool]:
    reader.write(reader.take())
    kind = yield from reader.peek()
    if kind not in _ESCAPED:
        if kind:
            reader.write("\\")
        return True
    reader.write(reader.take())
    for _ in range(4 if kind == "u" else 0):
        if (yield from reader.peek()) not in HEXADECIMAL:
            return False
        reader.write(reader.take())
    return True


def copy_number(reader: ToolReader) -> Reading[bool]:
    if (yield from reader.peek()) == "-":
        reader.write(reader.take())
    if (yield from reader.peek()) == "0":
        reader.write(reader.take())
    elif not (yield from _copy_digits(reader)):
        return False
    if (yield from reader.peek()) == ".":
        reader.write(reader.take())
        if not (yield from _copy_digits(reader)):
            return False
    if (yield from reader.peek()) in ("e", "E"):
        reader.write(reader.take())
        if (yield from reader.peek()) in ("+", "-"):
            reader.write(reader.take())
        return (yield from _copy_digits(reader))
    return True


def _copy_digits(reader: ToolReader) -> Reading[bool]:
    some = False
    while (yield from reader.peek()) and (digits := reader.take_run(_DIGITS)):
        reader.write(digits)
        some = True
    return some


def escape(text: str) -> str:
    """The text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
