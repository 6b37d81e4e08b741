"""``mm_processor_kwargs`` and ``media_io_kwargs`` of a chat: how its media should be prepared.

Names and places are vLLM's. Whether the model's recipes can follow an option is checked where the
media are prepared; here are types, ranges and options that contradict each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from triptych.api.content import MediaPolicy
from triptych.errors import InvalidValue
from triptych.messages import MediaKind
from triptych.recipe import MediaOptions

if TYPE_CHECKING:
    from triptych.api.requests import ChatRequest

# -1 is vLLM's way to leave it to the processor.
FrameCount = Annotated[int, Meta(ge=-1, le=1 << 20)]
FrameRate = Annotated[float, Meta(ge=-1, le=1000)]
PixelCount = Annotated[int, Meta(ge=1, le=1 << 40)]


class ProcessorKwargs(Struct, frozen=True, forbid_unknown_fields=True):
    """``mm_processor_kwargs``."""

    num_frames: FrameCount | None = None
    fps: FrameRate | None = None
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None
    use_audio_in_video: bool | None = None
    do_sample_frames: Literal[True] | None = None  # changes nothing: frames are always sampled


class VideoLoadKwargs(Struct, frozen=True, forbid_unknown_fields=True):
    num_frames: FrameCount | None = None
    fps: FrameRate | None = None


class NoKwargs(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class MediaLoadKwargs(Struct, frozen=True, forbid_unknown_fields=True):
    """``media_io_kwargs``, by kind of media."""

    video: VideoLoadKwargs | None = None
    image: NoKwargs | None = None
    audio: NoKwargs | None = None


_NO_PROCESSOR, _NO_LOAD = ProcessorKwargs(), VideoLoadKwargs()


def with_media_options(policy: MediaPolicy, request: ChatRequest) -> MediaPolicy:
    """The policy with the options of a request; without any, the policy itself."""
    if request.mm_processor_kwargs is None and request.media_io_kwargs is None:
        return policy
    processor = request.mm_processor_kwargs or _NO_PROCESSOR
    load = _NO_LOAD
    if request.media_io_kwargs is not None:
        load = request.media_io_kwargs.video or _NO_LOAD
    video = MediaOptions(
        num_frames=int(_one_of_both("num_frames", processor.num_frames, load.num_frames)),
        fps=_one_of_both("fps", processor.fps, load.fps),
        min_pixels=processor.min_pixels or 0,
        max_pixels=processor.max_pixels or 0,
        use_audio_in_video=processor.use_audio_in_video,
    )
    image = MediaOptions(min_pixels=video.min_pixels, max_pixels=video.max_pixels)
    options: dict[MediaKind, MediaOptions] = {"image": image, "video": video}
    used = {kind: chosen for kind, chosen in options.items() if chosen != _UNCHANGED}
    return replace(policy, options=used)


_UNCHANGED = MediaOptions()


def _one_of_both(name: str, processor: float | None, load: float | None) -> float:
    """The value that either place gives; 0: neither does."""
    for place, value in (("mm_processor_kwargs", processor), ("media_io_kwargs.video", load)):
        if value is not None and value != -1 and value <= 0:
            param = f"{place}.{name}"
            raise InvalidValue(
                f"'{param}' must be above 0, or -1 for the model's own.", param=param
            )
    given = {value for value in (processor, load) if value is not None and value != -1}
    if len(given) > 1:
        raise InvalidValue(
            f"mm_processor_kwargs and media_io_kwargs have different {name}. Give one.",
            param=f"mm_processor_kwargs.{name}",
        )
    return given.pop() if given else 0
