"""Qwen-VL's pictures: whole merged patches, as near to the picture's own size as the limits allow.

The resizing rule and the arithmetic are the stock processor's, bit for bit: of the default one,
which resizes with torch. Ends with 8-bit pixels in rows: their order in patches and their tone are
the encoder's. Knows no files.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from triptych.errors import ImageTooSmall
from triptych.media.resize import pixels_of, resize
from triptych.messages import MediaMeta
from triptych.recipe import GridImage

MAX_ASPECT = 200  # of Qwen's own resizing rule


def fit_to_grid(
    height: int,
    width: int,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    padded: int = 1,
) -> tuple[int, int]:
    """Height and width after resizing: multiples of ``unit``, area within limits.

    ``frames``: how many pictures share the limits; ``padded``: with those that fill the last
    temporal patch.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageTooSmall(
            f"The picture is {width} x {height}: one side is over {MAX_ASPECT} times the other, "
            "which this model cannot take. Crop or pad it."
        )
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if padded * tall * wide > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        tall = max(unit, math.floor(height / shrink / unit) * unit)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
    elif padded * tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        tall = math.ceil(height * grow / unit) * unit
        wide = math.ceil(width * grow / unit) * unit
    return tall, wide


def prepare_grid_image(
    image: Image.Image, recipe: GridImage
) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, uint8 [height, width, 3], and how many patches that is."""
    unit = recipe.patch * recipe.merge
    height, width = fit_to_grid(
        image.height, image.width, unit, recipe.min_pixels, recipe.max_pixels
    )
    pixels = resize(pixels_of(image), height, width, recipe.resample)
    rows, columns = height // recipe.patch, width // recipe.patch
    tokens = rows * columns // recipe.merge**2
    return MediaMeta(b"", tokens, (1, rows, columns)), [pixels], rows * columns
