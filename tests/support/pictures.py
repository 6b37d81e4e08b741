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


def with_scans(count: int, side: int = 512) -> bytes:
    """A progressive JPEG with so many scans: its last one, over and over."""
    data = encoded(draw(3, side, side), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scans = data.count(b"\xff\xda")
    return data[:-2] + data[last:-2] * (count - scans) + data[-2:]


def with_few_blocks(side: int = 4000, **settings: object) -> bytes:
    """A JPEG whose data end after a few blocks, as if that were all of it."""
    data = encoded(draw(1, side, 8), "JPEG", **settings)
    frame = data.index(b"\xff\xc2" if settings.get("progressive") else b"\xff\xc0")
    return data[: frame + 5] + side.to_bytes(2) + data[frame + 7 :]
