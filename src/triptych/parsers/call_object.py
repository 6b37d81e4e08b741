"""Reads a call that is written as a JSON object: a name, and arguments or parameters.

Several formats put such objects between markers of their own.
"""

from __future__ import annotations

from triptych.parsers.json_arguments import copy_object
from triptych.parsers.reader import Reading, ToolReader


def read_call(reader: ToolReader, may_lack_arguments: bool = True) -> Reading[bool]:
    """Read one object, and write its call. False at the first character that does not fit: if the
    call had begun, it stands with the arguments so far.

    The model may give the call an ``id`` and a ``type``; both are dropped. An object with other
    keys is no call.
    """
    whole = yield from _read_members(reader, may_lack_arguments)
    reader.end()
    return whole


def _read_members(reader: ToolReader, may_lack_arguments: bool) -> Reading[bool]:
    if not (yield from reader.expect("{")):
        return False
    name = ""
    seen: set[str] = set()
    while True:
        yield from reader.skip_space()
        key = yield from _read_key(reader)
        if key in seen:
            return False
        seen.add(key)
        match key:
            case "name":
                name = yield from _read_quoted(reader)
                valid = reader.knows(name)
            case "arguments":
                valid = yield from _copy_arguments(reader, name)
            case "id" | "type":
                valid = bool((yield from _read_quoted(reader)))
            case _:
                valid = False
        if not valid:
            return False
        if name and "arguments" in seen:
            reader.begin(name)
        match (yield from reader.skip_space()):
            case ",":
                reader.take()
            case "}":
                break
            case _:
                return False
    if not name or not (may_lack_arguments or "arguments" in seen):
        return False
    if "arguments" not in seen:
        reader.write("{}")
    reader.take()
    reader.begin(name)
    return True


def _read_key(reader: ToolReader) -> Reading[str]:
    key = yield from _read_quoted(reader)
    if not key or (yield from reader.skip_space()) != ":":
        return ""
    reader.take()
    yield from reader.skip_space()
    return "arguments" if key == "parameters" else key


def _read_quoted(reader: ToolReader) -> Reading[str]:
    if not (yield from reader.expect('"')):
        return ""
    name = yield from reader.read_name()
    return name if name and (yield from reader.expect('"')) else ""


def _copy_arguments(reader: ToolReader, name: str) -> Reading[bool]:
    if (yield from reader.peek()) == "n":  # of a function without parameters
        reader.write("{}")
        return (yield from reader.expect("null"))
    if name and (yield from reader.peek()) == "{":
        reader.begin(name)
    return (yield from copy_object(reader))


def read_calls(reader: ToolReader) -> Reading[bool]:
    """Read an array of such objects, as ``read_call``."""
    if not (yield from reader.expect("[")):
        return False
    while True:
        yield from reader.skip_space()
        if not (yield from read_call(reader)):
            return False
        match (yield from reader.skip_space()):
            case ",":
                reader.take()
            case "]":
                reader.take()
                reader.accept()
                return True
            case _:
                return False
