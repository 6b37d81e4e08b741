"""Llama 4's pictures: square tiles of the canvas that fits best, then the whole in one tile.

Sizes, order and arithmetic are the stock processor's, which resizes with torch: Pillow's kernel is
off by one in one pixel of a hundred. Ends with 8-bit pixels, black where the canvas is larger than
the picture. Knows no files.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from triptych.media.resize import pixels_of, resize
from triptych.messages import MediaMeta
from triptych.recipe import TiledImage

PATCHES_PER_TOKEN = 4  # patches that become one token

# The stock processor reckons with the canvas in float32 and with the picture in float64, and where
# it rounds down that shows: so a side is a float32 here where it is the canvas's.
_Bounds = tuple[int | np.float32, int | np.float32]


def prepare_tiled_image(
    image: Image.Image, recipe: TiledImage
) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, uint8 [tiles, side, side, 3], and about how many patches that is."""
    rows, columns = best_tile_grid(image.height, image.width, recipe)
    tiles = _tiles(pixels_of(image), rows, columns, recipe)
    tokens = len(tiles) * recipe.tile_tokens
    return MediaMeta(b"", tokens, (rows, columns)), [tiles], tokens * PATCHES_PER_TOKEN


def best_tile_grid(height: int, width: int, recipe: TiledImage) -> tuple[int, int]:
    """Rows and columns of tiles: least enlarged of those that enlarge, else least reduced.

    Of canvases that scale alike the smallest. Scales are float32, as the stock processor has them:
    whether two are alike depends on it.
    """
    canvases = _canvases(recipe.max_tiles)
    sides = np.array(canvases, dtype=np.float32) * np.float32(recipe.side)
    scales = (sides / np.array([height, width], dtype=np.float32)).min(axis=1)
    larger = scales[scales >= 1]
    if not len(larger):
        chosen = scales.max()
    else:
        chosen = larger.max() if recipe.resize_to_max_canvas else larger.min()
    alike = [canvas for canvas, scale in zip(canvases, scales, strict=True) if scale == chosen]
    return min(alike, key=lambda canvas: canvas[0] * canvas[1])


def _canvases(max_tiles: int) -> list[tuple[int, int]]:
    """Every (rows, columns) of at most so many tiles, in the stock order, which breaks ties."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_shape.setdefault(rows / columns, []).append((rows, columns))
    return [canvas for alike in by_shape.values() for canvas in alike]


def _tiles(pixels: np.ndarray, rows: int, columns: int, recipe: TiledImage) -> np.ndarray:
    side, (height, width) = recipe.side, pixels.shape[:2]
    bounds: _Bounds = np.float32(rows * side), np.float32(columns * side)
    if not recipe.resize_to_max_canvas:  # a small picture grows to one tile at most
        bounds = min(max(height, side), bounds[0]), min(max(width, side), bounds[1])
    tall, wide = _inside(height, width, bounds)
    sheet = np.zeros((rows * side, columns * side, 3), dtype=np.uint8)
    sheet[:tall, :wide] = resize(pixels, tall, wide, recipe.resample)
    tiles = sheet.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    if len(tiles) == 1:
        return tiles
    return np.concatenate([tiles, resize(pixels, side, side, recipe.resample)[None]])


def _inside(height: int, width: int, bounds: _Bounds) -> tuple[int, int]:
    """The largest height and width of the picture's shape within the bounds, at least 1."""
    across, down = bounds[1] / width, bounds[0] / height
    if across < down:
        return max(1, min(math.floor(height * across), int(bounds[0]))), int(bounds[1])
    return int(bounds[0]), max(1, min(math.floor(width * down), int(bounds[1])))
