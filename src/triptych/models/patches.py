"""8-bit pixels to the inputs of vision towers, on the encoder's device.

The stock processors rescale, subtract the mean and divide by the deviation in floats: a function of
one 8-bit value and its channel. A GPU looks it up in a table. A CPU, whose vector units compute
faster than they look up, computes it in bands that fit its cache. Both give the same bits. Knows no
model and no files.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triptych.recipe import GridImage, GridVideo, Normalization

PIXEL_LEVELS = 256


def _scaled(tone: Normalization) -> tuple[Tensor, Tensor]:
    """Mean and deviation of 8-bit values, [3, 1]: scaled by the stock processors before all else,
    so that an 8-bit value needs no rescaling itself."""
    scale = 1.0 / tone.rescale
    return torch.tensor(tone.mean)[:, None] * scale, torch.tensor(tone.std)[:, None] * scale


@functools.lru_cache(maxsize=16)
def normalization_table(tone: Normalization, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The normalized value of every 8-bit value, channel after channel: [3 * 256]."""
    mean, std = _scaled(tone)
    return ((torch.arange(PIXEL_LEVELS) - mean) / std).view(-1).to(device, dtype)


def normalize_by_table(pixels: Tensor, table: Tensor, channel: int) -> Tensor:
    """Look up 8-bit values in the table; ``channel``: the axis of the three colours."""
    shape = [1] * pixels.ndim
    shape[channel] = 3
    index = pixels.int() + (
        torch.arange(3, dtype=torch.int32, device=pixels.device) * PIXEL_LEVELS
    ).view(shape)
    return table.index_select(0, index.view(-1)).view(pixels.shape)


def to_planes(pixels: Tensor, table: Tensor) -> Tensor:
    """Square pictures, uint8 [pictures, side, side, 3] to [pictures, 3, side, side]."""
    return normalize_by_table(pixels.permute(0, 3, 1, 2).contiguous(), table, 1)


def patchify(
    pixels: Tensor, tone: Normalization, dtype: torch.dtype, patch: int, merge: int, temporal: int
) -> Tensor:
    """Frames, uint8 [frames, height, width, 3], to patches [patches, 3 * temporal * patch * patch].

    Patches that are merged later stand side by side. A single frame is repeated.
    """
    if pixels.device.type == "cpu":
        return patchify_in_bands(pixels, tone, dtype, patch, merge, temporal)
    return patchify_by_table(
        pixels, normalization_table(tone, pixels.device, dtype), patch, merge, temporal
    )


def patchify_by_table(
    pixels: Tensor, table: Tensor, patch: int, merge: int, temporal: int
) -> Tensor:
    """``patchify`` for a GPU: permutes the 8-bit pixels, a quarter of the floats, and looks them up
    then."""
    values = normalize_by_table(_ordered(pixels, patch, merge, temporal), table, 1)
    return values.expand(-1, -1, temporal, -1).flatten(1)


def raw_patches(pixels: Tensor, patch: int, merge: int, temporal: int) -> Tensor:
    """``patchify`` without rescaling and normalising."""
    return _ordered(pixels, patch, merge, temporal).expand(-1, -1, temporal, -1).flatten(1)


def _ordered(pixels: Tensor, patch: int, merge: int, temporal: int) -> Tensor:
    """Pixels [patches, 3, different frames of a temporal patch, pixels of a patch]."""
    frames, height, width, _ = pixels.shape
    seen = 1 if frames == 1 else temporal
    rows, columns = height // patch // merge, width // patch // merge
    split = pixels.view(frames // seen, seen, rows, merge, patch, columns, merge, patch, 3)
    return split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, seen, patch * patch)


def patchify_in_bands(
    pixels: Tensor, tone: Normalization, dtype: torch.dtype, patch: int, merge: int, temporal: int
) -> Tensor:
    """``patchify`` for a CPU: one row of merged patches at a time, which fits its cache.

    It separates colours first, so that every step but the last works on long contiguous runs; the
    last step moves a line of a patch as one item.
    """
    frames, height, width, _ = pixels.shape
    seen = 1 if frames == 1 else temporal  # different frames in a temporal patch
    rows, columns = height // patch // merge, width // patch // merge
    line = np.dtype(f"V{patch * dtype.itemsize}")
    # NumPy asks for huge pages, torch does not.
    result = np.empty((frames // seen, rows, columns, merge, merge, 3, temporal, patch), line)
    band = np.empty((3, seen, merge, patch, columns, merge), line)
    toned = torch.from_numpy(band.view(np.uint8).reshape(3, -1)).view(dtype)
    exact = toned if dtype == torch.float32 else torch.empty_like(toned, dtype=torch.float32)
    parted = torch.empty_like(toned, dtype=torch.uint8)
    mean, std = _scaled(tone)
    lines = pixels.numpy().reshape(frames // seen, seen, rows, -1, 3)
    for moment, row in np.ndindex(frames // seen, rows):
        np.copyto(parted.numpy().reshape(3, seen, -1), lines[moment, :, row].transpose(2, 0, 1))
        exact.copy_(parted).sub_(mean).div_(std)
        if toned is not exact:
            toned.copy_(exact)
        result[moment, row] = band.transpose(4, 2, 5, 0, 1, 3)  # one frame goes to all moments
    values = torch.from_numpy(result.view(np.uint8).reshape(-1)).view(dtype)
    return values.view(-1, 3 * temporal * patch * patch)


def patchify_all(
    media: Sequence[Tensor], recipe: GridImage | GridVideo, temporal: int, like: Tensor
) -> Tensor:
    """Patches of media of one kind, one after another, on the device and in the type of ``like``.

    Pictures are uint8 [height, width, 3], videos [frames, height, width, 3].
    """
    made = [
        patchify(
            (pixels if pixels.ndim == 4 else pixels[None]).to(like.device),
            recipe.tone,
            like.dtype,
            recipe.patch,
            recipe.merge,
            temporal,
        )
        for pixels in media
    ]
    return torch.cat(made) if len(made) > 1 else made[0]
