"""Video files to the frames that an encoder takes: 8-bit pixels, sampled and resized.

Each frame is resized as it leaves the decoder, so memory never holds all frames at full size. Which
frames are sampled follows the stock video processors. Runs in the sandbox; does not know models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.config import Limits
from triptych.errors import InvalidMedia, TooManyFrames
from triptych.media import audio, mel
from triptych.media.container import VIDEO_CONTAINERS, open_container
from triptych.media.frame_list import is_frame_list, split_frames
from triptych.media.image_file import decode_image
from triptych.media.images import MAX_ASPECT, Pixels, PreparedArrays, fit_to_grid, resize
from triptych.media.video_track import (
    IrregularTrack,
    VideoTrack,
    count_frames,
    read_track,
    scan_frames,
    seek_frames,
    to_rgb,
)
from triptych.messages import MediaMeta
from triptych.recipe import FrameSampling, GridVideo, Recipes, SquareVideo, VideoRecipe

LISTED_FPS = 2.0  # of a list of frames, for recipes that name no rate

_CropRule = Callable[[int, int, int], "FrameCrop"]


@dataclass(frozen=True, slots=True)
class FrameCrop:
    """How each frame is cut: resized to height and width, then the middle of that."""

    height: int
    width: int
    rows: int
    columns: int

    def apply(self, pixels: Pixels, resample: int) -> Pixels:
        whole = resize(pixels, self.height, self.width, resample)
        top, left = (self.height - self.rows) // 2, (self.width - self.columns) // 2
        return whole[top : top + self.rows, left : left + self.columns]


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """FrameSampling as the encoder takes them, and where in the track they come from."""

    pixels: Pixels  # [frames, rows, columns, 3], whole temporal patches
    indices: list[int]
    total: int
    rate: float


def prepare_video(
    data: memoryview, recipe: VideoRecipe, recipes: Recipes, limits: Limits
) -> PreparedArrays:
    """Meta without its key; the frames, uint8 [frames, rows, columns, 3], and the spectrum of the
    sound track where the recipe asks for it; and the cost in the encoders."""
    if isinstance(recipe, SquareVideo):
        return _prepare_square_video(data, recipe, limits)
    sampled = sample_frames(data, recipe.frames, _grid_rule(recipe), recipe.resample, limits)
    count, rows, columns, _ = sampled.pixels.shape
    shape = (count // recipe.frames.patch, rows // recipe.patch, columns // recipe.patch)
    cost = shape[0] * shape[1] * shape[2]
    frame_tokens, audio_tokens = cost // recipe.merge**2, 0
    arrays: list[NDArray[Any]] = [sampled.pixels]
    if recipe.with_audio and recipes.audio is not None and not is_frame_list(data):
        wave = audio.decode_audio(data, VIDEO_CONTAINERS, recipes.audio, limits)
        audio_frames = 0 if wave is None else mel.frame_count(len(wave), recipes.audio)
        audio_tokens = mel.token_count(audio_frames)
        if wave is not None and audio_tokens:  # else it is too short to be encoded
            arrays.append(mel.mel_spectrum(wave, recipes.audio))
            cost += audio_frames
    times = patch_times(recipe.frames, sampled.indices, sampled.total, sampled.rate)
    tokens = frame_tokens + audio_tokens
    return MediaMeta(b"", tokens, shape, "video", times, audio_tokens), arrays, cost


def _prepare_square_video(data: memoryview, recipe: SquareVideo, limits: Limits) -> PreparedArrays:
    square = recipe.square

    def crop(count: int, height: int, width: int) -> FrameCrop:
        short, long = min(height, width), max(height, width)
        if long > MAX_ASPECT * short:
            raise InvalidMedia(
                f"The video's frames are {width} x {height}: one side is over {MAX_ASPECT} "
                "times the other. Crop or pad them."
            )
        edge = int(square.short * long / short)
        wide = (square.short, edge) if height <= width else (edge, square.short)
        return FrameCrop(*wide, square.side, square.side)

    sampled = sample_frames(data, recipe.frames, crop, square.resample, limits)
    count = len(sampled.pixels)
    times = patch_times(recipe.frames, sampled.indices, sampled.total, sampled.rate)
    meta = MediaMeta(b"", count * recipe.frame_tokens, (count,), "video", times)
    return meta, [sampled.pixels], count * (square.side // square.patch) ** 2


def _grid_rule(recipe: GridVideo) -> _CropRule:
    unit, low, high = recipe.patch * recipe.merge, recipe.min_pixels, recipe.max_pixels
    patch = recipe.frames.patch

    def crop(count: int, height: int, width: int) -> FrameCrop:
        if recipe.per_frame:
            rows, columns = fit_to_grid(height, width, unit, low, high)
        else:
            if min(height, width) < unit:  # the stock rule enlarges these first
                grow = max(unit / height, unit / width)
                height, width = int(height * grow), int(width * grow)
            count = max(count, patch)
            padded = round(count / patch) * patch
            rows, columns = fit_to_grid(height, width, unit, low, high, count, padded)
        return FrameCrop(rows, columns, rows, columns)

    return crop


def sample_frames(
    data: memoryview, rule: FrameSampling, crop_rule: _CropRule, resample: int, limits: Limits
) -> SampledFrames:
    """The frames that ``rule`` chooses, each resized; the last one repeated to fill a patch."""
    if is_frame_list(data):
        return _take_listed(data, rule, crop_rule, resample, limits)
    with open_container(data, "video", VIDEO_CONTAINERS, limits) as container:
        track = read_track(container, data, limits)
        try:
            total = track.frames
            indices = _choose(rule, track, total, limits)
            pixels = resize_frames(
                to_rgb(seek_frames(track, indices)), len(indices), rule, crop_rule, resample
            )
        except IrregularTrack:
            total = count_frames(track)
            indices = _choose(rule, track, total, limits)
            pixels = resize_frames(
                to_rgb(scan_frames(track, indices)), len(indices), rule, crop_rule, resample
            )
    return SampledFrames(pixels, indices, total, track.rate)


def _take_listed(
    data: memoryview, rule: FrameSampling, crop_rule: _CropRule, resample: int, limits: Limits
) -> SampledFrames:
    """All frames of a list, as if the model's own rule had sampled them."""
    files = split_frames(data)
    if len(files) > limits.video_sampled:
        raise _too_many(len(files), limits)
    shown = (np.asarray(decode_image(file, limits.image_pixels)) for file in files)
    pixels = resize_frames(shown, len(files), rule, crop_rule, resample)
    return SampledFrames(pixels, list(range(len(files))), len(files), rule.fps or LISTED_FPS)


def _too_many(count: int, limits: Limits) -> TooManyFrames:
    return TooManyFrames(
        f"{count} frames of the video would be looked at: {limits.video_sampled} is the most. "
        "Send a shorter video."
    )


def _choose(rule: FrameSampling, track: VideoTrack, total: int, limits: Limits) -> list[int]:
    indices = choose_frames(rule, total, track.rate)
    if len(indices) > limits.video_sampled:
        raise _too_many(len(indices), limits)
    return indices


def resize_frames(
    shown: Iterator[Pixels], count: int, rule: FrameSampling, crop_rule: _CropRule, resample: int
) -> Pixels:
    """``count`` frames of one size [height, width, 3], resized one by one as they arrive."""
    first = next(shown)
    crop = crop_rule(count, *first.shape[:2])
    whole = -(-count // rule.patch) * rule.patch
    pixels = np.empty((whole, crop.rows, crop.columns, 3), np.uint8)
    pixels[0] = crop.apply(first, resample)
    for number, picture in enumerate(shown, 1):
        if picture.shape != first.shape:
            raise InvalidMedia("The video's frames change their size midway.")
        pixels[number] = crop.apply(picture, resample)
    pixels[count:] = pixels[count - 1]
    return pixels


def choose_frames(frames: FrameSampling, total: int, fps: float) -> list[int]:
    """Indices of the frames to sample from ``total`` of them, rising, each once."""
    if frames.rule in ("even", "rate"):
        count = min(frames.count or total, total)
        if frames.rule == "rate":
            count = min(count, max(1, int(total / fps * frames.fps)))
        return [number * total // count for number in range(count)]
    if frames.rule == "qwen3":
        count = frames.count or int(total / fps * frames.fps)
        if not frames.count:
            count = min(max(count, frames.least), frames.most)
        return [int(at) for at in np.linspace(0, total - 1, min(count, total)).round()]
    assert frames.rule == "qwen2", frames.rule
    return _qwen2(frames, total, fps)


def _qwen2(frames: FrameSampling, total: int, fps: float) -> list[int]:
    whole = frames.patch
    most = min(frames.most, total) // whole * whole
    if frames.count:
        asked: float = min(round(frames.count / whole) * whole, total)
    else:
        asked = min(max(total / fps * frames.fps, frames.least), most, total)
    # a clip shorter than one temporal patch is taken whole: the stock rule does not cover it
    count = math.floor(asked / whole) * whole or min(whole, total)
    # as torch.arange in 32 bits: the same products round to the same integers
    return [int(at) for at in (np.arange(count) * (total / count)).astype(np.float32)]


def patch_times(
    frames: FrameSampling, indices: list[int], total: int, fps: float
) -> tuple[float, ...]:
    """When each temporal patch is shown, in seconds from the start."""
    patches = -(-len(indices) // frames.patch)
    if frames.rule == "qwen3":
        padded = indices + [indices[-1]] * (patches * frames.patch - len(indices))
        starts = range(0, len(padded), frames.patch)
        return tuple((padded[at] / fps + padded[at + frames.patch - 1] / fps) / 2 for at in starts)
    step = frames.patch / (len(indices) / total * fps)
    return tuple(number * step for number in range(patches))
