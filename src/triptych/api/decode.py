"""From a body to a typed request, and from what is wrong to an error that says so.

The way of a good request is short. What is slow here runs only for the others: for bad ones, and
for those with parameters that say no more than that something is not wanted.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from triptych.api.body import MediaSlices, RawBody, extract_media
from triptych.api.content import CONTENT_TYPES, AudioFormat
from triptych.api.requests import ChatMessage
from triptych.errors import (
    InvalidJSON,
    InvalidValue,
    TriptychError,
    UnsupportedParameter,
)

EXPLAIN_BYTES = 64 << 10  # a larger bad body gets a shorter explanation
LONGEST_NAME = 64  # characters of a client's own words that are said back
DIGITS = 30  # no parameter takes an integer with more
LARGE = int("9" * DIGITS)

_AT = re.compile(r"^(.*?)(?: - at (`key` in )?`\$\.?(.*?)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `([^`]*)`( [<>].*| of length .*)?(?:, got `([^`]*)`)?")
_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]")
_FOREIGN = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff|\0|.\0", re.DOTALL)
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}

T = TypeVar("T", bound=Struct)


def decode_request(
    body: RawBody, decoder: msgspec.json.Decoder[T], size: int, most: int, items: int
) -> tuple[T, MediaSlices]:
    """The request in the first ``size`` bytes, and the media that were cut out of it.

    Without these, of which there are ``items`` at most, it may have ``most`` bytes: to decode more
    would hold up everyone.
    """
    text, slices = extract_media(body, size, most, items)
    try:
        return decoder.decode(text), slices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _again(bytes(text), decoder.type, error), slices


def _again(text: bytes, kind: type[T], error: Exception) -> T:
    """A second, slower look: leave out what counts as absent; else say what is wrong, and where."""
    tree = _tree(text, error)
    if not isinstance(error, msgspec.ValidationError):
        raise InvalidJSON(f"The body is not valid JSON: {error}.")
    tree = _wanted(tree, kind)
    if isinstance(messages := tree.get("messages"), list):
        tree["messages"] = [_message(m) if isinstance(m, dict) else m for m in messages]
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as why:
        raise _named(str(why)) from None


def _tree(text: bytes, error: Exception) -> dict[str, Any]:
    small = len(text) <= EXPLAIN_BYTES
    if _FOREIGN.match(text):
        raise InvalidJSON("The body must be UTF-8, without a byte order mark.")
    try:
        tree = _small_tree(text) if small else msgspec.json.decode(text)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidJSON("The body is not valid UTF-8.") from None
    except msgspec.ValidationError:  # it is JSON, but has a number that is too large
        raise _named(str(error)) from None  # which is what stopped the first look too
    except ValueError as why:
        raise InvalidJSON(f"The body is not valid JSON: {why}.") from None
    if not isinstance(tree, dict):
        raise InvalidValue("The body must be a JSON object.")
    if small:
        _finite(tree)
    return tree


def _small_tree(text: bytes) -> Any:
    """``json.loads`` alone would take halves of surrogate pairs, as bytes and as escapes."""
    tree = json.loads(text.decode(), parse_int=_integer)
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidJSON(
            "A string has half a surrogate pair (as in \\ud83d alone), which is no character."
        ) from None
    return tree


def _integer(digits: str) -> int:
    """An integer that is too long is as good as one that is only just so."""
    if len(digits) <= DIGITS:
        return int(digits)
    return -LARGE if digits.startswith("-") else LARGE


def _finite(tree: dict[str, Any]) -> None:
    """JSON has no NaN and no infinity, but its writers do."""
    stack: list[tuple[str, Any]] = [(_short(name), value) for name, value in tree.items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidValue(f"'{path}' is not a finite number.", param=path)
        if isinstance(value, dict):
            stack += [(f"{path}.{_short(name)}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]


def _wanted(level: dict[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Without what counts as absent: a null, and what says that it is not wanted."""
    off = getattr(kind, "OFF", {})
    known = {*kind.__struct_fields__, *off}
    return {
        name: value
        for name, value in level.items()
        if not (name in known and (value is None or _one_of(value, off.get(name, ()))))
    }


def _message(level: dict[str, Any]) -> dict[str, Any]:
    """So for a message, and for its parts, whose members are payloads."""
    level = _wanted(level, ChatMessage)
    if isinstance(content := level.get("content"), list):
        level["content"] = [_payloads(part) if isinstance(part, dict) else part for part in content]
    return level


def _payloads(part: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in part.items()
        if value is not None or name not in CONTENT_TYPES
    }


def _one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


def _named(message: str) -> TriptychError:
    """The error that a validation message stands for."""
    match = _AT.match(message)
    assert match is not None, "it matches anything"
    what, key, path = match[1], match[2], match[3] or ""
    path, inside, _ = path.partition("[...]")
    if _PART.fullmatch(path) and (why := _wrong_part(what)):
        return InvalidValue(f"'{path}' {why}.", param=path)
    if unknown := _UNKNOWN.fullmatch(what):
        param = f"{path}.{_short(unknown[1])}" if path else _short(unknown[1])
        return UnsupportedParameter(f"The parameter '{param}' is not supported.", param=param)
    if missing := _MISSING.fullmatch(what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidValue(f"The parameter '{param}' is missing.", param=param)
    if path.endswith(".type"):  # of a kind that is not known: name the part
        path = path.removesuffix(".type")
        return InvalidValue(f"The type of '{path}' must be {', '.join(CONTENT_TYPES)}.", param=path)
    if path.endswith(".role"):
        return InvalidValue(f"'{path}' must be system, developer, user or assistant.", param=path)
    if path.endswith(".input_audio.format"):
        formats = ", ".join(get_args(AudioFormat))
        return InvalidValue(f"'{path}' must be one of {formats}.", param=path)
    subject = f"'{path}'" if path else "The body"
    if key or inside:
        subject = f"A {'key' if key else 'value'} of {subject}"
    return InvalidValue(f"{subject} {_spoken(what)}.", param=path or None)


def _wrong_part(what: str) -> str:
    """Why a part can't be told what it is: it has no type, no payload, or one too many."""
    if (missing := _MISSING.fullmatch(what)) and missing[1] in ("type", *CONTENT_TYPES):
        return f"has no {missing[1]}"
    if (unknown := _UNKNOWN.fullmatch(what)) and unknown[1] in CONTENT_TYPES:
        return f"has '{unknown[1]}', which is not for its type: a part has one payload"
    return ""


def _spoken(what: str) -> str:
    """The decoder's complaint in words that are not Python's."""
    if match := _EXPECTED.fullmatch(what):
        kinds = [_KINDS.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
        got = f", not {_KINDS.get(match[3], match[3])}" if match[3] else ""
        return f"must be {' or '.join(kinds)}{match[2] or ''}{got}"
    return "is too large" if what.endswith("out of range") else f"is wrong: {_short(what)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…"
