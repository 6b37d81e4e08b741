"""Which frames of a video are looked at, and when they are shown.

Pure arithmetic, that of the stock video processors: nothing here knows a file or a pixel.
"""

from __future__ import annotations

import math

import numpy as np

from triptych.recipe import FrameSampling


def choose_frames(frames: FrameSampling, total: int, fps: float) -> list[int]:
    """Indices of the frames to take from ``total`` of them, rising, each once."""
    if frames.rule == "even":
        count = min(frames.count or total, total)
        return [number * total // count for number in range(count)]
    if frames.rule == "qwen3":
        count = int(total / fps * frames.fps)
        count = min(max(count, frames.least), frames.most, total)
        return [int(at) for at in np.linspace(0, total - 1, count).round()]
    assert frames.rule == "qwen2", frames.rule
    return _qwen2(frames, total, fps)


def _qwen2(frames: FrameSampling, total: int, fps: float) -> list[int]:
    whole = frames.patch
    most = min(frames.most, total) // whole * whole
    asked = min(max(total / fps * frames.fps, frames.least), most, total)
    # a clip shorter than one temporal patch is shown whole: stock has no answer for it
    count = math.floor(asked / whole) * whole or min(whole, total)
    # torch.arange in 32 bits, so that the same products round to the same whole numbers
    return [int(at) for at in (np.arange(count) * (total / count)).astype(np.float32)]


def patch_times(
    frames: FrameSampling, taken: list[int], total: int, fps: float
) -> tuple[float, ...]:
    """When each temporal patch is shown, in seconds from the start."""
    patches = -(-len(taken) // frames.patch)
    if frames.rule == "qwen3":
        padded = taken + [taken[-1]] * (patches * frames.patch - len(taken))
        starts = range(0, len(padded), frames.patch)
        return tuple((padded[at] / fps + padded[at + frames.patch - 1] / fps) / 2 for at in starts)
    step = frames.patch / (len(taken) / total * fps)
    return tuple(number * step for number in range(patches))
