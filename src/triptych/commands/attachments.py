"""Files that a person names: as a word of a command line, or inside a line of text.

A terminal writes the path of a file that is dropped on it, quoted or with escaped spaces. Only
names of media files count: any other word stays text. Does not know a conversation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from triptych.commands.client import MediaInput, is_url
from triptych.errors import StartError
from triptych.messages import MediaKind

_SUFFIXES: dict[str, MediaKind] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"), "image"),
    **dict.fromkeys(("heic", "heif", "avif"), "image"),
    **dict.fromkeys(("mp4", "m4v", "mov", "webm", "mkv", "avi"), "video"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "oga", "opus", "m4a", "aac"), "audio"),
}
_CONTENTS: tuple[tuple[int, bytes, MediaKind], ...] = (  # offset, bytes there
    (0, b"\x89PNG", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"GIF8", "image"),
    (8, b"WEBP", "image"),
    (4, b"ftypavi", "image"),  # AVIF
    (4, b"ftyphei", "image"),
    (4, b"ftypmif1", "image"),
    (4, b"ftypM4A", "audio"),
    (8, b"WAVE", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"ID3", "audio"),
    (8, b"AVI ", "video"),
)
_CONTAINERS: tuple[tuple[int, bytes, MediaKind], ...] = (  # of sounds and of clips; the usual use
    (4, b"ftyp", "video"),
    (0, b"\x1a\x45\xdf\xa3", "video"),
    (0, b"OggS", "audio"),
)
_HEAD_BYTES = 16
_CLOSING = "?!.,;:)"  # may follow a name in a sentence
_WORD = re.compile(
    rf"""(?<!\S)(?:"(?P<double>[^"\n]+)"(?=[{_CLOSING}]*(?:\s|$))"""
    rf"""|'(?P<single>[^'\n]+)'(?=[{_CLOSING}]*(?:\s|$))"""
    r"""|(?P<plain>(?:\\.|[^\s\\])+))"""
)


class NamedFiles(Struct, frozen=True):
    """A line of text and the files that it names."""

    content: tuple[str | MediaInput, ...]  # in the order of the prompt; texts are not empty
    missing: tuple[str, ...] = ()  # words with the suffix of a media file that is not there


def find_files(line: str) -> NamedFiles:
    """Split a line. Files that stand inside a sentence keep their place; else they come first."""
    whole = _find(line.strip())
    if whole is not None:  # also with spaces that nobody has escaped
        return NamedFiles((whole,))
    pieces: list[str | MediaInput] = []
    missing: list[str] = []
    end = 0
    for word in _WORD.finditer(line):
        name = word["double"] or word["single"] or re.sub(r"\\(.)", r"\1", word["plain"])
        after = word.end()
        found = _find(name)
        if found is None and word["plain"] and name != (bare := name.rstrip(_CLOSING)):
            after -= len(name) - len(bare)
            name, found = bare, _find(bare)
        if found is not None:
            pieces += [line[end : word.start()], found]
            end = after
        elif _suffix_kind(name) is not None and not is_url(name):
            missing.append(name)
    return NamedFiles(_arrange([*pieces, line[end:]]), tuple(missing))


def _find(name: str) -> MediaInput | None:
    """The media file of this name. A word is a name if it has a slash or a known suffix."""
    if not name or "\n" in name or ("/" not in name and _suffix_kind(name) is None):
        return None
    path = _local_path(name)
    kind = file_kind(path)
    return MediaInput(kind, str(path), flagged=False) if kind else None


def _local_path(name: str) -> Path:
    if name.startswith("file:///"):  # as some terminals write a dropped file
        name = unquote(urlsplit(name).path)
    return Path(os.path.expanduser(name))


def _arrange(pieces: list[str | MediaInput]) -> tuple[str | MediaInput, ...]:
    kept: list[str | MediaInput] = []
    for piece in [one for one in map(_strip, pieces) if one]:
        texts = [at for at, one in enumerate(kept) if isinstance(one, str)]
        if isinstance(piece, str) and texts and not piece.strip(_CLOSING):
            kept[texts[-1]] = f"{kept[texts[-1]]}{piece}"  # `What is in cat.png?`
        else:
            kept.append(piece)
    if sum(isinstance(piece, str) for piece in kept) > 1:
        return tuple(kept)
    return tuple(sorted(kept, key=lambda piece: isinstance(piece, str)))


def _strip(piece: str | MediaInput) -> str | MediaInput:
    return piece.strip() if isinstance(piece, str) else piece


def media_input(source: str) -> MediaInput:
    """A file or a URL that was named without its kind. Raises StartError if nothing says it."""
    medium = MediaInput(source_kind(source) or "image", source, flagged=False)
    if source_kind(source) is None:
        medium.part()  # raises if there is no such file
        raise StartError(
            f"{medium.name}: neither name nor content say whether it is an image, a video or audio"
        )
    return medium


def names_file(word: str) -> bool:
    """Whether a whole word of a command line names a media file or its URL, and is not a text."""
    if is_url(word):
        return not re.search(r"\s", word) and source_kind(word) is not None
    return file_kind(_local_path(word)) is not None


def file_kind(path: Path) -> MediaKind | None:
    """What a file is, by its first bytes, else by its suffix. None: no media file, or no file."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return _kind(path.name, file.read(_HEAD_BYTES))
    except (OSError, ValueError):  # a name that no file can have, or one that we may not read
        return None


def source_kind(source: str) -> MediaKind | None:
    """What a path or a URL names; of a URL the server fetches only the name is known."""
    if not is_url(source):
        return file_kind(_local_path(source)) or _suffix_kind(source)
    parts = urlsplit(source)
    if parts.scheme.lower() == "data":
        prefixes: Iterator[MediaKind] = (
            kind for kind in set(_SUFFIXES.values()) if parts.path.startswith(f"{kind}/")
        )
        return next(prefixes, None)
    return _suffix_kind(parts.path)


def _kind(name: str, head: bytes) -> MediaKind | None:
    by_suffix = _suffix_kind(name)
    for offset, start, kind in _CONTENTS:
        if head[offset:].startswith(start):
            return kind
    for offset, start, kind in _CONTAINERS:
        if head[offset:].startswith(start):
            return by_suffix if by_suffix in ("audio", "video") else kind
    return by_suffix


def _suffix_kind(name: str) -> MediaKind | None:
    return _SUFFIXES.get(PurePath(name).suffix.lower().removeprefix("."))
