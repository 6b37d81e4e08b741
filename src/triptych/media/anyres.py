"""LLaVA-NeXT's pictures: the whole as one square, then tiles of it at the best resolution.

Sizes, order of tiles and arithmetic are the stock default processor's, bit for bit. Ends with 8-bit
pixels; padding is black before the tone is applied, as there. Knows no files.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from triptych.media import square
from triptych.media.resize import pixels_of, resize
from triptych.messages import MediaMeta
from triptych.recipe import AnyresImage


def prepare_anyres_image(
    image: Image.Image, recipe: AnyresImage
) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, uint8 [tiles, side, side, 3], and how many patches that is."""
    height, width = image.height, image.width
    canvas = best_anyres_canvas(height, width, recipe.pinpoints)
    tiles = _tiles(pixels_of(image), canvas, recipe)
    tokens = anyres_token_count(height, width, recipe)
    patches = len(tiles) * (recipe.square.side // recipe.square.patch) ** 2
    return MediaMeta(b"", tokens, (height, width)), [np.stack(tiles)], patches


def best_anyres_canvas(
    height: int, width: int, pinpoints: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """The (height, width) that keeps most of the picture's pixels, then wastes least of its own."""

    def merit(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(pinpoints, key=merit)


def anyres_token_count(height: int, width: int, recipe: AnyresImage) -> int:
    """Rows of the embedding: the whole, the tiles without their padding, and their line ends."""
    square = recipe.square
    canvas = best_anyres_canvas(height, width, recipe.pinpoints)
    side = square.side // square.patch
    rows, columns = unpadded_size(
        height, width, canvas[0] // square.side * side, canvas[1] // square.side * side
    )
    return side * side + square.extra_tokens + rows * columns + rows


def unpadded_size(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Of rows x columns of features those that show the picture, as the stock model cuts them."""
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - (columns - kept) // 2 * 2


def _tiles(pixels: np.ndarray, canvas: tuple[int, int], recipe: AnyresImage) -> list[np.ndarray]:
    one = recipe.square
    whole = resize(pixels, one.short, one.short, one.resample)
    tall, wide = _inside(pixels.shape[0], pixels.shape[1], canvas)
    top, left = (canvas[0] - tall) // 2, (canvas[1] - wide) // 2
    sheet = np.zeros((*canvas, 3), np.uint8)
    sheet[top : top + tall, left : left + wide] = resize(pixels, tall, wide, one.resample)
    parts = [
        sheet[top : top + one.side, left : left + one.side]
        for top in range(0, canvas[0], one.side)
        for left in range(0, canvas[1], one.side)
    ]
    return [square.center_crop(part, one) for part in (whole, *parts)]


def _inside(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest height and width of the picture's shape that the canvas holds."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])
