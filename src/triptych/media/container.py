"""Opens video and sound files that lie in memory, with demuxers and decoders from a fixed list.

The file's first bytes choose the demuxer, never libav's probing, and a decoder outside the list is
never opened, not even to look at the stream. Also reads what the headers of a file claim, without a
demuxer: a claim only ever refuses a file, one that ends too early or lies about its length. Runs in
the sandbox.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.container import InputContainer
from av.stream import Stream

from triptych.config import Limits
from triptych.errors import InvalidMedia, UnsupportedMediaType
from triptych.media import lockdown

PYAV = int(av.__version__.partition(".")[0])  # tested: 14.1 to 19
VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
AUDIO_CODECS = frozenset(
    {"mp3", "flac", "vorbis", "opus", "aac", "pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le"}
    | {"pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw", "pcm_s16be"}
)
VIDEO_CONTAINERS = frozenset({"mov", "matroska"})
AUDIO_CONTAINERS = frozenset({"wav", "mp3", "flac", "ogg", "mov", "matroska"})

# libavcodec's names of decoders, which are not always those of the codecs
_OTHER_NAMES = {"libdav1d": "av1", "mp3float": "mp3"}
_DECODERS = ",".join(sorted(VIDEO_CODECS | AUDIO_CODECS | _OTHER_NAMES.keys()))
# Tags that are not UTF-8 do not matter. PyAV 19 accepts them by default and dropped this argument.
_TAGS: dict[str, Any] = {"metadata_errors": "ignore"} if PYAV < 19 else {}
_SPARE_BYTES = 64 << 20  # if not even these can be allocated, memory has run out
_BOXES = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}
_STREAMED_SIZE = 0x7FFF0000  # of a WAV whose writer did not know the size in advance, or more
_SEGMENT_ID = 0x18538067
_REFUSED = ((b"FLV", "FLV"), (b"\x30\x26\xb2\x75", "ASF"), (b"\x00\x00\x01\xba", "MPEG-PS"))


def detect_container(data: memoryview) -> str:
    """The demuxer for these first bytes; "" where there is none for them."""
    head = bytes(data[:16])
    if head[4:8] in _BOXES:
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        return "wav"
    if head.startswith(b"fLaC"):
        return "flac"
    if head.startswith(b"OggS"):
        return "ogg"
    # an MPEG frame's sync word, of layer 1 to 3
    synced = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0
    return "mp3" if head.startswith(b"ID3") or synced else ""


@contextmanager
def open_container(
    data: memoryview, kind: str, containers: frozenset[str], limits: Limits
) -> Iterator[InputContainer]:
    """The file's container. Errors of libav inside the scope are raised as InvalidMedia."""
    name = detect_container(data)
    if name not in containers:
        head = bytes(data[:12])
        other = next((form for start, form in _REFUSED if head.startswith(start)), name)
        if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
            other = "AVI"
        if other:
            raise UnsupportedMediaType(
                f"{other} is not taken as {kind}: send {_takes(containers)}."
            )
        raise InvalidMedia(f"This is not a readable {kind} file: send {_takes(containers)}.")
    if not is_complete_file(data, name):
        raise InvalidMedia(f"The {kind} file is cut short: it ends before its headers say.")
    options = {
        "codec_whitelist": _DECODERS,
        "protocol_whitelist": "none",  # a file that names other files reads none of them
        "max_pixels": str(limits.image_pixels),
        "threads": "1",
    }
    try:
        with av.open(io.BytesIO(data), "r", format=name, options=options, **_TAGS) as container:
            yield container
    except av.FFmpegError as error:
        # libav raises it for damaged files too, which ask for impossible sizes.
        if isinstance(error, MemoryError) and not lockdown.can_allocate(_SPARE_BYTES):
            raise MemoryError from None
        raise InvalidMedia(f"The {kind} file cannot be decoded: {error.strerror}.") from None


def check_codec(stream: Stream, codecs: frozenset[str], kind: str) -> str:
    """The name of the stream's codec; InvalidMedia if it is not in ``codecs``. Opens no decoder."""
    context = stream.codec_context
    name = context.codec.name if context is not None else "unknown"
    name = _OTHER_NAMES.get(name, name)
    if name not in codecs:
        raise InvalidMedia(
            f"The {kind} file has the codec {name}: of codecs, {', '.join(sorted(codecs))} are "
            "taken."
        )
    return name


def _takes(containers: frozenset[str]) -> str:
    names = {"mov": "MP4", "matroska": "WebM"}
    return " or ".join(sorted(names.get(name, name.upper()) for name in containers))


# What the headers of a file claim.


def is_complete_file(data: memoryview, name: str) -> bool:
    """Whether the file reaches to where its headers say that it ends. ``name``: its demuxer."""
    match name:
        case "mov":
            # Only boxes that matter: the bytes after the last one are often not a box.
            kinds = (b"moov", b"mdat", b"moof")
            return all(end <= len(data) for kind, _, end in mp4_boxes(data) if kind in kinds)
        case "matroska":
            return _segment_end(data) <= len(data)
        case "wav":
            body = wav_chunk(data, b"data")
            return body is None or body[1] >= _STREAMED_SIZE or body[0] + body[1] <= len(data)
    return True


def mp4_boxes(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """The MP4 boxes of one level: kind, start of the body, end."""
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
    """The duration in the movie header of an MP4; 0: it has none."""
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
    """Where a chunk of a WAV begins and its declared length."""
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == wanted:
            return at + 8, size
        at += 8 + size + size % 2
    return None


def wav_rate(data: memoryview) -> int | None:
    """Samples per second in the header of a WAV."""
    place = wav_chunk(data, b"fmt ")
    return int.from_bytes(data[place[0] + 4 : place[0] + 8], "little") if place else None


def counts_samples(data: memoryview, name: str) -> bool:
    """Whether the header counts the samples. Else libav estimates the duration from the size."""
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
    """Where the one segment of a Matroska file ends, by its header; 0: it does not say."""
    head, at = _number(data, 4)
    at += head  # behind the EBML header
    if int.from_bytes(data[at : at + 4]) != _SEGMENT_ID:
        return 0
    size, at = _number(data, at + 4)
    return at + size if size >= 0 else 0


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """An EBML number of 1 to 8 bytes and the offset after it; -1: all ones, which is unknown."""
    if at >= len(data) or not data[at]:
        return -1, len(data)
    length = 9 - data[at].bit_length()
    bits = 7 * length
    value = int.from_bytes(data[at : at + length]) & ((1 << bits) - 1)
    return (-1 if value == (1 << bits) - 1 else value), at + length
