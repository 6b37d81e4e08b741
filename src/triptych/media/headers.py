"""What a media file's own headers claim, read without a demuxer: is it all there, how long is it.

A claim decides nothing but a refusal: a file that ends too early, or lies, is not taken. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

_STREAMED = 0x7FFF0000  # a WAV of this size or more was written by something that did not know it
_SEGMENT = 0x18538067


def is_complete(data: memoryview, name: str) -> bool:
    """Whether the file reaches to where its headers say that it ends. ``name``: its demuxer."""
    match name:
        case "mov":
            # Only boxes that matter: bytes after the last are often no box at all.
            kinds = (b"moov", b"mdat", b"moof")
            return all(end <= len(data) for kind, _, end in mp4_boxes(data) if kind in kinds)
        case "matroska":
            return _segment_end(data) <= len(data)
        case "wav":
            body = wav_chunk(data, b"data")
            return body is None or body[1] >= _STREAMED or body[0] + body[1] <= len(data)
    return True


def mp4_boxes(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """MP4 boxes that lie side by side: kind, where its body begins, where it ends."""
    at = 0
    while at + 8 <= len(data):
        size, body = int.from_bytes(data[at : at + 4]), at + 8
        if size == 1:
            size, body = int.from_bytes(data[at + 8 : at + 16]), at + 16
        end = len(data) if size == 0 else at + size
        yield bytes(data[at + 4 : at + 8]), body, end
        if end < body:  # no box can be so small
            return
        at = end


def movie_seconds(data: memoryview) -> float:
    """How long an MP4 says it is, in its movie header; 0: it does not say."""
    for kind, start, end in mp4_boxes(data):
        if kind != b"moov":
            continue
        movie = data[start:end]
        for inner, body, _ in mp4_boxes(movie):
            if inner != b"mvhd" or body >= len(movie):
                continue
            wide = movie[body] == 1  # 64-bit times
            at, size = (body + 20, 8) if wide else (body + 12, 4)
            scale = int.from_bytes(movie[at : at + 4])
            span = int.from_bytes(movie[at + 4 : at + 4 + size])
            unknown = (1 << 8 * size) - 1
            return span / scale if scale and span != unknown else 0.0
    return 0.0


def wav_chunk(data: memoryview, wanted: bytes) -> tuple[int, int] | None:
    """Where a WAV's chunk begins and how long it says it is."""
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == wanted:
            return at + 8, size
        at += 8 + size + size % 2
    return None


def wav_rate(data: memoryview) -> int | None:
    """Samples a second, by a WAV's header."""
    place = wav_chunk(data, b"fmt ")
    return int.from_bytes(data[place[0] + 4 : place[0] + 8], "little") if place else None


def counts_samples(data: memoryview, name: str) -> bool:
    """Whether the header counts the samples: else a sound's length is but a guess of its size."""
    if name != "mp3":
        return name == "flac"
    at = 0
    if bytes(data[:3]) == b"ID3":
        for byte in data[6:10]:  # seven bits of each
            at = at << 7 | byte & 0x7F
        at += 10
    frame = bytes(data[at : at + 256])
    return b"Xing" in frame or b"Info" in frame


def _segment_end(data: memoryview) -> int:
    """Where a Matroska file's one segment ends by its header; 0: it does not say."""
    head, at = _number(data, 4)
    at += head  # behind the EBML header
    if int.from_bytes(data[at : at + 4]) != _SEGMENT:
        return 0
    size, at = _number(data, at + 4)
    return at + size if size >= 0 else 0


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """EBML's number of 1 to 8 bytes and the place behind it; -1: all ones, which is unknown."""
    if at >= len(data) or not data[at]:
        return -1, len(data)
    length = 9 - data[at].bit_length()
    bits = 7 * length
    value = int.from_bytes(data[at : at + length]) & ((1 << bits) - 1)
    return (-1 if value == (1 << bits) - 1 else value), at + length
