"""Pictures to measure with: made from a seed, and as hard to compress as photographs.

Sums of noise at all scales, as clouds and foliage are, with a little grain on top.
"""

from __future__ import annotations

import base64
import functools
import io
from typing import Any

FALL = 0.62  # how much weaker each finer scale is
CONTRAST, GRAIN = 48.0, 7.0  # of 8-bit values: deviation of the whole, and of the finest noise


@functools.lru_cache(maxsize=2)
def scene(seed: int, width: int, height: int) -> Any:
    """8-bit pixels [height, width, 3]."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    longest, side, strength = max(width, height), 4, 1.0
    while side < longest:
        rows, columns = (max(2, side * length // longest) for length in (height, width))
        for channel in range(3):
            coarse = Image.fromarray(noise.standard_normal((rows, columns), np.float32))
            total[..., channel] += strength * np.asarray(coarse.resize((width, height), 2))
        side, strength = 2 * side, FALL * strength
    total *= CONTRAST / total.std()
    total += GRAIN * noise.standard_normal(total.shape, np.float32) + 128
    return np.clip(total, 0, 255).astype(np.uint8)


def jpeg(pixels: Any, quality: int = 88) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def large(number: int) -> bytes:
    """One of many JPEG files of 4000 x 3000: a scene with its mirror images, shifted."""
    import numpy as np

    quarter = scene(0, 2000, 1500)
    half = np.concatenate((quarter, quarter[::-1]))
    whole = np.concatenate((half, half[:, ::-1]), axis=1)
    return jpeg(np.roll(whole, (37 * number, 61 * number), axis=(0, 1)))


@functools.cache
def photo(seed: int, width: int, height: int) -> bytes:
    """A JPEG file."""
    return jpeg(scene(seed, width, height))


def data_url(picture: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode()
