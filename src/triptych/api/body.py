"""The media in the raw bytes of a body.

Base64 is cut out before the JSON is decoded, so that a megabyte of picture is neither scanned as
JSON nor copied as a string; a short mark stands in its place. What the JSON says is for others.
"""

from __future__ import annotations

import mmap
import re
import secrets

import pybase64

from triptych.errors import (
    InvalidDataURL,
    PayloadTooLarge,
    TooManyMedia,
    UnsupportedMediaType,
)
from triptych.messages import MediaForm, MediaKind
from triptych.prompt.processor import PLURALS

LONG = 4096  # characters of bare base64 that are worth a cut
PIECE = 256 << 10  # bytes that are looked at in one stroke: others may run after each
FIRST = 4096  # bytes that are looked at first, where base64 may follow soon; then ever more
NEAR = 256  # bytes in which a name, its colon and how its value begins must stand
MISSES = 4096  # names without a value to cut; after so many the rest is left as it is
LONGEST_KIND = 64  # characters of a media type that are said back

_SPACE = rb"[ \t\r\n]{0,100}+"  # where more stands, the JSON decoder reads the value
_STRING = re.compile(_SPACE + rb":" + _SPACE + rb'"')
_DATA_URL = re.compile(_STRING.pattern + rb"(?=data:)")
_NAMES = {  # of members that hold media: how a value begins, and from which length it is cut
    b'"url"': (_DATA_URL, 0),
    b'"data"': (_STRING, LONG),  # this and the next are base64 and nothing else
    b'_embeds"': (_STRING, LONG),
}
_ESCAPE = re.compile(rb"\\(?!/)")  # other than of a slash
_PREFIX = re.compile(rb"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_MARK = f"slice:{secrets.token_hex(8)}:"  # a client can't write it

RawBody = bytes | bytearray | mmap.mmap
MediaSlices = list[memoryview]


def extract_media(raw: RawBody, size: int, most: int, items: int) -> tuple[memoryview, MediaSlices]:
    """Replace data URLs of ``"url"`` members, and long strings of those that hold base64, by marks.

    In valid JSON an unescaped ``"url"`` before a colon is a member's name, wherever it stands.
    A value with an escape in it other than ``\\/`` is left for the JSON decoder. What is left may
    have ``most`` bytes, and there may be as many values as ``items``: the first too many is refused
    as soon as it is seen. Every byte is looked at a few times at most, whatever the body says.
    """
    view = memoryview(raw)[:size]
    if size <= PIECE:  # as nearly all chats
        for name in _NAMES:
            if raw.find(name, 0, size) >= 0:
                break
        else:
            _check(size, most)
            return view, []
    return MediaExtractor(raw, view, most, items).cut()


class MediaExtractor:
    """Goes through one body, and keeps what is between its media."""

    def __init__(self, raw: RawBody, view: memoryview, most: int, items: int) -> None:
        self._raw = raw
        self._view = view
        self._most = most
        self._items = items
        self._slices: MediaSlices = []
        self._pieces: list[bytes | memoryview] = []
        self._uncut = 0  # bytes of these
        self._kept = 0  # what comes before is in them, or was cut
        self._misses = 0

    def cut(self) -> tuple[memoryview, MediaSlices]:
        at, size, step = 0, len(self._view), FIRST
        while at < size and self._misses < MISSES:
            end = min(at + step, size)
            at = self._piece(at, end, size)
            step = FIRST if at > end else min(2 * step, PIECE)
            _check(self._uncut + at - self._kept, self._most)
        _check(self._uncut + size - self._kept, self._most)
        if not self._slices:
            return self._view, self._slices
        self._pieces.append(self._view[self._kept :])
        return memoryview(b"".join(self._pieces)), self._slices

    def _piece(self, at: int, end: int, size: int) -> int:
        """Cut what begins in one piece, and tell where the next one begins."""
        begin = max(0, at - 1)  # a backslash may stand there
        piece = self._raw[begin:end]
        sure = size if end == size else end - NEAR  # names from here on are for the next piece
        names = dict.fromkeys(_NAMES, -1)
        while at < sure and self._misses < MISSES:
            for name, found in names.items():
                if found < at:
                    found = piece.find(name, at - begin)
                    names[name] = size if found < 0 else begin + found
            name = min(names, key=names.__getitem__)
            at = names[name]
            if at >= sure:
                return sure
            value, least = _NAMES[name]
            match = value.match(piece, at - begin + len(name))
            if match is None or piece[at - begin - 1 : at - begin] == b"\\":
                self._misses += 1
                at += len(name)
            else:
                at = self._value(begin + match.end(), least, size)
        return at

    def _value(self, start: int, least: int, size: int) -> int:
        """Cut one value out if that can be done, and tell where to go on."""
        end, escaped = _end(self._raw, start, size)
        if escaped is None or end - start < least:
            self._misses += 1
            return end
        if len(self._slices) == self._items:
            raise TooManyMedia(
                f"The request has more media items than the limit of {self._items}.",
                param="messages",
            )
        mark = f"{_MARK}{len(self._slices)}".encode()
        found = self._view[start:end]
        self._slices.append(memoryview(_unescaped(found)) if escaped else found)
        self._pieces += (self._view[self._kept : start], mark)
        self._uncut += start - self._kept + len(mark)
        self._kept = end
        return end


def _end(raw: RawBody, start: int, size: int) -> tuple[int, bool | None]:
    """Where a string ends, and whether slashes in it are escaped. None: it can't be cut."""
    escaped, step = False, FIRST
    while start < size:
        piece = raw[start : min(start + step, size)]
        end = piece.find(b'"')
        if end >= 0:
            piece = piece[:end]
        elif piece.endswith(b"\\"):
            piece = piece[:-1] or b"\\"  # what it escapes is in the next one, if any
        if b"\\" in piece:
            if _ESCAPE.search(piece):
                return start + len(piece), None
            escaped = True
        start += len(piece)
        if end >= 0:
            return start, escaped
        step = min(2 * step, PIECE)
    return size, None


def _unescaped(value: memoryview) -> bytes:
    """Without its backslashes, which are all before slashes. In strokes, so that others may run."""
    strokes = range(0, len(value), PIECE)
    return b"".join([bytes(value[at : at + PIECE]).translate(None, b"\\") for at in strokes])


def _check(uncut: int, most: int) -> None:
    if uncut > most:
        raise PayloadTooLarge(
            f"Without its media the body has {uncut} bytes or more; the limit is {most}."
        )


def is_data_url(url: str) -> bool:
    return url.startswith(_MARK) or url[:5].lower() == "data:"


def decode_data_url(
    url: str, slices: MediaSlices, kind: MediaKind, form: MediaForm, param: str
) -> bytes:
    """The bytes of a data URL, whose media type must fit the part that it is in."""
    source = _whole(url, slices)
    prefix = _PREFIX.match(source)
    if prefix is None:
        raise InvalidDataURL(f"Write data URLs as data:{_EXAMPLE[kind]};base64,...", param=param)
    if (given := prefix[1]) is not None and not _fits(given.lower(), kind, form):
        taken = PLURALS[kind] if form == "file" else "safetensors"
        raise UnsupportedMediaType(
            f"The data URL holds {given[:LONGEST_KIND].decode()}, but this part takes {taken}.",
            param=param,
        )
    return _decoded(memoryview(source)[prefix.end() :], "The data URL's base64", param)


def decode_base64(text: str, slices: MediaSlices, param: str) -> bytes:
    """The bytes of a string that is base64 and nothing else."""
    return _decoded(memoryview(_whole(text, slices)), "The base64", param)


_EXAMPLE: dict[MediaKind, str] = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}


def _whole(text: str, slices: MediaSlices) -> bytes | memoryview:
    return slices[int(text[len(_MARK) :])] if text.startswith(_MARK) else text.encode()


def _fits(given: bytes, kind: MediaKind, form: MediaForm) -> bool:
    if form != "file":
        return given.startswith(b"application/")
    return given.startswith(kind.encode() + b"/") or given == b"application/octet-stream"


def _decoded(source: memoryview, what: str, param: str) -> bytes:
    try:
        data: bytes = pybase64.b64decode(source, validate=True)
    except ValueError:
        raise InvalidDataURL(f"{what} is not valid.", param=param) from None
    return data
