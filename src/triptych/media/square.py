"""CLIP's pictures: the shorter side is brought to size and the middle square is kept.

Resizing is Pillow's, on 8-bit pixels, as in the stock processor. Knows no files and no tone.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from triptych.messages import MediaMeta
from triptych.recipe import SquareImage

EXACT_ASPECT = 16  # longer pictures are not resized whole before the crop


def prepare(image: Image.Image, recipe: SquareImage) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, uint8 [side, side, 3], and how many patches that is."""
    patches = (recipe.side // recipe.patch) ** 2
    return MediaMeta(b"", patches + recipe.extra_tokens), [middle(image, recipe)], patches


def middle(image: Image.Image, recipe: SquareImage) -> np.ndarray:
    """The middle square, uint8 [side, side, 3], of the picture resized to its shortest edge."""
    short, side, height, width = recipe.short, recipe.side, image.height, image.width
    tall = short if height <= width else int(short * height / width)
    wide = short if width <= height else int(short * width / height)
    top, left = (tall - side) // 2, (wide - side) // 2
    if max(tall, wide) <= EXACT_ASPECT * short:
        whole = np.asarray(image.resize((wide, tall), recipe.resample))
        return np.ascontiguousarray(whole[top : top + side, left : left + side])
    # Resized whole, a 1 x 4096 picture would have 400 million pixels, so here only the square
    # is. Pillow rounds the box to float32: a pixel may be off by one of 255.
    across, down = width / wide, height / tall
    box = (left * across, top * down, (left + side) * across, (top + side) * down)
    return np.asarray(image.resize((side, side), recipe.resample, box=box))
