"""Resizing as the stock torchvision processors do it, to the bit, without torchvision.

Imports torch when it is first used: only what must equal those processors pays for it.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MODES = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them


def resize(pixels: NDArray[np.uint8], height: int, width: int, resample: int) -> NDArray[np.uint8]:
    """uint8 [h, w, 3] to [height, width, 3]."""
    if pixels.shape[:2] == (height, width):
        return pixels
    torch = _torch()
    # channels last is how the pixels lie already, and torch's fast path for 8 bit
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    made: Any = torch.nn.functional.interpolate(
        image, (height, width), mode=_MODES[resample], align_corners=False, antialias=True
    )
    result: NDArray[np.uint8] = made[0].permute(1, 2, 0).numpy()
    return result


@cache
def _torch() -> ModuleType:
    import torch

    torch.set_num_threads(1)  # a pool has as many processes as it has cores
    return torch
