"""The memory of the paged KV cache, and the hashes of its blocks.

The hash of a full block chains over everything that its content depends on: the tenant's salt, all
tokens before it, their positions, and the media among them. ``BlockPool`` finds blocks by it. Knows
no requests.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from triptych.models.layouts import EmbeddingSpan
from triptych.models.tensors import synchronize


class PagedKVCache:
    """The memory of the blocks, and copies into and out of it."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.device = device
        shape = (layers, 2, blocks + 1, block_size, kv_heads, head_dim)
        self.kv = _zeros(shape, dtype, device)
        slots = (blocks + 1) * block_size
        # Per layer, made once: keys and values by slot, and both by block.
        self.by_slot = [
            tuple(half.view(slots, kv_heads, head_dim) for half in layer) for layer in self.kv
        ]
        self.by_block = list(self.kv)
        self.token_bytes = self.kv[0, :, 0, 0].nbytes  # of one layer
        self._gathered = self.kv.new_empty(0)  # the memory that ``gather`` returns on a CPU

    def shape(self, blocks: int) -> tuple[int, ...]:
        """The shape of so many blocks when they are copied out."""
        layers, halves, _, *rest = self.kv.shape
        return (layers, halves, blocks, *rest)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Keys and values [2, blocks, block_size, kv_heads, dim], valid until the next call.

        On a CPU always in the same memory, since the kernel clears every page of new memory: for
        long contexts that takes longer than the copy and the attention together.
        """
        kv = self.by_block[layer]
        if self.device.type != "cpu":
            return kv.index_select(1, blocks)
        shape = (2, len(blocks), *kv.shape[2:])
        size = math.prod(shape)
        if self._gathered.numel() < size:
            self._gathered = kv.new_empty(size)
        return torch.index_select(kv, 1, blocks, out=self._gathered[:size].view(shape))

    def save(self, blocks: Sequence[int], into: Tensor) -> None:
        """Copy blocks into memory of ``shape(len(blocks))``; complete when this returns."""
        index = torch.tensor(blocks, device=self.device)
        if self.kv.device == into.device and into.dtype == self.kv.dtype:
            torch.index_select(self.kv, 2, index, out=into)
        else:
            into.copy_(self.kv.index_select(2, index))
        synchronize(self.device)

    def load(self, source: Tensor, blocks: Sequence[int]) -> None:
        """Copy ``source``, of ``shape(len(blocks))``, into blocks; complete when this returns."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            self.kv.index_copy_(2, index, source.to(self.kv.device, self.kv.dtype))
            synchronize(self.device)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold NaN: masked attention would still spread it."""
        self.kv.index_fill_(2, torch.tensor(blocks, device=self.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are not touched before they are written; torch's would take all memory at once
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def root_hash(salt: str) -> bytes:
    """The first hash of a tenant's chain."""
    return hashlib.sha256(b"salt:" + salt.encode()).digest()


def block_hashes(
    parent: bytes,
    ids: Sequence[int],
    start: int,
    block_size: int,
    spans: Sequence[EmbeddingSpan] = (),
    keys: Sequence[bytes] = (),
    position_bytes: Callable[[int, int], bytes] = lambda begin, end: b"",
) -> Iterator[bytes]:
    """Hashes of the full blocks in ``ids`` from token ``start`` (a block's first) on.

    ``keys`` are the media keys of the items at ``spans``: all placeholders are alike, so the hash
    includes which item's rows a block holds, where, and from which row on. ``position_bytes`` gives
    the positions of a range of tokens where they differ from the index: the same tokens may have
    other positions elsewhere.
    """
    first = 0  # of the spans that do not end before the block
    for begin in range(start, len(ids) - block_size + 1, block_size):
        end = begin + block_size
        digest = hashlib.sha256(parent)
        digest.update(array("q", ids[begin:end]))
        digest.update(position_bytes(begin, end))
        while first < len(spans) and spans[first].offset + spans[first].length <= begin:
            first += 1
        for span in itertools.islice(spans, first, None):
            if span.offset >= end:
                break
            digest.update(keys[span.item])
            digest.update(struct.pack("<3q", begin - span.offset, span.length, span.row))
        parent = digest.digest()
        yield parent
