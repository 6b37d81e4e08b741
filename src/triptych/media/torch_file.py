"""Reads torch files (.pt, .pth, .bin) as plain tensors, in the sandbox only.

``weights_only`` keeps a pickle from calling arbitrary functions, and the sandbox contains whatever
gets past that. Returns dense tensors only, as bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from triptych.errors import InvalidEmbedding
from triptych.media.embeds import FileTensor

if TYPE_CHECKING:
    import torch

UNNAMED = ""

# What torch raises for damaged or hostile files. Its messages are for developers, not for clients.
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    OverflowError,
    NotImplementedError,
    ImportError,
)


def read_torch_file(data: memoryview, max_bytes: int) -> dict[str, FileTensor]:
    """The file's tensors by name; a bare tensor has the name NAMELESS."""
    import torch

    try:
        _check_archive(data, max_bytes)
        with warnings.catch_warnings(action="ignore"):  # about old protocols and prototypes
            found: Any = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except _DAMAGE as error:
        raise InvalidEmbedding(
            "The torch file is damaged, or holds more than plain tensors."
        ) from error
    if isinstance(found, torch.Tensor):
        found = {UNNAMED: found}
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise InvalidEmbedding("The torch file is neither a tensor nor tensors by name.")
    return {name: _plain(tensor) for name, tensor in found.items()}


def _check_archive(data: memoryview, max_bytes: int) -> None:
    """Refuse a zip archive that unpacks to too much."""
    if bytes(data[:2]) != b"PK":
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        inside = sum(entry.file_size for entry in archive.infolist())
    if inside > max_bytes:
        raise InvalidEmbedding(f"The torch file unpacks to {inside} bytes, over the limit.")


def _plain(tensor: torch.Tensor) -> FileTensor:
    import torch

    dtypes = {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float64: "F64",
        torch.int64: "I64",
        torch.int32: "I32",
    }
    if (
        tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.device.type != "cpu"
        or tensor.dtype not in dtypes
    ):
        raise InvalidEmbedding(
            "The torch file has a tensor that is sparse, nested, quantized, without data or of no "
            "plain number type. Only dense tensors are taken."
        )
    _check_extent(tensor)
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return FileTensor(dtypes[tensor.dtype], tuple(tensor.shape), whole.numpy().tobytes())


def _check_extent(tensor: torch.Tensor) -> None:
    """Every element lies in the storage, and no element twice: strides could inflate a tensor."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    if tensor.numel() and (tensor.numel() > held or not 0 <= last < held):
        raise InvalidEmbedding("The torch file has a tensor that is larger than its data.")
