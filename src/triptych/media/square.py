"""CLIP's pictures: the shorter side is brought to size and the middle square is kept.

Resizing is torch's, on 8-bit pixels, as in the stock default processor. Knows no files and no tone.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from triptych.media.resize import pixels_of, resize
from triptych.messages import MediaMeta
from triptych.recipe import SquareImage

EXACT_ASPECT = 16  # longer pictures are not resized whole before the crop


def prepare_square_image(
    image: Image.Image, recipe: SquareImage
) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, uint8 [side, side, 3], and how many patches that is."""
    patches = (recipe.side // recipe.patch) ** 2
    pixels = center_crop(pixels_of(image), recipe)
    return MediaMeta(b"", patches + recipe.extra_tokens), [pixels], patches


def center_crop(pixels: np.ndarray, recipe: SquareImage) -> np.ndarray:
    """The middle square, uint8 [side, side, 3], of the picture resized to its shortest edge."""
    short, side, (height, width, _) = recipe.short, recipe.side, pixels.shape
    tall = short if height <= width else int(short * height / width)
    wide = short if width <= height else int(short * width / height)
    top, left = (tall - side) // 2, (wide - side) // 2
    if max(tall, wide) <= EXACT_ASPECT * short:
        return resize(pixels, tall, wide, recipe.resample)[top : top + side, left : left + side]
    # Resized whole, a 1 x 4096 picture would have 400 million pixels, so here only the square
    # is. Torch knows no part of a picture, and Pillow's kernel is off by up to two of 255.
    across, down = width / wide, height / tall
    box = (left * across, top * down, (left + side) * across, (top + side) * down)
    return np.asarray(Image.fromarray(pixels).resize((side, side), recipe.resample, box=box))
