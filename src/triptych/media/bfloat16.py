"""Floats of 16 and 32 bits into each other, bfloat16 among them, which NumPy lacks.

Here bfloat16 is uint16 by its bits. What fits is exact; the rest is rounded to nearest, ties to
even, as torch does.
"""

from __future__ import annotations

import numpy as np

_EXPONENT = np.uint16(0x7F80)


def convert_floats(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values``: float16, float32, or uint16 for bfloat16. ``dtype``: named as torch names it.

    What is too large becomes infinite.
    """
    if values.dtype == np.uint16:
        if dtype == "bfloat16":
            return values
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "bfloat16":
        return _narrow(values.astype(np.float32))
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def is_finite_bfloat16(values: np.ndarray) -> np.ndarray:
    """Of bfloat16 by its bits, which are neither infinite nor no number."""
    result: np.ndarray = (values & _EXPONENT) != _EXPONENT
    return result


def _narrow(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    # half of the last kept bit, less one where that bit is even: ties go to even
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # a number that is none must not round to an infinite one
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)
