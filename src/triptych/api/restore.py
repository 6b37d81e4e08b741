"""Puts back the strings that ``extract_media`` took out of values that are not about media.

Extraction knows only the names of members, and the arguments of a tool call or a JSON schema may
have a ``url`` too. Typed members of these names hold media in every request; all others are inside
of objects that a client fills as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Struct

from triptych.api.content import MARKER, MediaSlices, check_rest
from triptych.errors import InvalidJSON


def restore_objects(request: Struct, slices: MediaSlices, size: int, max_bytes: int) -> None:
    """Restore strings in the request's free objects. With these the rest of the body, which has
    ``size`` bytes, may have ``max_bytes``."""
    for members in _free_objects(request):
        text = _encode(members)
        found = {marker: slices.get(marker.decode()) for marker in MARKER.findall(text)}
        strings = {marker: string for marker, string in found.items() if string is not None}
        if not strings:
            continue
        size += sum(map(len, strings.values()))
        check_rest(size, max_bytes)
        restored = _decode(_insert(text, strings))
        members.clear()
        members.update(restored)


def _insert(text: bytes, strings: dict[bytes, memoryview]) -> bytes:
    """Extracted strings have no escapes: they are JSON as they stand."""
    return MARKER.sub(lambda m: b'"%b"' % bytes(strings[m[1]]) if m[1] in strings else m[0], text)


def _encode(members: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(members)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidJSON("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as why:
        raise InvalidJSON(f"The body is not valid JSON: {why}.") from None


def _free_objects(request: Struct) -> Iterator[dict[str, Any]]:
    """The objects of a request that no struct describes."""
    stack: list[Any] = [request]
    while stack:
        match stack.pop():
            case dict() as members:
                yield members
            case list() as items:
                stack += items
            case Struct() as struct:
                stack += [getattr(struct, name) for name in _free_fields(type(struct))]


@lru_cache(maxsize=256)
def _free_fields(struct: type[Struct]) -> tuple[str, ...]:
    """The fields in which such objects may be: content, most of a request, has none."""
    return _fields_with_objects(struct, frozenset())


def _fields_with_objects(struct: type[Struct], outer: frozenset[type]) -> tuple[str, ...]:
    fields = msgspec.structs.fields(struct)
    return tuple(f.name for f in fields if _may_hold_object(f.type, outer | {struct}))


def _may_hold_object(annotation: Any, outer: frozenset[type]) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation in outer or bool(_fields_with_objects(annotation, outer))
    if annotation is Any or get_origin(annotation) is dict:
        return True
    return any(_may_hold_object(inner, outer) for inner in get_args(annotation))
