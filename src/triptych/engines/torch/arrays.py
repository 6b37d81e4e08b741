"""Arrays as tensors and back, in place: no byte is copied here."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from triptych.errors import EngineFailed
from triptych.transfer.base import Array

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

with warnings.catch_warnings():
    # Memory of another worker is mapped read-only, and we only read it. torch warns of that once
    # in a process, so the warning is spent here.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def view(array: Array) -> Tensor:
    """The array as a tensor on the CPU, over the same memory."""
    if array.dtype not in DTYPES:
        raise EngineFailed(f"an array of dtype '{array.dtype}' cannot be read")
    dtype = DTYPES[array.dtype]
    if len(array.buffer) != math.prod(array.shape) * dtype.itemsize:
        raise EngineFailed(
            f"an array of shape {array.shape} in {array.dtype} has {len(array.buffer)} bytes"
        )
    if not len(array.buffer):
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(array.buffer, dtype=dtype).view(array.shape)
