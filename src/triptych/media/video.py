"""From a video file to the frames that a model looks at: 8-bit pixels, sampled and resized.

Each frame is resized as it comes out of the decoder: never are all of them held as they were. Runs
in the sandbox; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.config import Limits
from triptych.errors import InvalidMedia, TooManyFrames
from triptych.media import audio, frames, grid, mel
from triptych.media.container import VIDEO_CONTAINERS, open_container
from triptych.media.resize import resize
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

Pixels = NDArray[np.uint8]
_CropRule = Callable[[int, int, int], "FrameCrop"]


@dataclass(frozen=True, slots=True)
class FrameCrop:
    """What is made of each frame: resized to height and width, then the middle of that."""

    height: int
    width: int
    rows: int
    columns: int

    def of(self, pixels: Pixels, resample: int) -> Pixels:
        whole = resize(pixels, self.height, self.width, resample)
        top, left = (self.height - self.rows) // 2, (self.width - self.columns) // 2
        return whole[top : top + self.rows, left : left + self.columns]


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """Frames as the encoder gets them, and where in the clip they come from."""

    pixels: Pixels  # [frames, rows, columns, 3], whole temporal patches
    indices: list[int]
    total: int
    rate: float


def prepare_video(
    data: memoryview, recipe: VideoRecipe, recipes: Recipes, limits: Limits
) -> tuple[MediaMeta, list[NDArray[Any]], int]:
    """The frames that the recipe asks for, uint8 [frames, rows, columns, 3]; a sound track's
    spectrum after them where the recipe wants it. The media key is left out."""
    if isinstance(recipe, SquareVideo):
        return _square(data, recipe, limits)
    taken = sample_frames(data, recipe.frames, _grid(recipe), recipe.resample, limits)
    count, rows, columns, _ = taken.pixels.shape
    shape = (count // recipe.frames.patch, rows // recipe.patch, columns // recipe.patch)
    cost = shape[0] * shape[1] * shape[2]
    seen, sound = cost // recipe.merge**2, 0
    arrays: list[NDArray[Any]] = [taken.pixels]
    if recipe.sound and recipes.audio is not None:
        wave = audio.decode_audio(data, VIDEO_CONTAINERS, recipes.audio, limits)
        lasts = 0 if wave is None else mel.frame_count(len(wave), recipes.audio)
        if wave is not None and (sound := mel.token_count(lasts)):  # else too short to be heard
            arrays.append(mel.mel_spectrum(wave, recipes.audio))
            cost += lasts
    times = frames.patch_times(recipe.frames, taken.indices, taken.total, taken.rate)
    return MediaMeta(b"", seen + sound, shape, "video", times, sound), arrays, cost


def _square(
    data: memoryview, recipe: SquareVideo, limits: Limits
) -> tuple[MediaMeta, list[NDArray[Any]], int]:
    square = recipe.square

    def shape(count: int, height: int, width: int) -> FrameCrop:
        short, long = min(height, width), max(height, width)
        if long > grid.MAX_ASPECT * short:
            raise InvalidMedia(
                f"The video's frames are {width} x {height}: one side is over {grid.MAX_ASPECT} "
                "times the other. Crop or pad them."
            )
        edge = int(square.short * long / short)
        wide = (square.short, edge) if height <= width else (edge, square.short)
        return FrameCrop(*wide, square.side, square.side)

    taken = sample_frames(data, recipe.frames, shape, square.resample, limits)
    count = len(taken.pixels)
    times = frames.patch_times(recipe.frames, taken.indices, taken.total, taken.rate)
    meta = MediaMeta(b"", count * recipe.frame_tokens, (count,), "video", times)
    return meta, [taken.pixels], count * (square.side // square.patch) ** 2


def _grid(recipe: GridVideo) -> _CropRule:
    unit, low, high = recipe.patch * recipe.merge, recipe.min_pixels, recipe.max_pixels
    patch = recipe.frames.patch

    def shape(count: int, height: int, width: int) -> FrameCrop:
        if recipe.per_frame:
            rows, columns = grid.fit_to_grid(height, width, unit, low, high)
        else:
            if min(height, width) < unit:  # the stock rule enlarges these before all else
                grow = max(unit / height, unit / width)
                height, width = int(height * grow), int(width * grow)
            count = max(count, patch)
            padded = round(count / patch) * patch
            rows, columns = grid.fit_to_grid(height, width, unit, low, high, count, padded)
        return FrameCrop(rows, columns, rows, columns)

    return shape


def sample_frames(
    data: memoryview, rule: FrameSampling, shape: _CropRule, resample: int, limits: Limits
) -> SampledFrames:
    """The frames that ``rule`` chooses, each resized; the last repeated to a whole patch."""
    with open_container(data, "video", VIDEO_CONTAINERS, limits) as container:
        clip = read_track(container, data, limits)
        try:
            total = clip.frames
            indices = _choose(rule, clip, total, limits)
            pixels = resize_frames(
                to_rgb(seek_frames(clip, indices)), len(indices), rule, shape, resample
            )
        except IrregularTrack:
            total = count_frames(clip)
            indices = _choose(rule, clip, total, limits)
            pixels = resize_frames(
                to_rgb(scan_frames(clip, indices)), len(indices), rule, shape, resample
            )
    return SampledFrames(pixels, indices, total, clip.rate)


def _choose(rule: FrameSampling, clip: VideoTrack, total: int, limits: Limits) -> list[int]:
    indices = frames.choose_frames(rule, total, clip.rate)
    if len(indices) > limits.video_sampled:
        raise TooManyFrames(
            f"{len(indices)} frames of the video would be looked at: {limits.video_sampled} is "
            "the most. Send a shorter video."
        )
    return indices


def resize_frames(
    shown: Iterator[Pixels], count: int, rule: FrameSampling, shape: _CropRule, resample: int
) -> Pixels:
    """``count`` frames of one size [height, width, 3], resized one by one as they come."""
    first = next(shown)
    cut = shape(count, *first.shape[:2])
    whole = -(-count // rule.patch) * rule.patch
    pixels = np.empty((whole, cut.rows, cut.columns, 3), np.uint8)
    pixels[0] = cut.of(first, resample)
    for number, picture in enumerate(shown, 1):
        if picture.shape != first.shape:
            raise InvalidMedia("The video's frames change their size midway.")
        pixels[number] = cut.of(picture, resample)
    pixels[count:] = pixels[count - 1]
    return pixels
