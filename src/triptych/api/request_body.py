"""Decodes the body of a request into its struct, or explains what is wrong with it.

A valid request takes one pass of msgspec. The slower second pass runs only for the others: invalid
ones, and those that set an unsupported parameter to a value that means it is not used.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from triptych.api.content import (
    CONTENT_TYPES,
    PARTS,
    PAYLOADS,
    AudioFormat,
    MediaSlices,
    RawBody,
    extract_media,
)
from triptych.api.requests import GenerateSampling
from triptych.api.restore import restore_objects
from triptych.api.structured import FormatType
from triptych.errors import (
    InvalidJSON,
    InvalidValue,
    TriptychError,
    UnsupportedParameter,
)

EXPLAIN_BYTES = 64 << 10  # a larger bad body gets a shorter explanation
MAX_QUOTED_NAME = 64  # characters of a client's own words that an error quotes
MAX_LISTED = 16  # ignored parameters that a response header names
IGNORED_HEADER = "x-triptych-ignored-parameters"
MIN_SIMILARITY = 0.75  # of a parameter that an error suggests
MAX_DIGITS = 30  # no parameter takes an integer with more
_HUGE = int("9" * MAX_DIGITS)

_LOCATED = re.compile(r"^(.*?)(?: - at (`key` in )?`\$\.?(.*?)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `([^`]*)`( [<>].*| of length .*)?(?:, got `([^`]*)`)?")
_CONTENT_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]")
_INDEX = re.compile(r"\[\d+\]")
_NOT_UTF8 = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff|\0|.\0", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}

T = TypeVar("T", bound=Struct)


def decode_request(
    body: RawBody,
    decoder: msgspec.json.Decoder[T],
    size: int,
    max_bytes: int,
    max_items: int,
    ignored: list[str] | None = None,
) -> tuple[T, MediaSlices]:
    """The request in the first ``size`` bytes, and the media that were extracted from it.

    There may be ``max_items`` of these. The rest may have ``max_bytes``: to decode more would block
    the event loop for too long. ``ignored`` receives the names of unknown parameters, which are
    left out; None: they are refused.
    """
    text, slices = extract_media(body, size, max_bytes, max_items)
    try:
        request = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        request = _decode_leniently(bytes(text), decoder.type, error, ignored)
    if slices:
        restore_objects(request, slices, len(text), max_bytes)
    return request, slices


def _decode_leniently(
    text: bytes, struct: type[T], error: Exception, ignored: list[str] | None
) -> T:
    """Leave out unused parameters and try again; else say what is wrong, and where."""
    tree = _parse(text, struct, error)
    if not isinstance(error, msgspec.ValidationError):
        raise InvalidJSON(f"The body is not valid JSON: {error}.")
    tree = _drop_unused(tree, struct)
    unknown = (
        tree.keys() - set(struct.__struct_fields__) - getattr(struct, "UNSUPPORTED", {}).keys()
    )
    if unknown:
        tree = _drop_unknown(tree, unknown, ignored)
    if isinstance(sampling := tree.get("sampling_params"), dict):
        tree["sampling_params"] = _drop_unused(sampling, GenerateSampling)
    if isinstance(messages := tree.get("messages"), list):
        tree["messages"] = [_drop_in_message(m) if isinstance(m, dict) else m for m in messages]
    try:
        return msgspec.convert(tree, struct, str_keys=True)
    except msgspec.ValidationError as why:
        raise _explain(str(why), struct) from None


def convert_form(fields: dict[str, str], struct: type[T]) -> T:
    """The text fields of a form as a struct; their texts are read as numbers where it has some."""
    try:
        return msgspec.convert(_drop_unused(fields, struct), struct, strict=False)
    except msgspec.ValidationError as why:
        raise _explain(str(why), struct) from None


def _parse(text: bytes, struct: type[Struct], error: Exception) -> dict[str, Any]:
    small = len(text) <= EXPLAIN_BYTES
    if _NOT_UTF8.match(text):
        raise InvalidJSON("The body must be UTF-8, without a byte order mark.")
    try:
        tree = _parse_small(text) if small else msgspec.json.decode(text)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidJSON("The body is not valid UTF-8.") from None
    except msgspec.ValidationError:  # JSON with a number that is too large,
        raise _explain(str(error), struct) from None  # as the first pass has found
    except ValueError as why:
        raise InvalidJSON(f"The body is not valid JSON: {why}.") from None
    if not isinstance(tree, dict):
        raise InvalidValue("The body must be a JSON object.")
    if small:
        _check_finite(tree)
    return tree


def _parse_small(text: bytes) -> Any:
    """Parse JSON, without halves of surrogate pairs: ``json.loads`` takes these."""
    tree = json.loads(text.decode(), parse_int=_integer)
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidJSON(
            "A string has half a surrogate pair (as in \\ud83d alone), which is not a character."
        ) from None
    return tree


def _integer(digits: str) -> int:
    """Clamp long integers: parsing them is slow, and no parameter takes them."""
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    return -_HUGE if digits.startswith("-") else _HUGE


def _check_finite(tree: dict[str, Any]) -> None:
    """Refuse NaN and Infinity: JSON has neither, but ``json.loads`` takes them."""
    stack: list[tuple[str, Any]] = [(_short(name), value) for name, value in tree.items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidValue(f"'{path}' is not a finite number.", param=path)
        if isinstance(value, dict):
            stack += [(f"{path}.{_short(name)}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]


def _drop_unused(members: dict[str, Any], struct: type[Struct]) -> dict[str, Any]:
    """Drop known parameters that are null, and unsupported ones with a value that means unused."""
    unsupported = getattr(struct, "UNSUPPORTED", {})
    known = {*struct.__struct_fields__, *unsupported}
    return {
        name: value
        for name, value in members.items()
        if not (name in known and (value is None or _one_of(value, unsupported.get(name, ()))))
    }


def _drop_unknown(
    members: dict[str, Any], unknown: set[str], ignored: list[str] | None
) -> dict[str, Any]:
    """Drop unknown parameters that are null, and if the server ignores them, the others too."""
    if ignored is not None:
        ignored += [name for name in members if name in unknown and members[name] is not None]
        return {name: value for name, value in members.items() if name not in unknown}
    return {n: value for n, value in members.items() if value is not None or n not in unknown}


def name_ignored(names: Sequence[str]) -> bytes:
    """The header that lists ignored parameters: few enough of them, in safe characters."""
    listed = ", ".join(_UNSAFE.sub("_", name[:MAX_QUOTED_NAME]) for name in names[:MAX_LISTED])
    more = ", ..." if len(names) > MAX_LISTED else ""
    return f"{IGNORED_HEADER}: {listed}{more}\r\n".encode()


def _drop_in_message(message: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls in the content parts of a message."""
    if isinstance(content := message.get("content"), list):
        message["content"] = [_drop_in_part(p) if isinstance(p, dict) else p for p in content]
    return message


def _drop_in_part(part: dict[str, Any]) -> dict[str, Any]:
    """Drop members that parts of its type do not have, but no other payload: that is refused."""
    type = part.get("type")
    struct = PARTS.get(type) if isinstance(type, str) else None
    if struct is None:
        return part
    known = ("type", *struct.__struct_fields__)
    return {
        name: _drop_in_payload(name, value)
        for name, value in part.items()
        if name in known or (value is not None and (name in CONTENT_TYPES or name in PAYLOADS))
    }


def _drop_in_payload(name: str, value: Any) -> Any:
    payload = PAYLOADS.get(name)
    if payload is None or not isinstance(value, dict):
        return value
    return {inner: value[inner] for inner in payload.__struct_fields__ if inner in value}


def _one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


def _explain(message: str, struct: type[Struct]) -> TriptychError:
    """A validation message of msgspec as an error for the client.

    ``ALLOWED`` of a struct lists the values of its members whose types name them, by place.
    """
    match = _LOCATED.match(message)
    assert match is not None, "it matches anything"
    what, key, path = match[1], match[2], match[3] or ""
    path, inside, _ = path.partition("[...]")
    if allowed := getattr(struct, "ALLOWED", None):
        if (values := allowed.get(_INDEX.sub("", path))) and not _EXPECTED.fullmatch(what):
            return InvalidValue(f"'{path}' must be {_alternatives(values)}.", param=path)
    elif _CONTENT_PART.fullmatch(path) and (why := _explain_part(what)):
        return InvalidValue(f"'{path}' {why}.", param=path)
    if unknown := _UNKNOWN.fullmatch(what):
        return _explain_unknown(_short(unknown[1]), path, struct)
    if missing := _MISSING.fullmatch(what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidValue(f"The parameter '{param}' is missing.", param=param)
    if allowed is not None:
        return _explain_other(what, path, bool(key), bool(inside))
    if path == "response_format.type":
        types = ", ".join(get_args(FormatType))
        return InvalidValue(f"'{path}' must be one of {types}.", param=path)
    if path.endswith(".type") and (path.startswith("tool") or ".tool_calls[" in path):
        return InvalidValue(f"'{path}' must be function.", param=path)
    if path.endswith(".type"):  # an unknown type: name the part
        path = path.removesuffix(".type")
        return InvalidValue(f"The type of '{path}' must be {', '.join(CONTENT_TYPES)}.", param=path)
    if path.endswith(".role"):
        return InvalidValue(
            f"'{path}' must be system, developer, user, assistant or tool.", param=path
        )
    if path.endswith(".input_audio.format"):
        formats = ", ".join(get_args(AudioFormat))
        return InvalidValue(f"'{path}' must be one of {formats}.", param=path)
    return _explain_other(what, path, bool(key), bool(inside))


def _explain_unknown(name: str, path: str, struct: type[Struct]) -> UnsupportedParameter:
    """Tell parameters that are known and not supported from those that may be misspelled."""
    param = f"{path}.{name}" if path else name
    owner = GenerateSampling if path == "sampling_params" else struct
    why = f"The parameter '{param}' is unknown or not supported."
    if not path or owner is GenerateSampling:
        similar = difflib.get_close_matches(name, owner.__struct_fields__, 1, MIN_SIMILARITY)
        if name in getattr(owner, "UNSUPPORTED", {}):
            why = f"The parameter '{param}' is not supported."
        elif similar:
            why = f"There is no parameter '{param}'. Did you mean {similar[0]}?"
    return UnsupportedParameter(why, param=param)


def _explain_other(what: str, path: str, key: bool, inside: bool) -> TriptychError:
    subject = f"'{path}'" if path else "The body"
    if key or inside:
        subject = f"A {'key' if key else 'value'} of {subject}"
    return InvalidValue(f"{subject} {_in_words(what)}.", param=path or None)


def _explain_part(what: str) -> str:
    """What is wrong with a content part: it lacks its type or payload, or has another's payload."""
    if (missing := _MISSING.fullmatch(what)) and missing[1] in ("type", *CONTENT_TYPES):
        return f"has no {missing[1]}"
    if (unknown := _UNKNOWN.fullmatch(what)) and unknown[1] in (*CONTENT_TYPES, *PAYLOADS):
        return f"has '{unknown[1]}', which is not for its type: a part has one payload"
    return ""


def _in_words(what: str) -> str:
    """The message of the decoder, without the names of Python's types."""
    if match := _EXPECTED.fullmatch(what):
        kinds = [_TYPE_NAMES.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
        got = f", not {_TYPE_NAMES.get(match[3], match[3])}" if match[3] else ""
        return f"must be {' or '.join(kinds)}{match[2] or ''}{got}"
    return "is too large" if what.endswith("out of range") else f"is wrong: {_short(what)}"


def _alternatives(values: Sequence[str]) -> str:
    *first, last = values
    return f"{', '.join(first)} or {last}" if first else last


def _short(text: str) -> str:
    return text if len(text) <= MAX_QUOTED_NAME else text[:MAX_QUOTED_NAME] + "…"
