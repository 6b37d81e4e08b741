"""The content parts of chat messages, and the media in them.

Requests carry media as base64 in JSON. ``extract_media`` takes it out of the raw body before the
JSON is decoded, so that a megabyte of picture is neither scanned as JSON nor copied as a string; a
short marker takes its place. ``to_prompt_part`` turns a decoded part into one of a prompt, with
bytes or with the URL that the client gave. Nothing is fetched here, and no file is decoded.
"""

from __future__ import annotations

import mmap
import re
import secrets
import typing
from collections.abc import Iterable
from typing import Annotated, Literal

import pybase64
from msgspec import Meta, Struct
from msgspec.structs import replace

from triptych.errors import (
    InvalidDataURL,
    InvalidValue,
    MediaDisabled,
    MediaError,
    PayloadTooLarge,
    TooManyFrames,
    TooManyMedia,
    UnsupportedMediaType,
    UnsupportedParameter,
)
from triptych.media.frame_list import is_frame_list, join_frames
from triptych.messages import PLURALS, MediaForm, MediaKind
from triptych.prompt.processor import ChatTurn, MediaPart, MediaSource, TextPart
from triptych.recipe import MediaOptions

MEDIA_DISABLED = "This server takes text only. Start it with --enable-multimodal to send media."
MIN_BASE64 = 4096  # characters of bare base64 from which extracting it pays
STEP = 256 << 10  # bytes that are scanned while no other thread can run
FIRST_STEP = 4096  # bytes scanned first, where base64 may follow soon; each step doubles
MAX_MEMBER_HEAD = 256  # bytes of a member's name, colon and start of its value
MAX_MISSES = 4096  # members without a value to extract; after so many the rest stays as it is
MAX_QUOTED = 64  # characters of a media type that an error quotes
MAX_LISTED_FRAMES = 1024  # of one data:video/jpeg list
OCTET_STREAM = b"application/octet-stream"
FRAME_LIST_TYPE = b"video/jpeg"

RawBody = bytes | bytearray | mmap.mmap
MediaSlices = dict[str, memoryview]  # extracted strings, by their markers


# --- content parts

Detail = Literal["auto", "low", "high", "original"]  # low caps the pixels, others change nothing
AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4"]
MediaName = Annotated[str, Meta(min_length=1, max_length=256)]  # of ``uuid``


class ContentURL(Struct, frozen=True, forbid_unknown_fields=True):
    url: str | None = None


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    url: str | None = None
    detail: Detail | None = None


class InputAudio(Struct, frozen=True, forbid_unknown_fields=True):
    data: str | None = None  # base64, or a data URL
    format: AudioFormat | None = None  # checked and not used: the file has its own header


class InlineFile(Struct, frozen=True, forbid_unknown_fields=True):
    file_data: str | None = None  # a data URL, or base64
    filename: str | None = None  # not used: the content decides
    file_id: str | None = None  # refused
    file_url: str | None = None  # refused


class TextContent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class InputTextContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """The Responses API's form of ``text``."""

    text: str


class ImageContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    image_url: ImageURL | str | None = None
    uuid: MediaName | None = None  # a name under which the tenant may send it again


class InputImageContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"
):
    """The Responses API's form of ``image_url``."""

    image_url: ImageURL | str | None = None
    detail: Detail | None = None
    uuid: MediaName | None = None


class VideoContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video_url"
):
    video_url: ContentURL | str | None = None
    uuid: MediaName | None = None


class AudioContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio_url"
):
    audio_url: ContentURL | str | None = None
    uuid: MediaName | None = None


class InputAudioContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"
):
    """OpenAI's own form of ``audio_url``."""

    input_audio: InputAudio | str | None = None
    uuid: MediaName | None = None


class FileContent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    """A media file of any kind, which its media type or its first bytes tell."""

    file: InlineFile


class InputFileContent(
    InlineFile, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_file"
):
    """The Responses API's form of ``file``."""


class ImageEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_embeds"
):
    """The output of the model's encoder for an image, as safetensors: in base64 or at a URL."""

    image_embeds: str | ContentURL | None = None
    uuid: MediaName | None = None


class VideoEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video_embeds"
):
    video_embeds: str | ContentURL | None = None
    uuid: MediaName | None = None


class AudioEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio_embeds"
):
    audio_embeds: str | ContentURL | None = None
    uuid: MediaName | None = None


TextualContent = TextContent | InputTextContent
FileOfAnyKind = FileContent | InputFileContent
KnownMediaContent = (
    ImageContent
    | InputImageContent
    | VideoContent
    | AudioContent
    | InputAudioContent
    | ImageEmbedsContent
    | VideoEmbedsContent
    | AudioEmbedsContent
)
ChatContentPart = TextualContent | KnownMediaContent | FileOfAnyKind
PARTS: dict[str, type[Struct]] = {
    part.__struct_config__.tag: part for part in typing.get_args(ChatContentPart)
}
CONTENT_TYPES: tuple[str, ...] = tuple(PARTS)
PAYLOADS = {  # the members of a part that hold its media, and the objects that they may be
    "image_url": ImageURL,
    "video_url": ContentURL,
    "audio_url": ContentURL,
    "input_audio": InputAudio,
    "file": InlineFile,
    "image_embeds": ContentURL,
    "video_embeds": ContentURL,
    "audio_embeds": ContentURL,
}
_KIND_FORM_PAYLOAD: dict[type[Struct], tuple[MediaKind, MediaForm, str]] = {
    ImageContent: ("image", "file", "image_url"),
    InputImageContent: ("image", "file", "image_url"),
    VideoContent: ("video", "file", "video_url"),
    AudioContent: ("audio", "file", "audio_url"),
    InputAudioContent: ("audio", "file", "input_audio"),
    ImageEmbedsContent: ("image", "embeds", "image_embeds"),
    VideoEmbedsContent: ("video", "embeds", "video_embeds"),
    AudioEmbedsContent: ("audio", "embeds", "audio_embeds"),
}
_MEDIA_TYPES: dict[MediaKind, str] = {
    "image": "image/jpeg",
    "video": "video/mp4",
    "audio": "audio/wav",
}
LOW_DETAIL_PIXELS = 512 * 512  # the size of OpenAI's low-resolution picture
LOW_DETAIL = MediaOptions(pixel_cap=LOW_DETAIL_PIXELS)


class MediaPolicy(Struct, frozen=True):
    """Which media a request may have, how many, and how they are prepared."""

    enabled: bool
    max_items: int  # of all kinds together
    max_of_kind: dict[MediaKind, int] = {}  # only of kinds that have a limit
    options: dict[MediaKind, MediaOptions] = {}  # that the request asks for


def check_media_count(
    parts: Iterable[ChatContentPart], slices: MediaSlices, policy: MediaPolicy
) -> None:
    """Refuse too many media before any of them is decoded."""
    counts: dict[MediaKind, int] = {}
    for part in parts:
        if isinstance(part, FileContent | InputFileContent):
            kind = _kind_of_file(_inline_file(part), slices)
        elif isinstance(part, TextContent | InputTextContent):
            continue
        else:
            kind = _KIND_FORM_PAYLOAD[type(part)][0]
        if kind is not None:
            counts[kind] = counts.get(kind, 0) + 1
    _check_counts(counts, policy)


def check_turn_media(turns: Iterable[ChatTurn], policy: MediaPolicy) -> None:
    """The same for turns, some of which are of earlier requests."""
    counts: dict[MediaKind, int] = {}
    for turn in turns:
        for part in turn.content:
            if isinstance(part, MediaPart):
                counts[part.kind] = counts.get(part.kind, 0) + 1
    _check_counts(counts, policy)


def _check_counts(counts: dict[MediaKind, int], policy: MediaPolicy) -> None:
    for kind, number in counts.items():
        if number > (limit := policy.max_of_kind.get(kind, number)):
            raise TooManyMedia(
                f"The request has {number} {PLURALS[kind]}; the limit is {limit}.",
                param="messages",
            )
    if (total := sum(counts.values())) > policy.max_items:
        listed = ", ".join(f"{number} {PLURALS[kind]}" for kind, number in counts.items())
        raise TooManyMedia(
            f"The request has {total} media items ({listed}); the limit is {policy.max_items}.",
            param="messages",
        )


def to_prompt_part(
    part: ChatContentPart, param: str, slices: MediaSlices, policy: MediaPolicy
) -> TextPart | MediaPart:
    """``param`` is where the part stands in the request, for errors."""
    if isinstance(part, TextContent | InputTextContent):
        return TextPart(part.text)
    if not policy.enabled:
        raise MediaDisabled(MEDIA_DISABLED, param=param)
    if isinstance(part, FileContent | InputFileContent):
        return _file_part(_inline_file(part), param, slices, policy)
    kind, form, payload = _KIND_FORM_PAYLOAD[type(part)]
    text, is_url = _payload(part, payload)
    if text is None and part.uuid is None:
        raise InvalidValue(f"'{param}' has no {payload}.", param=param)
    options = None if form == "embeds" else _options(part, kind, policy)
    source: MediaSource | None = text
    if text is not None and _is_data_url(text, slices):
        source = decode_data_url(text, slices, kind, form, param)
    elif text is not None and not is_url:
        source = decode_base64(text, slices, param)
    if isinstance(source, bytes) and kind == "video" and options is not None:
        _check_frame_list(source, options, param)
    return MediaPart(kind, form, source, options, part.uuid)


def _payload(part: KnownMediaContent, name: str) -> tuple[str | None, bool]:
    """The text of a part's payload, and whether that is a URL; else it is base64 or a data URL."""
    value: InputAudio | ContentURL | ImageURL | str | None = getattr(part, name)
    if value is None or isinstance(value, str):
        return value, name.endswith("_url")
    return (value.data, False) if isinstance(value, InputAudio) else (value.url, True)


def _options(part: KnownMediaContent, kind: MediaKind, policy: MediaPolicy) -> MediaOptions | None:
    options = policy.options.get(kind)
    detail = part.detail if isinstance(part, InputImageContent) else None
    if isinstance(part, ImageContent | InputImageContent) and isinstance(part.image_url, ImageURL):
        detail = detail or part.image_url.detail
    if detail != "low":
        return options
    return LOW_DETAIL if options is None else replace(options, pixel_cap=LOW_DETAIL_PIXELS)


def _check_frame_list(data: bytes, options: MediaOptions, param: str) -> None:
    if is_frame_list(data) and (options.num_frames or options.fps):
        raise InvalidValue(
            "All frames of a data:video/jpeg list are taken: num_frames and fps are for video "
            "files. Send the frames that the model should see.",
            param=param,
        )


# --- files whose kind is not given


def _inline_file(part: FileOfAnyKind) -> InlineFile:
    return part.file if isinstance(part, FileContent) else part


def _file_part(file: InlineFile, param: str, slices: MediaSlices, policy: MediaPolicy) -> MediaPart:
    if file.file_data is None:
        raise UnsupportedParameter(
            "A file part holds its file in file_data. For a URL or an upload (media://...) write "
            "an image_url, video_url or audio_url part.",
            param=param,
        )
    kind = _kind_of_file(file, slices)
    if kind is None:
        raise _unknown_file(file.file_data, slices, param)
    if _is_data_url(file.file_data, slices):
        data = decode_data_url(file.file_data, slices, kind, "file", param)
    else:
        data = decode_base64(file.file_data, slices, param)
    options = policy.options.get(kind)
    if kind == "video" and options is not None:
        _check_frame_list(data, options, param)
    return MediaPart(kind, "file", data, options)


def _kind_of_file(file: InlineFile, slices: MediaSlices) -> MediaKind | None:
    """The kind that its media type says, or else its first bytes; None: neither is known."""
    media_type, head = _type_and_head(file.file_data or "", slices)
    for kind in PLURALS:
        if media_type.startswith(kind.encode()):
            return kind
    return sniff_kind(head)


def _type_and_head(text: str, slices: MediaSlices) -> tuple[bytes, bytes]:
    """The media type of a data URL (empty: none), and the first bytes of the file."""
    resolved = _resolve(text, slices)
    prefix = _DATA_URL_PREFIX.match(resolved)
    at = 0 if prefix is None else prefix.end()
    try:
        head: bytes = pybase64.b64decode(resolved[at : at + SNIFFED_BASE64], validate=True)
    except ValueError:
        head = b""
    return (prefix[1] or b"").lower() if prefix is not None else b"", head


def _unknown_file(text: str, slices: MediaSlices, param: str) -> MediaError:
    resolved = _resolve(text, slices)
    if _is_data_url(text, slices) and not _DATA_URL_PREFIX.match(resolved):
        return InvalidDataURL("Write data URLs as data:image/jpeg;base64,...", param=param)
    media_type, head = _type_and_head(text, slices)
    if media_type == b"application/pdf" or head.startswith(b"%PDF"):
        return UnsupportedMediaType(
            "PDF files are not taken. Send its pages as images, or its text.", param=param
        )
    return UnsupportedMediaType(
        "The file is no image, video or sound that is known here. Name its media type, as in "
        "data:image/jpeg;base64,...",
        param=param,
    )


def sniff_kind(head: bytes) -> MediaKind | None:
    """The kind of a file by its first bytes. Says nothing about whether a decoder takes it."""
    if head[:4] == b"RIFF":
        return _RIFF_KINDS.get(head[8:12])
    if head[4:8] == b"ftyp":
        if head[8:12] in _IMAGE_BRANDS:
            return "image"
        return "audio" if head[8:11] in (b"M4A", b"M4B") else "video"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    mp3 = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    return "audio" if mp3 else None


SNIFFED_BASE64 = 64  # characters: 48 bytes
_RIFF_KINDS: dict[bytes, MediaKind] = {b"WAVE": "audio", b"WEBP": "image", b"AVI ": "video"}
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_MAGIC: tuple[tuple[bytes, MediaKind], ...] = (
    (b"\xff\xd8\xff", "image"),
    (b"\x89PNG", "image"),
    (b"GIF8", "image"),
    (b"BM", "image"),
    (b"II*\0", "image"),
    (b"MM\0*", "image"),
    (b"\x1aE\xdf\xa3", "video"),
    (b"fLaC", "audio"),
    (b"OggS", "audio"),
    (b"ID3", "audio"),
)


# --- data URLs


def _is_data_url(text: str, slices: MediaSlices) -> bool:
    if (extracted := slices.get(text)) is not None:
        return bytes(extracted[:5]).lower() == b"data:"
    return text[:5].lower() == "data:"


def decode_data_url(
    url: str, slices: MediaSlices, kind: MediaKind, form: MediaForm, param: str
) -> bytes:
    """The bytes of a data URL, whose media type must fit its part."""
    text = _resolve(url, slices)
    prefix = _DATA_URL_PREFIX.match(text)
    if prefix is None:
        raise InvalidDataURL(
            f"Write data URLs as data:{_MEDIA_TYPES[kind]};base64,...", param=param
        )
    media_type = (prefix[1] or b"").lower()
    if media_type and not _fits(media_type, kind, form):
        expected = PLURALS[kind] if form == "file" else "safetensors"
        quoted = prefix[1][:MAX_QUOTED].decode()
        raise UnsupportedMediaType(
            f"The data URL holds {quoted}, but this part takes {expected}.", param=param
        )
    if media_type == FRAME_LIST_TYPE:
        return _decode_frames(bytes(text[prefix.end() :]), param)
    data = memoryview(text)[prefix.end() :]
    if data[: len(_MARKER_START)] == _MARKER_START:  # see ``to_data_url``
        data = memoryview(_resolve(bytes(data).decode(), slices))
    return _decode(data, "The data URL's base64", param)


def data_url_type(url: str, slices: MediaSlices) -> str | None:
    """The media type of a data URL; None if it has none, or is none."""
    prefix = _DATA_URL_PREFIX.match(_resolve(url, slices))
    return None if prefix is None or prefix[1] is None else prefix[1].decode().lower()


def to_data_url(media_type: str, data: str) -> str:
    """The data URL of base64 that stands alone in a request, or that a marker stands for."""
    return f"data:{media_type};base64,{data}"


def _decode_frames(text: bytes, param: str) -> bytes:
    """JPEG frames in base64, separated by commas, as one file."""
    if text.count(b",") >= MAX_LISTED_FRAMES:
        raise TooManyFrames(
            f"The list has more than {MAX_LISTED_FRAMES} frames. Send fewer.", param=param
        )
    what = "The base64 of a frame"
    return join_frames([_decode(memoryview(frame), what, param) for frame in text.split(b",")])


def decode_base64(text: str, slices: MediaSlices, param: str) -> bytes:
    """The bytes of a string that is base64 and nothing else."""
    return _decode(memoryview(_resolve(text, slices)), "The base64", param)


def _resolve(text: str, slices: MediaSlices) -> bytes | memoryview:
    """The string that a marker stands for, or the string itself."""
    extracted = slices.get(text)
    return text.encode() if extracted is None else extracted


def _fits(media_type: bytes, kind: MediaKind, form: MediaForm) -> bool:
    if form != "file":
        return media_type.startswith(b"application/")
    return media_type.partition(b"/")[0] == kind.encode() or media_type == OCTET_STREAM


def _decode(text: memoryview, what: str, param: str) -> bytes:
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidDataURL(f"{what} is not valid.", param=param) from None
    return data


# --- media in the raw body

_SPACE = rb"[ \t\r\n]{0,100}+"  # after more space, the JSON decoder reads the value
_STRING_VALUE = re.compile(_SPACE + rb":" + _SPACE + rb'"')
_DATA_URL_VALUE = re.compile(_STRING_VALUE.pattern + rb"(?=data:)")
_MEMBERS = {  # that hold media: how a value begins, and from which length it is extracted
    b'url"': (_DATA_URL_VALUE, 0),  # "url", and "image_url" where it is a string
    b'"data"': (_STRING_VALUE, MIN_BASE64),  # this and the next are base64, or data URLs
    b'"file_data"': (_STRING_VALUE, MIN_BASE64),
    b'_embeds"': (_STRING_VALUE, MIN_BASE64),
}
_NAME_ENDS = (b'url"', b'data"', b'_embeds"')  # of these members, and of few others
_ESCAPE = re.compile(rb"\\(?!/)")  # other than of a slash
_DATA_URL_PREFIX = re.compile(
    rb"data:([\w.+-]+(?:/[\w.+-]+)?)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE
)
_MARKER_START = b"slice:"
MARKER = re.compile(rb'"(slice:[0-9a-f]{16}:[0-9]+)"')  # as a string of JSON


def extract_media(
    raw: RawBody, size: int, max_bytes: int, max_items: int
) -> tuple[memoryview, MediaSlices]:
    """Replace data URLs of members like ``"url"``, and long strings of base64 members, by markers.

    In valid JSON an unescaped ``url"`` before a colon ends a member's name, wherever it stands.
    A value with an escape in it other than ``\\/`` stays for the JSON decoder. The rest may have
    ``max_bytes``, and there may be ``max_items`` values: the first one too many is refused as soon
    as it is found. ``restore_objects`` puts back what is not media. Every byte is scanned a few
    times at most, whatever the body says.
    """
    view = memoryview(raw)[:size]
    if size <= STEP:  # as nearly all chats
        for name_end in _NAME_ENDS:
            if raw.find(name_end, 0, size) >= 0:
                break
        else:
            check_rest(size, max_bytes)
            return view, {}
    return MediaExtractor(raw, view, max_bytes, max_items).run()


class MediaExtractor:
    """Scans one body, and keeps what stands between its media."""

    def __init__(self, raw: RawBody, view: memoryview, max_bytes: int, max_items: int) -> None:
        self._raw = raw
        self._view = view
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._slices: MediaSlices = {}
        self._secret = secrets.token_hex(8)  # a client can't guess its markers, nor use them again
        self._rest: list[bytes | memoryview] = []  # the body without its media
        self._rest_bytes = 0
        self._done = 0  # up to here the body is in ``_rest``, or was extracted
        self._misses = 0

    def run(self) -> tuple[memoryview, MediaSlices]:
        at, size, step = 0, len(self._view), FIRST_STEP
        while at < size and self._misses < MAX_MISSES:
            end = min(at + step, size)
            at = self._scan(at, end, size)
            step = FIRST_STEP if at > end else min(2 * step, STEP)
            check_rest(self._rest_bytes + at - self._done, self._max_bytes)
        check_rest(self._rest_bytes + size - self._done, self._max_bytes)
        if not self._slices:
            return self._view, self._slices
        self._rest.append(self._view[self._done :])
        return memoryview(b"".join(self._rest)), self._slices

    def _scan(self, at: int, end: int, size: int) -> int:
        """Extract the values that begin before ``end``; return where to continue."""
        start = max(0, at - 1)  # a backslash may stand there
        window = self._raw[start:end]
        stop = size if end == size else end - MAX_MEMBER_HEAD  # later names are for the next step
        positions = dict.fromkeys(_MEMBERS, -1)
        while at < stop and self._misses < MAX_MISSES:
            for name, position in positions.items():
                if position < at:
                    found = window.find(name, at - start)
                    positions[name] = size if found < 0 else start + found
            name = min(positions, key=positions.__getitem__)
            at = positions[name]
            if at >= stop:
                return stop
            value, min_length = _MEMBERS[name]
            match = value.match(window, at - start + len(name))
            if match is None or window[at - start - 1 : at - start] == b"\\":
                self._misses += 1
                at += len(name)
            else:
                at = self._extract(start + match.end(), min_length, size)
        return at

    def _extract(self, start: int, min_length: int, size: int) -> int:
        """Extract the value at ``start`` if possible; return where to continue."""
        end, escaped = _find_end(self._raw, start, size)
        if escaped is None or end - start < min_length:
            self._misses += 1
            return end
        if len(self._slices) == self._max_items:
            raise TooManyMedia(
                f"The request has more media items than the limit of {self._max_items}.",
                param="messages",
            )
        marker = f"slice:{self._secret}:{len(self._slices)}"
        value = self._view[start:end]
        self._slices[marker] = memoryview(_unescape(value)) if escaped else value
        self._rest += (self._view[self._done : start], marker.encode())
        self._rest_bytes += start - self._done + len(marker)
        self._done = end
        return end


def _find_end(raw: RawBody, start: int, size: int) -> tuple[int, bool | None]:
    """Where a string ends, and whether its slashes are escaped. None: it can't be extracted."""
    escaped, step = False, FIRST_STEP
    while start < size:
        window = raw[start : min(start + step, size)]
        end = window.find(b'"')
        if end >= 0:
            window = window[:end]
        elif window.endswith(b"\\"):
            window = window[:-1] or b"\\"  # the next window has what it escapes, if anything
        if b"\\" in window:
            if _ESCAPE.search(window):
                return start + len(window), None
            escaped = True
        start += len(window)
        if end >= 0:
            return start, escaped
        step = min(2 * step, STEP)
    return size, None


def _unescape(value: memoryview) -> bytes:
    """Remove backslashes, which all stand before slashes; in steps, so that others may run."""
    steps = range(0, len(value), STEP)
    return b"".join([bytes(value[at : at + STEP]).translate(None, b"\\") for at in steps])


def check_rest(size: int, max_bytes: int) -> None:
    """Refuse a body that is too large to decode as JSON."""
    if size > max_bytes:
        raise PayloadTooLarge(
            f"Without its media the body has {size} bytes or more; the limit is {max_bytes}."
        )
