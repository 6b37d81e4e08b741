"""Arrays as torch tensors over the same memory, without a copy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from triptych.errors import EngineFailed
from triptych.transfer.base import Array
from triptych.transfer.cuda import address_of

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # Memory of another worker is mapped read-only, and we only read it. torch warns of that once
    # per process: trigger the warning here, where it is ignored.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class CudaArray:
    """An array with the CUDA array interface; a tensor made from it keeps it alive."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",  # the interface has no bfloat16
            "shape": (len(array.buffer),),
            "data": (address_of(array.buffer), False),
        }


def synchronize(device: torch.device) -> None:
    """Wait for the current stream of a GPU: other processes cannot wait for it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def tensor_view(array: Array) -> Tensor:
    """The array as a tensor over the same memory, on the CPU or on the GPU whose memory it is."""
    if array.dtype not in TORCH_DTYPES:
        raise EngineFailed(
            f"an array has dtype '{array.dtype}'; supported are {', '.join(TORCH_DTYPES)}"
        )
    dtype = TORCH_DTYPES[array.dtype]
    if len(array.buffer) != math.prod(array.shape) * dtype.itemsize:
        raise EngineFailed(
            f"an array of shape {array.shape} in {array.dtype} has {len(array.buffer)} bytes"
        )
    if not len(array.buffer):
        return torch.empty(array.shape, dtype=dtype)
    if array.gpu is None:
        return torch.frombuffer(array.buffer, dtype=dtype).view(array.shape)
    flat: Tensor = torch.as_tensor(CudaArray(array), device=f"cuda:{array.gpu}")
    return flat.view(dtype).view(array.shape)
