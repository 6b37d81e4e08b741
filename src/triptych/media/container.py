"""Opens a media file that lies in memory, and decides which containers and codecs are touched.

The demuxer is chosen by the file's first bytes, never by probing, and a decoder outside the list
is never opened, not even to look at the stream. Runs in the sandbox.
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
from triptych.media import headers, lockdown

PYAV = int(av.__version__.partition(".")[0])  # 14.1 to 19 have been tried
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
# Tags that are no UTF-8 do not matter. From 19 on PyAV takes them unasked, and not this word.
_TAGS: dict[str, Any] = {"metadata_errors": "ignore"} if PYAV < 19 else {}
_SOME = 64 << 20  # bytes: where there are not so many, memory has indeed run out
_BOXES = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}
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
    """The file's container; whatever is wrong with the file inside the scope is InvalidMedia."""
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
        raise InvalidMedia(f"This is no {kind} file that can be read: send {_takes(containers)}.")
    if not headers.is_complete(data, name):
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
        # It says so of damaged files too, which ask for sizes that nobody has.
        if isinstance(error, MemoryError) and not lockdown.can_allocate(_SOME):
            raise MemoryError from None
        raise InvalidMedia(f"The {kind} file cannot be decoded: {error.strerror}.") from None


def check_codec(stream: Stream, codecs: frozenset[str], kind: str) -> str:
    """The name of the stream's codec, which is one of ``codecs``. No decoder has been opened."""
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
