"""The media in the raw bytes of a body.

Base64 is cut out before the JSON is decoded, so that a megabyte of picture is neither scanned as
JSON nor copied as a string; a short mark stands in its place. What the JSON says is for others.
"""

from __future__ import annotations

import mmap
import re
import secrets

import pybase64

from triptych.errors import InvalidDataURL, UnsupportedMediaType
from triptych.messages import Form, Kind
from triptych.processor.prompt import PLURAL

LONG = 4096  # characters of bare base64 that are worth a cut
PIECE = 1 << 20  # bytes
LONGEST_KIND = 64  # characters of a media type that are said back

_URL = b'"url"'
_DATA_URL = re.compile(rb'\s*:\s*"(?=data:)')
_BARE = (b'"data"', b'_embeds"')  # members whose strings are base64 and nothing else
_STRING = re.compile(rb'\s*:\s*"')
_PREFIX = re.compile(rb"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_MARK = f"slice:{secrets.token_hex(8)}:"  # a client can't write it

Raw = bytes | bytearray | mmap.mmap
Slices = list[memoryview]


def cut(raw: Raw, size: int) -> tuple[memoryview, Slices]:
    """Replace data URLs of ``"url"`` members, and long strings of those that hold base64, by marks.

    In valid JSON an unescaped ``"url"`` before a colon is a member's name, wherever it stands.
    A value with an escape in it other than ``\\/`` is left for the JSON decoder.
    """
    slices: Slices = []
    text = raw
    if _find(text, _URL, 0, size) >= 0:
        text, size = _cut(text, size, _URL, _DATA_URL, 0, slices)
    for key in _BARE:  # in what is left, which is little where pictures were
        if _find(text, key, 0, size) >= 0:
            text, size = _cut(text, size, key, _STRING, LONG, slices)
    return memoryview(text)[:size], slices


def _cut(
    raw: Raw, size: int, key: bytes, value: re.Pattern[bytes], least: int, slices: Slices
) -> tuple[Raw, int]:
    """The text with marks for the values of this key, and its new size."""
    pieces: list[bytes | memoryview] = []
    view = memoryview(raw)
    kept = at = 0
    while (at := _find(raw, key, at, size)) >= 0:
        match = value.match(raw, at + len(key), size)
        if match is None or raw[at - 1 : at] == b"\\":
            at += len(key)
            continue
        start = match.end()
        end = raw.find(b'"', start, size)
        if end < 0:
            break
        if end - start < least:
            at = start
            continue
        found = view[start:end]
        at = end + 1
        if raw.find(b"\\", start, end) >= 0:
            found = memoryview(bytes(found).replace(b"\\/", b"/"))
            if b"\\" in bytes(found):
                at = start
                continue
        pieces += (view[kept:start], f"{_MARK}{len(slices)}".encode())
        slices.append(found)
        kept = end
    if not pieces:
        return raw, size
    pieces.append(view[kept:size])
    whole = b"".join(pieces)
    return whole, len(whole)


def _find(raw: Raw, what: bytes, start: int, end: int) -> int:
    """As ``find``: of a map it is slow for more than one byte, so there a piece after the other."""
    if not isinstance(raw, mmap.mmap):
        return raw.find(what, start, end)
    while start < end:
        piece = raw[start : min(end, start + PIECE + len(what) - 1)]
        if (found := piece.find(what)) >= 0:
            return start + found
        start += PIECE
    return -1


def is_data_url(url: str) -> bool:
    return url.startswith(_MARK) or url[:5].lower() == "data:"


def media(url: str, slices: Slices, kind: Kind, form: Form, param: str) -> bytes:
    """The bytes of a data URL, whose media type must fit the part that it is in."""
    source = _whole(url, slices)
    prefix = _PREFIX.match(source)
    if prefix is None:
        raise InvalidDataURL(f"Write data URLs as data:{_EXAMPLE[kind]};base64,...", param=param)
    if (given := prefix[1]) is not None and not _fits(given.lower(), kind, form):
        taken = PLURAL[kind] if form == "file" else "safetensors"
        raise UnsupportedMediaType(
            f"The data URL holds {given[:LONGEST_KIND].decode()}, but this part takes {taken}.",
            param=param,
        )
    return _decoded(memoryview(source)[prefix.end() :], "The data URL's base64", param)


def base64(text: str, slices: Slices, param: str) -> bytes:
    """The bytes of a string that is base64 and nothing else."""
    return _decoded(memoryview(_whole(text, slices)), "The base64", param)


_EXAMPLE: dict[Kind, str] = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}


def _whole(text: str, slices: Slices) -> bytes | memoryview:
    return slices[int(text[len(_MARK) :])] if text.startswith(_MARK) else text.encode()


def _fits(given: bytes, kind: Kind, form: Form) -> bool:
    if form != "file":
        return given.startswith(b"application/")
    return given.startswith(kind.encode() + b"/") or given == b"application/octet-stream"


def _decoded(source: memoryview, what: str, param: str) -> bytes:
    try:
        data: bytes = pybase64.b64decode(source, validate=True)
    except ValueError:
        raise InvalidDataURL(f"{what} is not valid.", param=param) from None
    return data
