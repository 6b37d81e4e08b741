"""The data URLs in the raw bytes of a body.

Their base64 is cut out before the JSON is decoded, so that a megabyte of picture is neither scanned
as JSON nor copied as a string; a short mark stands in its place. What the JSON says is for others.
"""

from __future__ import annotations

import re
import secrets

import pybase64

from triptych.errors import InvalidDataURL, UnsupportedMediaType

LONGEST_KIND = 64  # characters of a media type that are said back

_KEY = b'"url"'
_VALUE = re.compile(rb'\s*:\s*"(?=data:)')
_PREFIX = re.compile(rb"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_MARK = f"slice:{secrets.token_hex(8)}:"  # a client can't write it

Slices = list[memoryview]


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
            f"The data URL holds {kind[:LONGEST_KIND].decode()}, but this part takes images.",
            param=param,
        )
    try:
        data: bytes = pybase64.b64decode(memoryview(source)[prefix.end() :], validate=True)
    except ValueError:
        raise InvalidDataURL("The data URL's base64 is not valid.", param=param) from None
    return data
