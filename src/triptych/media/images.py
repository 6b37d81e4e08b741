"""Decoded pictures to the pixels that each family of image encoders takes, as its recipe says.

Sizes, the order of tiles and the arithmetic equal those of the stock default image processors, bit
for bit: these resize with torch, and Pillow's kernel differs in one pixel of a hundred. The result
is 8-bit RGB; the encoder orders it in patches and normalizes it. Does not read files and does not
know models.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import ImageTooSmall
from triptych.messages import MediaMeta
from triptych.recipe import AnyresImage, GridImage, ImageRecipe, SquareImage, TiledImage

MAX_ASPECT = 200  # of Qwen's own resizing rule
EXACT_ASPECT = 16  # longer pictures are not resized whole before the crop
PATCHES_PER_TOKEN = 4  # in Llama 4's pixel shuffle
_RESAMPLE_MODES = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them

Pixels = NDArray[np.uint8]
PreparedArrays = tuple[MediaMeta, list[NDArray[Any]], int]  # meta without its key, arrays, cost

# The stock Llama 4 processor computes the canvas in float32 and the picture in float64. Since it
# rounds down, that shows: a side that belongs to the canvas is a float32 here.
_Bounds = tuple[int | np.float32, int | np.float32]


def prepare_image(image: Image.Image, recipe: ImageRecipe) -> PreparedArrays:
    """Meta without its key, one uint8 array, and the number of patches in it as its cost."""
    match recipe:
        case GridImage():
            return prepare_grid_image(image, recipe)
        case SquareImage():
            return prepare_square_image(image, recipe)
        case AnyresImage():
            return prepare_anyres_image(image, recipe)
        case TiledImage():
            return prepare_tiled_image(image, recipe)


# Qwen-VL: whole merged patches, as near to the picture's own size as the limits allow.


def prepare_grid_image(image: Image.Image, recipe: GridImage) -> PreparedArrays:
    """The array is [height, width, 3]."""
    unit = recipe.patch * recipe.merge
    height, width = fit_to_grid(
        image.height, image.width, unit, recipe.min_pixels, recipe.max_pixels
    )
    pixels = resize(np.asarray(image), height, width, recipe.resample)
    rows, columns = height // recipe.patch, width // recipe.patch
    tokens = rows * columns // recipe.merge**2
    return MediaMeta(b"", tokens, (1, rows, columns)), [pixels], rows * columns


def fit_to_grid(
    height: int,
    width: int,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    padded: int = 1,
) -> tuple[int, int]:
    """Height and width after resizing: multiples of ``unit``, with an area within the limits.

    ``frames``: how many pictures share the limits. ``padded``: the same with those that fill the
    last temporal patch.
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


# CLIP and LLaVA: the shorter side is resized to a fixed size, then the middle square is cut out.


def prepare_square_image(image: Image.Image, recipe: SquareImage) -> PreparedArrays:
    """The array is [side, side, 3]."""
    patches = (recipe.side // recipe.patch) ** 2
    pixels = center_crop(np.asarray(image), recipe)
    return MediaMeta(b"", patches + recipe.extra_tokens), [pixels], patches


def center_crop(pixels: Pixels, recipe: SquareImage) -> Pixels:
    """The middle square [side, side, 3] of the picture resized to its shortest edge."""
    short, side, (height, width, _) = recipe.short, recipe.side, pixels.shape
    tall = short if height <= width else int(short * height / width)
    wide = short if width <= height else int(short * width / height)
    top, left = (tall - side) // 2, (wide - side) // 2
    if max(tall, wide) <= EXACT_ASPECT * short:
        return resize(pixels, tall, wide, recipe.resample)[top : top + side, left : left + side]
    # Resized whole, a 1 x 4096 picture would have 400 million pixels: resize the square alone.
    # Torch cannot resize a part of a picture, and Pillow's kernel is off by up to two of 255.
    across, down = width / wide, height / tall
    box = (left * across, top * down, (left + side) * across, (top + side) * down)
    return np.asarray(Image.fromarray(pixels).resize((side, side), recipe.resample, box=box))


# LLaVA-NeXT: the whole picture as one square, then tiles of it at the best resolution. Padding is
# black before normalization.


def prepare_anyres_image(image: Image.Image, recipe: AnyresImage) -> PreparedArrays:
    """The array is [tiles, side, side, 3], the whole picture first."""
    height, width = image.height, image.width
    canvas = best_anyres_canvas(height, width, recipe.pinpoints)
    tiles = _anyres_tiles(np.asarray(image), canvas, recipe)
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


def _anyres_tiles(pixels: Pixels, canvas: tuple[int, int], recipe: AnyresImage) -> list[Pixels]:
    square = recipe.square
    whole = resize(pixels, square.short, square.short, square.resample)
    tall, wide = _fit_anyres(pixels.shape[0], pixels.shape[1], canvas)
    top, left = (canvas[0] - tall) // 2, (canvas[1] - wide) // 2
    sheet = np.zeros((*canvas, 3), np.uint8)
    sheet[top : top + tall, left : left + wide] = resize(pixels, tall, wide, square.resample)
    tiles = [
        sheet[top : top + square.side, left : left + square.side]
        for top in range(0, canvas[0], square.side)
        for left in range(0, canvas[1], square.side)
    ]
    return [center_crop(tile, square) for tile in (whole, *tiles)]


def _fit_anyres(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest height and width of the picture's shape that fit the canvas."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


# Llama 4: square tiles of the canvas that fits best, then the whole picture in one tile. Black
# where the canvas is larger than the picture.


def prepare_tiled_image(image: Image.Image, recipe: TiledImage) -> PreparedArrays:
    """The array is [tiles, side, side, 3], the whole picture last."""
    rows, columns = best_tile_grid(image.height, image.width, recipe)
    tiles = _tiles(np.asarray(image), rows, columns, recipe)
    tokens = len(tiles) * recipe.tile_tokens
    return MediaMeta(b"", tokens, (rows, columns)), [tiles], tokens * PATCHES_PER_TOKEN


def best_tile_grid(height: int, width: int, recipe: TiledImage) -> tuple[int, int]:
    """Rows and columns of tiles: least enlarged of those that enlarge, else least reduced.

    Of canvases that scale alike, the smallest. Scales are float32, as in the stock processor:
    whether two are equal depends on it.
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


def _tiles(pixels: Pixels, rows: int, columns: int, recipe: TiledImage) -> Pixels:
    side, (height, width) = recipe.side, pixels.shape[:2]
    bounds: _Bounds = np.float32(rows * side), np.float32(columns * side)
    if not recipe.resize_to_max_canvas:  # a small picture grows to one tile at most
        bounds = min(max(height, side), bounds[0]), min(max(width, side), bounds[1])
    tall, wide = _fit_tiles(height, width, bounds)
    sheet = np.zeros((rows * side, columns * side, 3), dtype=np.uint8)
    sheet[:tall, :wide] = resize(pixels, tall, wide, recipe.resample)
    tiles = sheet.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    if len(tiles) == 1:
        return tiles
    return np.concatenate([tiles, resize(pixels, side, side, recipe.resample)[None]])


def _fit_tiles(height: int, width: int, bounds: _Bounds) -> tuple[int, int]:
    """The largest height and width of the picture's shape within the bounds, at least 1."""
    across, down = bounds[1] / width, bounds[0] / height
    if across < down:
        return max(1, min(math.floor(height * across), int(bounds[0]))), int(bounds[1])
    return int(bounds[0]), max(1, min(math.floor(width * down), int(bounds[1])))


# Resizing as the stock torchvision processors do it, to the bit, without torchvision.


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """[h, w, 3] to [height, width, 3]."""
    if pixels.shape[:2] == (height, width):
        return pixels
    torch = load_torch()
    with warnings.catch_warnings(action="ignore"):  # the array is read-only
        source = torch.from_numpy(pixels)
    try:
        # Torch has a fast path for 8-bit pixels whose channels come last: permute, do not copy.
        resized: Any = torch.nn.functional.interpolate(
            source[None].permute(0, 3, 1, 2),
            (height, width),
            mode=_RESAMPLE_MODES[resample],
            align_corners=False,
            antialias=True,
        )
    except RuntimeError as error:
        if "allocate memory" in str(error):  # torch raises no MemoryError
            raise MemoryError from None
        raise
    result: Pixels = resized[0].permute(1, 2, 0).numpy()
    return result


@cache
def load_torch() -> ModuleType:
    """Torch with one thread: a pool has as many processes as it may use cores."""
    import torch

    torch.set_num_threads(1)
    return torch
