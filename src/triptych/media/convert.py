"""Converts a torch file to a safetensors file, in the sandbox, for ``convert-embeddings``.

A decoding process is started with this module in place of ``prepare``; it follows no recipe.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping

import numpy as np

from triptych.config import Limits
from triptych.media import torch_file
from triptych.media.embeds import FileTensor
from triptych.media.prepare import with_media_key
from triptych.messages import MediaForm, MediaKind, MediaMeta
from triptych.recipe import MediaOptions, Recipes

_ALIGNMENT = 8  # of the data, counted from the start of the file


def load_libraries(recipes: Recipes) -> None:
    """Nothing: there is one file, and torch is imported when it is read."""


def prepare(
    kind: MediaKind,
    form: MediaForm,
    data: memoryview,
    recipes: Recipes,
    limits: Limits,
    allow_torch: bool,
    options: MediaOptions | None = None,
) -> tuple[MediaMeta, list[np.ndarray], int, bool]:
    """The bytes of the safetensors file as one array. An unnamed tensor gets a name."""
    tensors = torch_file.read_torch_file(data, limits.media_bytes)
    if [*tensors] == [torch_file.UNNAMED]:
        tensors = {f"{kind}_embeds": tensors[torch_file.UNNAMED]}
    file = np.frombuffer(to_safetensors(tensors), np.uint8)
    return with_media_key(MediaMeta(b"", 1, kind=kind), [file], recipes), [file], 0, True


def self_test(kind: MediaKind, form: MediaForm, recipes: Recipes, limits: Limits) -> None:
    """Convert a good file. Passes on what the libraries raise."""
    import torch

    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    prepare(kind, form, file.getbuffer(), recipes, limits, True)


def to_safetensors(tensors: Mapping[str, FileTensor]) -> bytes:
    """The safetensors format: the length of a JSON header, the header, the data."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % _ALIGNMENT)
    return b"".join(
        [struct.pack("<Q", len(words)), words, *(tensor.data for tensor in tensors.values())]
    )
