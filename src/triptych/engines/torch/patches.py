"""8-bit pixels to what the vision towers take, on the encoder's device.

What the stock processors do in floats (rescale, subtract the mean, divide by the deviation) is a
function of one 8-bit value and its channel, so it is looked up in a table: exact on every device.
Knows no model and no files.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triptych.recipe import GridImage, GridVideo, Tone

LEVELS = 256
BAND = 256  # patches that are looked up at once


@functools.lru_cache(maxsize=16)
def levels(tone: Tone, fused: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What becomes of every 8-bit value, channel after channel: [3 * 256].

    The stock processors of pictures round to float32 after rescaling; those of videos (``fused``)
    scale mean and deviation instead.
    """
    values = np.repeat(np.arange(LEVELS, dtype=np.float64)[None], 3, axis=0)
    mean = np.array(tone.mean, np.float32)[:, None]
    std = np.array(tone.std, np.float32)[:, None]
    if fused:
        scale = np.float32(1.0 / tone.rescale)
        table = (values.astype(np.float32) - mean * scale) / (std * scale)
    else:
        table = ((values * tone.rescale).astype(np.float32) - mean) / std
    return torch.from_numpy(table.reshape(-1)).to(device, dtype)


def look_up(pixels: Tensor, table: Tensor, channel: int) -> Tensor:
    """8-bit values by the table; ``channel``: the axis of the colours, which has three places."""
    shape = [1] * pixels.ndim
    shape[channel] = 3
    index = pixels.int() + (torch.arange(3, dtype=torch.int32, device=pixels.device) * LEVELS).view(
        shape
    )
    return table.index_select(0, index.view(-1)).view(pixels.shape)


def planes(pixels: Tensor, table: Tensor) -> Tensor:
    """Square pictures, uint8 [pictures, side, side, 3] to [pictures, 3, side, side]."""
    return look_up(pixels.permute(0, 3, 1, 2).contiguous(), table, 1)


def patchify(pixels: Tensor, table: Tensor, patch: int, merge: int, temporal: int) -> Tensor:
    """Frames, uint8 [frames, height, width, 3], to patches [patches, 3 * temporal * patch * patch].

    Patches that are merged later stand side by side. A single frame is repeated.
    """
    frames, height, width, _ = pixels.shape
    seen = 1 if frames == 1 else temporal  # frames in a temporal patch that differ
    split = pixels.view(
        frames // seen,
        seen,
        height // patch // merge,
        merge,
        patch,
        width // patch // merge,
        merge,
        patch,
        3,
    )
    # 8-bit pixels are a quarter of the floats: put them in order first, then look them up.
    if pixels.device.type == "cpu" and table.dtype == torch.float32 and not patch % 2:
        order = split.numpy().transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return torch.from_numpy(
            _in_pairs(order.reshape(-1, 3, seen, patch * patch), table, temporal)
        )
    ordered = split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, seen, patch * patch)
    values = look_up(ordered, table, 1)
    if seen < temporal:
        values = values.expand(-1, -1, temporal, -1)
    return values.reshape(len(values), -1)


def _in_pairs(ordered: np.ndarray, table: Tensor, temporal: int) -> np.ndarray:
    """What ``look_up`` and repetition give, for a CPU: two values at a time, in its cache."""
    count, _, seen, size = ordered.shape
    index = ordered.reshape(count, 3, seen * size).view(np.uint16)
    result = np.empty((count, 3, temporal // seen, index.shape[2]), np.uint64)
    pairs = _pairs(table.numpy().tobytes())
    for start in range(0, count, BAND):
        for channel in range(3):
            some = index[start : start + BAND, channel]
            result[start : start + BAND, channel] = pairs[channel].take(some, mode="clip")[:, None]
    return result.view(np.float32).reshape(count, -1)


@functools.lru_cache(maxsize=4)
def _pairs(table: bytes) -> np.ndarray:
    """What becomes of every two 8-bit values: [3, 65536], two float32 in one element."""
    values = np.frombuffer(table, np.float32).reshape(3, LEVELS)
    both = np.arange(LEVELS**2, dtype="<u2").view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(values[:, both]).view(np.uint64)[..., 0]


def of_all(
    media: Sequence[Tensor], recipe: GridImage | GridVideo, temporal: int, like: Tensor
) -> Tensor:
    """Patches of media of one kind, one after another, on the device and in the type of ``like``.

    Pictures are uint8 [height, width, 3], videos [frames, height, width, 3].
    """
    table = levels(recipe.tone, isinstance(recipe, GridVideo), like.device, like.dtype)
    made = [
        patchify(
            (pixels if pixels.ndim == 4 else pixels[None]).to(like.device),
            table,
            recipe.patch,
            recipe.merge,
            temporal,
        )
        for pixels in media
    ]
    return torch.cat(made) if len(made) > 1 else made[0]
