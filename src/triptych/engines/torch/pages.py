"""The paged KV cache: which blocks are whose (BlockPool), and what is in them (Pages).

A full block can be found again by its hash, which chains over everything that its content depends
on: the tenant's salt, all tokens before it, their positions, and the media among them. Blocks that
nobody uses stay findable until their room is needed, the one unused for longest first. Nothing here
knows requests.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from triptych.engines.torch.family import Span

NULL = 0  # a block that is never given out: what padding points to, always zero


class BlockPool:
    """Counts references to blocks and finds known ones. Knows no tensors."""

    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        self.total = blocks
        self._caching = caching
        self._unused = list(range(blocks, NULL, -1))  # popped from the end: low numbers first
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced, findable; oldest first
        self._references = [0] * (blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that ``take`` can give: unused ones, and those kept only for re-use."""
        return len(self._unused) + len(self._idle)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of known blocks from the start; they are referenced from now on."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._references[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """Blocks with nothing in them. The caller has looked at ``free``."""
        assert count <= self.free, f"{count} blocks taken, {self.free} free"
        taken = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def keep(self, block: int, digest: bytes) -> None:
        """Make a full block findable. A second block with the same content stays private."""
        if self._caching and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def give_back(self, blocks: Sequence[int]) -> None:
        # The last block goes first, so that a prefix outlives what only follows on it.
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} given back twice"
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Make blocks unfindable, as they are not to be trusted; give those nobody else uses."""
        for block in blocks:
            if (digest := self._hash_of.pop(block, None)) is not None:
                del self._block_of[digest]
        return [block for block in blocks if self._references[block] == 1]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block


class Pages:
    """The memory of the blocks, and the copies in and out of it."""

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
        self._room = self.kv.new_empty(0)  # what ``gather`` gives out, on a CPU

    def shape(self, blocks: int) -> tuple[int, ...]:
        """Of so many blocks when they travel."""
        layers, halves, _, *rest = self.kv.shape
        return (layers, halves, blocks, *rest)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Keys and values [2, blocks, block_size, kv_heads, dim]: good until the next call.

        On a CPU always in the same memory, since the kernel clears every page of new memory: for
        long contexts that would take longer than the copy and the attention together.
        """
        kv = self.by_block[layer]
        if self.device.type != "cpu":
            return kv.index_select(1, blocks)
        shape = (2, len(blocks), *kv.shape[2:])
        size = math.prod(shape)
        if self._room.numel() < size:
            self._room = kv.new_empty(size)
        return torch.index_select(kv, 1, blocks, out=self._room[:size].view(shape))

    def save(self, blocks: Sequence[int], into: Tensor) -> None:
        """Copy blocks out into host memory of ``shape(len(blocks))``."""
        index = torch.tensor(blocks, device=self.device)
        if self.device.type == "cpu" and into.dtype == self.kv.dtype:
            torch.index_select(self.kv, 2, index, out=into)
        else:
            into.copy_(self.kv.index_select(2, index))

    def load(self, source: Tensor, blocks: Sequence[int]) -> None:
        """Copy ``source``, shaped as ``shape(len(blocks))``, into blocks."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            self.kv.index_copy_(2, index, source.to(self.kv.device, self.kv.dtype))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold what is no number: masked attention would still spread it."""
        self.kv.index_fill_(2, torch.tensor(blocks, device=self.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are not touched before they are written; torch's would take all memory at once
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def root_hash(salt: str) -> bytes:
    """Where the chain of a tenant's blocks starts."""
    return hashlib.sha256(b"salt:" + salt.encode()).digest()


def counting(begin: int, end: int) -> bytes:
    """Nothing tells such positions apart: each token's is its index."""
    return b""


def block_hashes(
    parent: bytes,
    ids: Sequence[int],
    start: int,
    block_size: int,
    spans: Sequence[Span] = (),
    keys: Sequence[bytes] = (),
    moved: Callable[[int, int], bytes] = counting,
) -> Iterator[bytes]:
    """Hashes of the full blocks in ``ids`` from token ``start`` (a block's first) on.

    ``keys`` are those of the media items whose rows stand at ``spans``: placeholders are alike, so
    a block is told apart by whose rows stand in it, where, and from which row on. ``moved`` gives
    the positions of tokens from one to another, where these do not just count: the same tokens may
    stand elsewhere.
    """
    first = 0  # of the spans that do not end before the block
    for begin in range(start, len(ids) - block_size + 1, block_size):
        end = begin + block_size
        digest = hashlib.sha256(parent)
        digest.update(array("q", ids[begin:end]))
        digest.update(moved(begin, end))
        while first < len(spans) and spans[first].offset + spans[first].length <= begin:
            first += 1
        for span in itertools.islice(spans, first, None):
            if span.offset >= end:
                break
            digest.update(keys[span.item])
            digest.update(struct.pack("<3q", begin - span.offset, span.length, span.row))
        parent = digest.digest()
        yield parent
