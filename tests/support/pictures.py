"""Pictures for tests by number: plain colours, noise, gradients and shapes of many sizes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def draw(index: int, width: int | None = None, height: int | None = None) -> Image.Image:
    """The picture of this number: always the same, unlike every other."""
    rng = np.random.default_rng(index)
    wide, high = (int(side) for side in rng.integers(20, 300, 2))
    wide, high = width or wide, height or high
    pixels = np.empty((high, wide, 3), np.uint8)
    pixels[:] = rng.integers(0, 256, 3)
    if index % 4 == 1:
        pixels = rng.integers(0, 256, pixels.shape, dtype=np.uint8)
    elif index % 4 == 2:
        pixels[..., 0] = np.linspace(0, 255, wide)
        pixels[..., 1] = np.linspace(0, 255, high)[:, None]
    elif index % 4 == 3:
        top, left = rng.integers(0, max(1, high // 2)), rng.integers(0, max(1, wide // 2))
        pixels[top : top + high // 3, left : left + wide // 3] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "PNG", **settings: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()
