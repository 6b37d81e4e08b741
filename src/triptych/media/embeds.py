"""Embeddings that a client sends: checks everything that an engine takes on trust.

A file is safetensors or, if the operator permits it, a torch file with dense tensors. It holds
``{kind}_embeds`` [tokens, width], also as a batch of one, and where the model needs a grid
``{kind}_grid_thw`` (t, h, w) in patches or ``aspect_ratios`` (rows, columns) in tiles. For a video
``video_times`` [t] or ``second_per_grid_ts`` say when its temporal patches are shown; without them
a patch lasts a second. Runs in the sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors

from triptych.config import Limits
from triptych.errors import EmbeddingShapeMismatch, InvalidEmbedding
from triptych.messages import MediaKind, MediaMeta
from triptych.recipe import EmbedsFormat

MAX_VIDEO_SECONDS = 24 * 3600.0  # later times would be long words in a prompt, or wild positions
MAX_HEADER_BYTES = 1 << 20  # bytes; an embedding has a few hundred
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
NUMBER_DTYPES = FLOAT_DTYPES | {
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}

_TORCH_MARKS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_CONVERT = "`triptych convert-embeddings` makes safetensors of a torch file."
_EXPONENT = np.uint16(0x7F80)  # of bfloat16
_DAMAGED = "The embedding is not a complete safetensors file."


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a safetensors file, or of a torch file in the same form."""

    dtype: str  # "F32", "BF16", "I64" ...
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def prepare_embeds(
    kind: MediaKind, data: memoryview, recipe: EmbedsFormat, limits: Limits, allow_torch: bool
) -> tuple[MediaMeta, list[np.ndarray], int]:
    """Meta without its key, [tokens, width] in the recipe's type, and cost 0: it is encoded."""
    tensors = _read(data, limits, allow_torch)
    rows = _rows(_embedding(tensors, kind), recipe)
    grid: tuple[int, ...] = ()
    if recipe.merge:
        grid = _grid(tensors, kind, len(rows), recipe)
    elif recipe.tile:
        grid = _tiles(tensors, len(rows), recipe.tile)
    times = _times(tensors, grid[0]) if kind == "video" and grid else ()
    return MediaMeta(b"", len(rows), grid, kind, times), [rows], 0


def _read(data: memoryview, limits: Limits, allow_torch: bool) -> Mapping[str, FileTensor]:
    if looks_like_torch(data):
        if not allow_torch:
            raise InvalidEmbedding(f"Torch and pickle files are not taken. {_CONVERT}")
        from triptych.media import torch_file

        return torch_file.read_torch_file(data, limits.media_bytes)
    return parse_safetensors(data)


def looks_like_torch(data: memoryview) -> bool:
    """Whether it is a zip archive or a pickle. Never true of what could be safetensors."""
    return bytes(data[8:9]) != b"{" and bytes(data[:4]).startswith(_TORCH_MARKS)


def parse_safetensors(data: memoryview) -> dict[str, FileTensor]:
    """The tensors of a safetensors file. The library checks that offsets are in order, without
    gaps and without overlap."""
    if len(data) < 8 or bytes(data[8:9]) != b"{":
        raise InvalidEmbedding(_DAMAGED)
    header = int.from_bytes(data[:8], "little")
    if header > min(MAX_HEADER_BYTES, len(data) - 8):
        raise InvalidEmbedding(f"{_DAMAGED} It declares a header of {header} bytes.")
    try:
        found = safetensors.deserialize(bytes(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidEmbedding(_DAMAGED) from error
    return {
        name: FileTensor(tensor["dtype"], tuple(tensor["shape"]), tensor["data"])
        for name, tensor in found
    }


def _embedding(tensors: Mapping[str, FileTensor], kind: str) -> FileTensor:
    if (named := tensors.get(f"{kind}_embeds")) is not None:
        return named
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    raise EmbeddingShapeMismatch(
        f"The file has {len(tensors)} tensors, and none of them is called {kind}_embeds."
    )


def _rows(tensor: FileTensor, recipe: EmbedsFormat) -> np.ndarray:
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2 or shape[1] != recipe.width:
        raise EmbeddingShapeMismatch(
            f"The embedding is {_words(tensor.shape)}, but this model takes "
            f"[tokens, {recipe.width}]."
        )
    if not shape[0]:
        raise EmbeddingShapeMismatch("The embedding has no rows.")
    if tensor.dtype not in FLOAT_DTYPES:
        raise EmbeddingShapeMismatch(
            f"The embedding is of type {tensor.dtype}. Send F32, F16 or BF16."
        )
    values = np.frombuffer(tensor.data, FLOAT_DTYPES[tensor.dtype]).reshape(shape)
    return _finite(convert_floats(values, recipe.dtype), recipe.dtype)


def _finite(rows: np.ndarray, dtype: str) -> np.ndarray:
    finite = is_finite_bfloat16(rows) if dtype == "bfloat16" else np.isfinite(rows)
    if not finite.all():
        raise EmbeddingShapeMismatch(
            f"The embedding has values that are no finite numbers, or too large for {dtype}."
        )
    return rows


def _grid(
    tensors: Mapping[str, FileTensor], kind: str, rows: int, recipe: EmbedsFormat
) -> tuple[int, int, int]:
    name = f"{kind}_grid_thw"
    if name not in tensors:
        raise EmbeddingShapeMismatch(
            f"The file has no {name}. This model needs the grid (t, h, w) in patches."
        )
    t, h, w = _counts(tensors[name], name, 3)
    if h % recipe.merge or w % recipe.merge or t * h * w != rows * recipe.merge**2:
        raise EmbeddingShapeMismatch(
            f"{name} is {_words((t, h, w))}, in patches of which {recipe.merge} x {recipe.merge} "
            f"make a row, but the embedding has {rows} rows."
        )
    return t, h, w


def _tiles(tensors: Mapping[str, FileTensor], rows: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles; one tile unless the file says otherwise."""
    name = "aspect_ratios"
    down, across = 1, 1
    if name in tensors:
        down, across = _counts(tensors[name], name, 2)
    tiles = down * across + 1 if down * across > 1 else 1
    if rows != tiles * tile:
        raise EmbeddingShapeMismatch(
            f"The embedding has {rows} rows, but {down} x {across} tiles"
            f"{' and the whole picture' if tiles > 1 else ''} have {tiles * tile}. "
            f"{name} says how many rows and columns of tiles there are."
        )
    return down, across


def _counts(tensor: FileTensor, name: str, count: int) -> list[int]:
    values = _numbers(tensor, name, count)
    if not all(math.isfinite(value) and value == int(value) >= 1 for value in values):
        raise EmbeddingShapeMismatch(f"{name} is {_words(values)}: not {count} counts.")
    return [int(value) for value in values]


def _times(tensors: Mapping[str, FileTensor], count: int) -> tuple[float, ...]:
    if (given := tensors.get("video_times")) is not None:
        return _in_order(_numbers(given, "video_times", count))
    step = 1.0
    if (given := tensors.get("second_per_grid_ts")) is not None:
        (step,) = _numbers(given, "second_per_grid_ts", 1)
    return _in_order([step * patch for patch in range(count)])


def _in_order(times: list[float]) -> tuple[float, ...]:
    if times != sorted(times) or not all(0 <= time <= MAX_VIDEO_SECONDS for time in times):
        raise EmbeddingShapeMismatch(
            f"The times of the video are not seconds that rise, from 0 to {MAX_VIDEO_SECONDS:g}."
        )
    return tuple(times)


def _numbers(tensor: FileTensor, name: str, count: int) -> list[float]:
    """A small tensor of exactly so many numbers, also as a batch of one."""
    if (
        math.prod(tensor.shape) != count
        or len(tensor.shape) > 2
        or tensor.dtype not in NUMBER_DTYPES
    ):
        raise EmbeddingShapeMismatch(
            f"{name} is {_words(tensor.shape)} of {tensor.dtype}, not {count} numbers."
        )
    values = np.frombuffer(tensor.data, NUMBER_DTYPES[tensor.dtype])
    if tensor.dtype == "BF16":
        values = convert_floats(values, "float32")
    return [value.item() for value in values]


def _words(values: tuple[int, ...] | list[float]) -> str:
    return f"[{', '.join(str(value) for value in values)}]"


# Floats of 16 and 32 bits. NumPy has no bfloat16: here it is uint16, by its bits.


def convert_floats(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values``: float16, float32, or uint16 for bfloat16. ``dtype``: by torch's name.

    Rounds to nearest, ties to even, as torch does; too large values become infinite.
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
    """Which bfloat16 values, given by their bits, are neither infinite nor NaN."""
    result: np.ndarray = (values & _EXPONENT) != _EXPONENT
    return result


def _narrow(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    # add half of the last bit that stays, less one where that bit is even: ties go to even
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # NaN must not round to infinity
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)
