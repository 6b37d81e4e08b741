"""Pictures to what the vision towers take, bit for bit as the stock processors give it.

Resizing is Pillow's, on 8-bit pixels. What the stock processors then do in floats (rescale,
subtract the mean, divide by the deviation) is a function of one 8-bit value and its channel, so it
is looked up in a table of 256 rows: exact, and one pass. Knows no model, no torch and no files but
the processor's settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from triptych.engines.torch.family import Pixels
from triptych.errors import ImageTooSmall, UnsupportedModel
from triptych.model import read_json

MAX_ASPECT = 200  # of Qwen's own resizing rule
EXACT_ASPECT = 16  # longer pictures are not resized whole before CLIP's crop
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def read_settings(folder: Path) -> dict[str, Any]:
    """The image processor's settings of a checkpoint, wherever its transformers has put them."""
    settings = read_json(folder / "preprocessor_config.json")
    nested = read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else settings


@dataclass(frozen=True, slots=True)
class Tone:
    """The stock float steps (rescale, normalise) as a table: [3, 256] float32."""

    table: np.ndarray

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Tone:
        table = np.repeat(np.arange(256, dtype=np.float64)[None], 3, axis=0)
        if settings.get("do_rescale", True):
            table *= settings.get("rescale_factor", 1 / 255)
        table = table.astype(np.float32)  # the stock processors round here, then go on in float32
        if settings.get("do_normalize", True):
            mean = np.array(settings.get("image_mean") or CLIP_MEAN, dtype=np.float32)
            std = np.array(settings.get("image_std") or CLIP_STD, dtype=np.float32)
            table = (table - mean[:, None]) / std[:, None]
        return cls(table)


class GridPreprocess:
    """Qwen-VL: a picture keeps its shape, rounded to whole merged patches, and becomes patches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        _refuse(settings, {"do_resize": True, "do_convert_rgb": True})
        size = settings.get("size") or {}
        self.min_pixels: int = (
            settings.get("min_pixels")
            or size.get("shortest_edge")
            or size.get("min_pixels")
            or 56 * 56
        )
        self.max_pixels: int = (
            settings.get("max_pixels")
            or size.get("longest_edge")
            or size.get("max_pixels")
            or 28 * 28 * 1280
        )
        self.patch: int = settings.get("patch_size", 14)
        self.frames: int = settings.get("temporal_patch_size", 2)
        self.merge: int = settings.get("merge_size", 2)
        self._resample = _resample(settings)
        self._tone = Tone.read(settings)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: multiples of patch times merge, area within limits."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ImageTooSmall(
                f"The image is {width} x {height}: one side is over {MAX_ASPECT} times the other, "
                "which this model cannot take. Crop or pad it."
            )
        unit = self.patch * self.merge
        fitted = round(height / unit) * unit, round(width / unit) * unit
        area = fitted[0] * fitted[1]
        if area > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            return (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        if area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return fitted

    def __call__(self, picture: np.ndarray) -> Pixels:
        height, width = self.size(*picture.shape[:2])
        image = Image.fromarray(picture).resize((width, height), self._resample)
        rows, columns, patch, merge = (
            height // self.patch,
            width // self.patch,
            self.patch,
            self.merge,
        )
        # 8-bit pixels are a quarter of the floats: put them in order first, then look them up.
        split = np.asarray(image).reshape(
            rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        ordered = np.ascontiguousarray(split.transpose(0, 3, 1, 4, 6, 2, 5))
        ordered = ordered.reshape(rows * columns, 3, patch * patch)
        values = np.empty((rows * columns, 3, self.frames, patch * patch), dtype=np.float32)
        for channel in range(3):
            values[:, channel] = self._tone.table[channel][ordered[:, channel]][:, None]
        return Pixels(
            values=values.reshape(rows * columns, -1),
            grid=(1, rows, columns),
            tokens=rows * columns // merge**2,
            patches=rows * columns,
        )


class SquarePreprocess:
    """CLIP: the shorter side is brought to size and the middle square is kept."""

    def __init__(self, settings: Mapping[str, Any], patch: int, extra_tokens: int) -> None:
        _refuse(
            settings,
            {"do_resize": True, "do_center_crop": True, "do_convert_rgb": True, "do_pad": False},
        )
        size, crop = settings.get("size", 224), settings.get("crop_size", 224)
        self.short: int = size if isinstance(size, int) else size.get("shortest_edge", 0)
        self.side: int = crop if isinstance(crop, int) else crop.get("height", 0)
        if self.short < self.side or (isinstance(crop, dict) and crop.get("width") != self.side):
            raise UnsupportedModel(
                f"the image processor resizes to {size} and crops to {crop}; only a shortest edge "
                "that is at least as long as a square crop is supported"
            )
        self.tokens = (self.side // patch) ** 2 + extra_tokens
        self.patches = (self.side // patch) ** 2
        self._resample = _resample(settings)
        self._tone = Tone.read(settings)

    def __call__(self, picture: np.ndarray) -> Pixels:
        height, width = picture.shape[:2]
        tall = self.short if height <= width else int(self.short * height / width)
        wide = self.short if width <= height else int(self.short * width / height)
        planes = self._middle(Image.fromarray(picture), tall, wide).transpose(2, 0, 1)
        values = np.empty(planes.shape, dtype=np.float32)
        for channel in range(3):
            values[channel] = self._tone.table[channel][planes[channel]]
        return Pixels(values=values, grid=(), tokens=self.tokens, patches=self.patches)

    def _middle(self, image: Image.Image, tall: int, wide: int) -> np.ndarray:
        """The middle square [side, side, 3] of the picture resized to tall x wide."""
        side, top, left = self.side, (tall - self.side) // 2, (wide - self.side) // 2
        if max(tall, wide) <= EXACT_ASPECT * self.short:
            whole = np.asarray(image.resize((wide, tall), self._resample))
            return whole[top : top + side, left : left + side]
        # Resized whole, a 1 x 4096 picture would have 400 million pixels, so here only the square
        # is. Pillow rounds the box to float32: a pixel may be off by one of 255.
        across, down = image.width / wide, image.height / tall
        box = (left * across, top * down, (left + side) * across, (top + side) * down)
        return np.asarray(image.resize((side, side), self._resample, box=box))


def _resample(settings: Mapping[str, Any]) -> Image.Resampling:
    return Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))


def _refuse(settings: Mapping[str, Any], needed: Mapping[str, bool]) -> None:
    for name, value in needed.items():
        if (given := settings.get(name)) is not None and given is not value:
            raise UnsupportedModel(f"the image processor's {name}={given} is not supported")
