"""From the raw bytes of a body to a typed request, and from what is wrong to an error that says so.

The base64 of data URLs is cut out of the raw bytes before the JSON is decoded, so that a megabyte
of picture is neither scanned as JSON nor copied as a string; a short mark stands in its place.
The way of a good request is short; what is slow here runs only for bad ones.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from bisect import bisect_left
from typing import Any, TypeVar

import msgspec
import pybase64
from msgspec import Struct

from triptych.errors import (
    InvalidDataURL,
    InvalidJSON,
    InvalidValue,
    PayloadTooLarge,
    TriptychError,
    UnsupportedMediaType,
    UnsupportedParameter,
)

JSON_BYTES = 8 << 20  # of a body without its data URLs: decoding more would stall everyone
EXPLAIN_BYTES = 64 << 10  # a larger bad body gets a shorter explanation

_KEY = b'"url"'
_VALUE = re.compile(rb'\s*:\s*"(?=data:)')
_PREFIX = re.compile(rb"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_MARK = f"slice:{secrets.token_hex(8)}:"  # a client can't write it
_AT = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*?)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)

T = TypeVar("T", bound=Struct)
Slices = list[memoryview]


def decode(
    body: bytes | bytearray, decoder: msgspec.json.Decoder[T], size: int | None = None
) -> tuple[T, Slices]:
    """The request in the first ``size`` bytes, and the data URLs that were cut out of it."""
    text, slices = cut(body, len(body) if size is None else size)
    if len(text) > JSON_BYTES:
        raise PayloadTooLarge(
            f"Without its data URLs the body has {len(text)} bytes; the limit is {JSON_BYTES}."
        )
    try:
        return decoder.decode(text), slices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _again(bytes(text), decoder.type, error), slices


def cut(raw: bytes | bytearray, size: int) -> tuple[bytes | memoryview, Slices]:
    """Replace the data URLs of ``"url"`` members by marks.

    In valid JSON an unescaped ``"url"`` before a colon is a member's name, wherever it stands.
    A value with an escape in it other than ``\\/`` is left for the JSON decoder.
    """
    pieces: list[bytes | memoryview] = []
    slices: Slices = []
    view = memoryview(raw)[:size]
    kept = at = 0
    while (at := raw.find(_KEY, at, size)) >= 0:
        match = _VALUE.match(raw, at + len(_KEY), size)
        if match is None or raw[at - 1 : at] == b"\\":
            at += len(_KEY)
            continue
        start = match.end()
        end = raw.find(b'"', start, size)
        if end < 0:
            break
        value = view[start:end]
        at = end + 1
        if raw.find(b"\\", start, end) >= 0:
            value = memoryview(bytes(value).replace(b"\\/", b"/"))
            if b"\\" in bytes(value):
                at = start
                continue
        pieces += (view[kept:start], f"{_MARK}{len(slices)}".encode())
        slices.append(value)
        kept = end
    if not slices:
        return view, slices
    pieces.append(view[kept:])
    return b"".join(pieces), slices


def is_data_url(url: str) -> bool:
    return url.startswith(_MARK) or url[:5].lower() == "data:"


def media(url: str, slices: Slices, param: str) -> bytes:
    """The bytes of a data URL."""
    source: bytes | memoryview
    source = slices[int(url[len(_MARK) :])] if url.startswith(_MARK) else url.encode()
    prefix = _PREFIX.match(source)
    if prefix is None:
        raise InvalidDataURL("Write data URLs as data:image/jpeg;base64,...", param=param)
    kind = (prefix[1] or b"image/*").lower()
    if not kind.startswith(b"image/") and kind != b"application/octet-stream":
        raise UnsupportedMediaType(
            f"The data URL holds {kind.decode()}, but this part takes images.", param=param
        )
    try:
        data: bytes = pybase64.b64decode(memoryview(source)[prefix.end() :], validate=True)
    except ValueError:
        raise InvalidDataURL("The data URL's base64 is not valid.", param=param) from None
    return data


def _again(text: bytes, kind: type[T], error: Exception) -> T:
    """A second, slower look: null means absent; else say what is wrong, and where."""
    small = len(text) <= EXPLAIN_BYTES
    try:
        tree = json.loads(text) if small else msgspec.json.decode(text)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None
    except ValueError as why:
        raise InvalidJSON(f"The body is not valid JSON: {why}.") from None
    if not isinstance(tree, dict):
        raise InvalidValue("The body must be a JSON object.")
    if small:
        _finite(tree)
    if not isinstance(error, msgspec.ValidationError):
        raise InvalidJSON(f"The body is not valid JSON: {error}.")
    tree = _without_null(tree)
    if isinstance(messages := tree.get("messages"), list):
        tree["messages"] = [_without_null(m) if isinstance(m, dict) else m for m in messages]
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as why:
        raise _named(str(why), _indices(tree, kind, str(why)) if small else []) from None


def _without_null(level: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in level.items() if value is not None}


def _finite(tree: dict[str, Any]) -> None:
    """JSON has no NaN and no infinity, but its writers do."""
    stack: list[tuple[str, Any]] = [*tree.items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidValue(f"'{path}' is not a finite number.", param=path)
        if isinstance(value, dict):
            stack += [(f"{path}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]


def _indices(tree: Any, kind: type[Struct], message: str) -> list[int]:
    """Which elements of the lists on the way to the error are meant: msgspec does not say.

    It stops at the first bad element, so the shortest beginning of a list that still fails ends
    with it. The lists of ``tree`` are cut down on the way.
    """
    indices: list[int] = []
    match = _AT.match(message)
    level = tree
    for names in ((match and match[2]) or "").split("[...]")[:-1]:
        for name in filter(None, names.split(".")):
            level = level[name]
        if not isinstance(level, list):
            break
        whole = level[:]

        def fails(count: int, level: list[Any] = level, whole: list[Any] = whole) -> bool:
            level[:] = whole[:count]
            return _fails(tree, kind, message)

        index = bisect_left(range(1, len(whole) + 1), True, key=fails)
        if index == len(whole):
            break
        indices.append(index)
        level[:] = [whole[index]]
        level = whole[index]
    return indices


def _fails(tree: Any, kind: type[Struct], message: str) -> bool:
    try:
        msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        return str(error) == message
    return False


def _named(message: str, indices: list[int]) -> TriptychError:
    """The error that a validation message stands for."""
    match = _AT.match(message)
    what, path = (match[1], match[2] or "") if match else (message, "")
    for index in indices:
        path = path.replace("[...]", f"[{index}]", 1)
    path = path.partition("[...]")[0]
    if unknown := _UNKNOWN.fullmatch(what):
        param = f"{path}.{unknown[1]}" if path else unknown[1]
        return UnsupportedParameter(f"The parameter '{param}' is not supported.", param=param)
    if missing := _MISSING.fullmatch(what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidValue(f"The parameter '{param}' is missing.", param=param)
    if path.endswith(".type"):
        path = path.removesuffix(".type")  # a kind of part that is not known: name the part
    where = f" in '{path}'" if path else ""
    return InvalidValue(f"{what}{where}.", param=path or None)
