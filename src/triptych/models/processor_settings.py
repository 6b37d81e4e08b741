"""A checkpoint's processor settings as recipes. Reads JSON files; prepares no media itself.

A missing setting has the default of the stock processor's class. Raises UnsupportedModel for
settings that a recipe cannot express, since results would silently differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.checkpoint import Model, read_json
from triptych.errors import UnsupportedModel
from triptych.recipe import (
    FrameSampling,
    GridImage,
    GridVideo,
    MelAudio,
    Normalization,
    SquareImage,
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC = 2, 3  # as Pillow numbers them

# What the stock classes have: patch, mean and deviation.
_GRID_VIDEOS = {"qwen2": (14, CLIP_MEAN, CLIP_STD), "qwen3": (16, HALF, HALF)}

Settings = Mapping[str, Any]


def read_settings(folder: Path, processor: str = "image_processor") -> dict[str, Any]:
    """The settings of one processor of a checkpoint, from the file that its transformers wrote.

    ``video_processor`` may have its own file; otherwise all share one.
    """
    nested = read_json(folder / "processor_config.json").get(processor)
    if isinstance(nested, dict):
        return nested
    own = folder / "video_preprocessor_config.json"
    if processor == "video_processor" and own.is_file():
        return read_json(own)
    return read_json(folder / "preprocessor_config.json")


def tone(
    settings: Settings,
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
) -> Normalization:
    """``mean`` and ``std``: the defaults of the processor's class."""
    rescale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    if not settings.get("do_normalize", True):
        return Normalization(rescale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Normalization(
        rescale,
        _three(settings.get("image_mean") or mean, "image_mean"),
        _three(settings.get("image_std") or std, "image_std"),
    )


def grid_image(settings: Settings) -> GridImage:
    """Qwen-VL's."""
    refuse(settings, {"do_resize": True, "do_convert_rgb": True})
    least, most = pixel_limits(settings, 56 * 56, 28 * 28 * 1280)
    return GridImage(
        patch=settings.get("patch_size", 14),
        merge=settings.get("merge_size", 2),
        min_pixels=least,
        max_pixels=most,
        resample=resample(settings),
        tone=tone(settings),
    )


def grid_video(settings: Settings, rule: str, *, with_audio: bool = False) -> GridVideo:
    """Qwen-VL's. ``rule``: that of Frames, "qwen2" or "qwen3"."""
    refuse(settings, {"do_resize": True, "cap_pixels_per_frame": False})
    if settings.get("num_frames") is not None:
        raise UnsupportedModel("the video processor's num_frames is not supported; give fps")
    patch, mean, std = _GRID_VIDEOS[rule]
    unit = (2 * patch) ** 2
    least, most = pixel_limits(settings, 128 * unit, 768 * unit)
    return GridVideo(
        frames=FrameSampling(
            rule=rule,
            fps=float(settings.get("fps") or 2.0),
            count=0,
            least=settings.get("min_frames", 4),
            most=settings.get("max_frames", 768),
            patch=settings.get("temporal_patch_size", 2),
        ),
        patch=settings.get("patch_size", patch),
        merge=settings.get("merge_size", 2),
        min_pixels=least,
        max_pixels=most,
        per_frame=rule == "qwen2",
        resample=resample(settings),
        tone=tone(settings, mean, std),
        with_audio=with_audio,
    )


def square_image(settings: Settings, patch: int, extra_tokens: int) -> SquareImage:
    """CLIP's."""
    refuse(
        settings,
        {"do_resize": True, "do_center_crop": True, "do_convert_rgb": True, "do_pad": False},
    )
    size, crop = settings.get("size", 224), settings.get("crop_size", 224)
    short = size if isinstance(size, int) else size.get("shortest_edge", 0)
    side = crop if isinstance(crop, int) else crop.get("height", 0)
    if short < side or (isinstance(crop, dict) and crop.get("width") != side):
        raise UnsupportedModel(
            f"the image processor resizes to {size} and crops to {crop}; only a shortest edge "
            "that is at least as long as a square crop is supported"
        )
    return SquareImage(
        short=short,
        side=side,
        patch=patch,
        extra_tokens=extra_tokens,
        resample=resample(settings),
        tone=tone(settings),
    )


def mel_audio(settings: Settings, tower: Any, model: Model, tail: int = 0) -> MelAudio:
    """A feature extractor's settings as a recipe, with the defaults of Whisper's class.

    ``tower``: the audio tower's configuration.
    """
    if settings.get("dither"):
        raise UnsupportedModel("the feature extractor's dither is not supported: it is random")
    rate, hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
    mels = settings.get("feature_size", 80)
    if mels != tower.num_mel_bins:
        raise UnsupportedModel(
            f"{model.name}: the feature extractor gives {mels} mels, but the audio tower takes "
            f"{tower.num_mel_bins}"
        )
    return MelAudio(
        rate=rate,
        fft=settings.get("n_fft", 400),
        hop=hop,
        mels=mels,
        max_frames=settings.get("chunk_length", 30) * rate // hop,
        tail=tail,
    )


def pixel_limits(settings: Settings, least: int, most: int) -> tuple[int, int]:
    """Fewest and most pixels, under any of the names that Qwen-VL processors use."""
    size = settings.get("size") or {}
    return (
        settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least,
        settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most,
    )


def resample(settings: Settings, default: int = BICUBIC) -> int:
    """The filter by Pillow's number. The stock processors resize with torch, which has two."""
    number = int(settings.get("resample", default))
    if number not in (BILINEAR, BICUBIC):
        raise UnsupportedModel(
            f"the media processor's resample={number} is not supported; only bilinear "
            f"({BILINEAR}) and bicubic ({BICUBIC}) are"
        )
    return number


def refuse(settings: Settings, needed: Mapping[str, bool]) -> None:
    """Raise unless every given setting has the needed value."""
    for name, value in needed.items():
        if (given := settings.get(name)) is not None and given is not value:
            raise UnsupportedModel(f"the media processor's {name}={given} is not supported")


def _three(values: Any, name: str) -> tuple[float, float, float]:
    if len(values) != 3:
        raise UnsupportedModel(f"the media processor's {name} must have three values")
    red, green, blue = (float(value) for value in values)
    return red, green, blue
