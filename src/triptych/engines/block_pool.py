"""The blocks of a KV cache: which are free, which hold a prefix, and the events that say so.

A block that no request uses stays in the prefix cache until its memory is needed; the least
recently used block is evicted first. This module knows neither tensors nor requests, nor how a hash
is computed, and it uses no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from triptych.blocks import MediaInBlock
from triptych.messages import KvEvent, KvRemoved, KvStored, MediaSpan

NULL_BLOCK = 0  # never allocated and always zero: padding points to it


class BlockPool:
    """Allocates blocks, counts references and finds cached blocks by their hash.

    ``caching``: whether full blocks stay in the prefix cache. ``on_removed`` receives the hash of
    each block that leaves it.
    """

    def __init__(
        self,
        blocks: int,
        *,
        caching: bool = True,
        on_removed: Callable[[bytes], None] = lambda digest: None,
    ) -> None:
        self.total = blocks
        self._on_removed = on_removed
        self._caching = caching
        self._unused = list(range(blocks, NULL_BLOCK, -1))  # pop() gives low numbers first
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, unreferenced; oldest first
        self._references = [0] * (blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many blocks ``allocate`` can give: unused ones, and cached ones without a user."""
        return len(self._unused) + len(self._idle)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Reference and return the longest run of cached blocks from the start."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._references[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int]:
        """Give empty blocks. The caller checks ``free`` first."""
        assert count <= self.free, f"{count} blocks requested, {self.free} free"
        blocks = [
            self._unused.pop() if self._unused else self._evict_oldest() for _ in range(count)
        ]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def cache_block(self, block: int, digest: bytes) -> bool:
        """Add a full block to the prefix cache. False: a block with this content is there."""
        if not self._caching or digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def cache_blocks(
        self, blocks: Sequence[int], digests: Sequence[bytes]
    ) -> Iterator[tuple[int, int]]:
        """Cache each block; yield the runs (from, to) of those that are new to the cache."""
        start = 0
        for at, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
            if not self.cache_block(block, digest):
                if start < at:
                    yield start, at
                start = at + 1
        if start < len(blocks):
            yield start, len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        # The last block goes first, so that a prefix outlives the blocks that follow it.
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def evict(self, blocks: Sequence[int]) -> list[int]:
        """Remove blocks with wrong content from the prefix cache; return those with one user."""
        for block in blocks:
            if block in self._hash_of:
                self._uncache(block)
        return [block for block in blocks if self._references[block] == 1]

    def _evict_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._uncache(block)
        return block

    def _uncache(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._on_removed(digest)


class KvEventLog:
    """Collects the events of a prefix cache; the engine drains them once per step.

    While ``enabled`` is False it records nothing. Only one thread may use it.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.enabled = False
        self._events: list[KvStored | list[int]] = []  # a list: consecutively removed blocks

    def record_stored(
        self,
        first: int,
        hashes: Sequence[bytes],
        ids: Sequence[int],
        media: Sequence[MediaSpan],
        salt: str,
    ) -> None:
        """The cache now holds the blocks ``hashes[1:]`` of a sequence; ``hashes[0]`` is the parent.

        ``first``: index of the first of them; ``ids`` and ``media``: of the whole sequence.
        """
        if not self.enabled:
            return
        begin, end = first * self.block_size, (first + len(hashes) - 1) * self.block_size
        parent, *blocks = map(short_hash, hashes)
        self._events.append(
            KvStored(
                blocks=tuple(blocks),
                parent=parent if first else None,
                tokens=tuple(ids[begin:end]),
                block_size=self.block_size,
                media=media_in_blocks(media, begin, end, self.block_size),
                salt="" if first else salt,
            )
        )

    def record_removed(self, digest: bytes) -> None:
        if not self.enabled:
            return
        if not self._events or not isinstance(self._events[-1], list):
            self._events.append([])
        removed = self._events[-1]
        assert isinstance(removed, list)
        removed.append(short_hash(digest))

    def drain(self) -> list[KvEvent]:
        """Return and forget all recorded events, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return [KvRemoved(tuple(e)) if isinstance(e, list) else e for e in events]


def short_hash(digest: bytes) -> int:
    """The 64 bits of a block's hash that identify the block in events."""
    return int.from_bytes(digest[:8], "little")


def media_in_blocks(
    media: Sequence[MediaSpan], begin: int, end: int, block_size: int
) -> tuple[tuple[MediaInBlock, ...], ...]:
    """The media items in each block of the tokens from ``begin`` to ``end``, each item with the
    index of its first token relative to ``begin``. Empty if no block holds an item."""
    near = [one for one in media if one.start < end and one.start + one.length > begin]
    if not near:
        return ()
    blocks: list[list[MediaInBlock]] = [[] for _ in range(begin, end, block_size)]
    for one in sorted(near, key=lambda one: one.start):
        start = one.start - begin
        last = (start + one.length - 1) // block_size
        for block in blocks[max(0, start // block_size) : last + 1]:
            block.append((one.key, start))
    return tuple(map(tuple, blocks))
