"""The parts of a message as structs, and how each becomes a part of a turn.

A media part has one payload, named like its type. What came along becomes bytes here; what is
elsewhere stays a URL. Nothing is fetched and nothing is decoded.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from triptych.api.body import MediaSlices, decode_base64, decode_data_url, is_data_url
from triptych.errors import MediaDisabled, TooManyMedia, UnsupportedParameter
from triptych.messages import MediaForm, MediaKind
from triptych.prompt.processor import PLURALS, MediaPart, TextPart

MEDIA_DISABLED = "This server takes text only. Start it with --enable-multimodal to send media."


class MediaURL(Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None  # only "auto": the size is the model's choice


AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4"]


class InputAudio(Struct, frozen=True, forbid_unknown_fields=True):
    data: str  # base64
    format: AudioFormat  # the data tells itself


class TextContent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ImageContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    image_url: ImageURL


class VideoContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video_url"
):
    video_url: MediaURL


class AudioContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio_url"
):
    audio_url: MediaURL


class InputAudioContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"
):
    """OpenAI's own form of ``audio_url``."""

    input_audio: InputAudio


class ImageEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_embeds"
):
    """What the model's encoder would make of an image: a safetensors file, in base64 or at a URL.

    So for the two other kinds.
    """

    image_embeds: str | MediaURL


class VideoEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video_embeds"
):
    video_embeds: str | MediaURL


class AudioEmbedsContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio_embeds"
):
    audio_embeds: str | MediaURL


MediaContent = (
    ImageContent
    | VideoContent
    | AudioContent
    | InputAudioContent
    | ImageEmbedsContent
    | VideoEmbedsContent
    | AudioEmbedsContent
)
ContentPart = (
    TextContent
    | ImageContent
    | VideoContent
    | AudioContent
    | InputAudioContent
    | ImageEmbedsContent
    | VideoEmbedsContent
    | AudioEmbedsContent
)
CONTENT_TYPES: tuple[str, ...] = tuple(
    part.__struct_config__.tag for part in typing.get_args(ContentPart)
)
_WHAT: dict[type[Struct], tuple[MediaKind, MediaForm]] = {
    ImageContent: ("image", "file"),
    VideoContent: ("video", "file"),
    AudioContent: ("audio", "file"),
    InputAudioContent: ("audio", "file"),
    ImageEmbedsContent: ("image", "embeds"),
    VideoEmbedsContent: ("video", "embeds"),
    AudioEmbedsContent: ("audio", "embeds"),
}


class MediaPolicy(Struct, frozen=True):
    """Which media a request may have, and how many."""

    enabled: bool
    items: int  # of all kinds together
    each: dict[MediaKind, int] = {}  # of a kind, where there is a limit for it


def check_media_count(parts: Iterable[ContentPart], allowed: MediaPolicy) -> None:
    """Refuse too many media before any of them is looked at."""
    counts: dict[MediaKind, int] = {}
    for part in parts:
        if type(part) is not TextContent:
            kind = _WHAT[type(part)][0]
            counts[kind] = counts.get(kind, 0) + 1
    for kind, number in counts.items():
        if number > (most := allowed.each.get(kind, number)):
            raise TooManyMedia(
                f"The request has {number} {PLURALS[kind]}; the limit is {most}.", param="messages"
            )
    if (total := sum(counts.values())) > allowed.items:
        told = ", ".join(f"{number} {PLURALS[kind]}" for kind, number in counts.items())
        raise TooManyMedia(
            f"The request has {total} media items ({told}); the limit is {allowed.items}.",
            param="messages",
        )


def to_prompt_part(
    part: ContentPart, param: str, slices: MediaSlices, allowed: MediaPolicy
) -> TextPart | MediaPart:
    """``param`` is the part's place in the request."""
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if not allowed.enabled:
        raise MediaDisabled(MEDIA_DISABLED, param=param)
    if isinstance(part, ImageContent) and part.image_url.detail not in (None, "auto"):
        raise UnsupportedParameter(
            "No detail but 'auto' is supported; leave it out or write that.",
            param=f"{param}.image_url.detail",
        )
    kind, form = _WHAT[type(part)]
    given = _payload(part)
    if isinstance(given, str):
        return MediaPart(kind, form, decode_base64(given, slices, param))
    if is_data_url(given.url):
        return MediaPart(kind, form, decode_data_url(given.url, slices, kind, form, param))
    return MediaPart(kind, form, given.url)


def _payload(part: MediaContent) -> str | MediaURL | ImageURL:
    """Base64, or where it is."""
    match part:
        case ImageContent():
            return part.image_url
        case VideoContent():
            return part.video_url
        case AudioContent():
            return part.audio_url
        case InputAudioContent():
            return part.input_audio.data
        case ImageEmbedsContent():
            return part.image_embeds
        case VideoEmbedsContent():
            return part.video_embeds
        case AudioEmbedsContent():
            return part.audio_embeds
