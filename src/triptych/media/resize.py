"""Resizing as the stock torchvision processors do it, to the bit, without torchvision.

Imports torch when it is first used or, where that would come too late, by ``load``.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_MODES = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """A picture of mode RGB as uint8 [height, width, 3], not to be written to."""
    return np.asarray(image)


def resize(pixels: NDArray[np.uint8], height: int, width: int, resample: int) -> NDArray[np.uint8]:
    """uint8 [h, w, 3] to [height, width, 3]."""
    if pixels.shape[:2] == (height, width):
        return pixels
    torch = load_torch()
    with warnings.catch_warnings(action="ignore"):  # that it may not be written to
        given = torch.from_numpy(pixels)
    try:
        # In this order torch sees that the channels lie last, as its fast path for 8 bit has them.
        made: Any = torch.nn.functional.interpolate(
            given[None].permute(0, 3, 1, 2),
            (height, width),
            mode=_MODES[resample],
            align_corners=False,
            antialias=True,
        )
    except RuntimeError as error:
        if "allocate memory" in str(error):  # how torch says it
            raise MemoryError from None
        raise
    result: NDArray[np.uint8] = made[0].permute(1, 2, 0).numpy()
    return result


@cache
def load_torch() -> ModuleType:
    """Torch, for one core: a pool has as many processes as it has cores."""
    import torch

    torch.set_num_threads(1)
    return torch
