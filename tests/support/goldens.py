"""Numbers that the stock processors gave, and the pictures that they were given.

The stock video processors need torchvision, which not every machine has: tools/make_goldens.py ran
them where it was, over pictures that a formula draws, and recorded a digest and some rows of each
result. Needs numpy alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "goldens"


@dataclass(frozen=True)
class Golden:
    """One call of a stock processor."""

    name: str
    processor: str
    settings: dict[str, Any]  # that the processor was constructed with
    shape: tuple[int, ...]  # of what it was given: [frames,] height, width
    result: dict[str, Any]  # shapes, digests and small values of what it gave
    rows: np.ndarray  # [2, n]: every ``step``-th value of the flat result, 8 bit and with its tone
    step: int


def picture(height: int, width: int, frame: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: slopes, edges and noise, the same everywhere and for ever."""
    y, x, c = np.ogrid[:height, :width, :3]
    y, x, c = (axis.astype(np.uint64) for axis in (y, x, c))
    word = (y * 73856093) ^ (x * 19349663) ^ (c * 83492791) ^ np.uint64(frame * 2654435761 + 12345)
    noise = ((word * 6364136223846793005 + 1442695040888963407) >> np.uint64(40)) & np.uint64(63)
    slope = (y * (c + 1) * 160 // height + x * (3 - c) * 60 // width + np.uint64(frame * 9)) % 192
    edge = np.where((x // 16 + y // 24 + np.uint64(frame)) % 5 == 0, np.uint64(150), np.uint64(0))
    return ((slope + noise + edge) % 256).astype(np.uint8)


def frames(count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3]."""
    return np.stack([picture(height, width, frame) for frame in range(count)])


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def load(file: str) -> list[Golden]:
    with np.load(FOLDER / file) as stored:
        about = json.loads(str(stored["about"]))
        return [
            Golden(**(fields | {"shape": tuple(fields["shape"]), "rows": stored[fields["name"]]}))
            for fields in about["goldens"]
        ]
