"""The KV blocks of the fake engine: allocated and cached as in a real one, without memory."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from triptych import blocks
from triptych.engines.block_pool import BlockPool, KvEventLog, media_in_blocks
from triptych.messages import MediaSpan


class BlockLease:
    """The KV blocks of one stream with the tokens ``ids``, which may grow.

    ``spare``: tokens at the end that the engine computes even if they are cached.
    """

    def __init__(
        self, arrival: int, ids: list[int], media: Sequence[MediaSpan], salt: str, spare: int
    ) -> None:
        self.arrival = arrival
        self.blocks: list[int] = []
        self.found = 0  # blocks that the cache had
        self.cached = 0  # blocks that the cache has now
        self.full = 0  # tokens from which on the next block is full
        self.ids = ids
        self.media = media
        self.salt = salt
        self.spare = spare
        # Of the root and the full blocks. They differ from the names that a worker publishes.
        self.hashes = [blocks.hash_salt("fake:" + salt).to_bytes(8, "little")]

    @property
    def size(self) -> int:
        return len(self.blocks)

    def hash_blocks(self, count: int, block_size: int) -> None:
        """Hash the first ``count`` blocks."""
        begin = (len(self.hashes) - 1) * block_size
        end = count * block_size
        if end > begin:
            parent = int.from_bytes(self.hashes[-1], "little")
            media = media_in_blocks(self.media, begin, end, block_size)
            new = blocks.hash_blocks(parent, self.ids[begin:end], block_size, media)
            self.hashes += (name.to_bytes(8, "little") for name in new)


class FakeBlocks:
    """Leases wait for free blocks in the order of their arrival."""

    def __init__(self, total: int, block_size: int) -> None:
        self.kv_events = KvEventLog(block_size)
        self._size = block_size
        self._pool = BlockPool(total, on_removed=self.kv_events.record_removed)
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, BlockLease, asyncio.Future[None]]] = []  # a heap

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def free(self) -> int:
        """Unused, or cached without a user."""
        return self._pool.free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def lease(
        self, ids: list[int], media: Sequence[MediaSpan], salt: str, spare: int
    ) -> Iterator[BlockLease]:
        lease = BlockLease(next(self._arrivals), ids, media, salt, spare)
        try:
            yield lease
        finally:
            self.release(lease)
            self.serve()

    async def reserve(self, lease: BlockLease, blocks: int) -> None:
        """Wait until the lease holds ``blocks``."""
        if not self._waiting and self.grow(lease, blocks):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (lease.arrival, blocks, lease, ready)
        heapq.heappush(self._waiting, entry)
        self.serve()
        try:
            await ready
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def grow(self, lease: BlockLease, blocks: int) -> bool:
        """Allocate up to ``blocks`` in all, or nothing. A new lease first matches cached blocks."""
        found: list[int] = []
        if not lease.blocks:
            known = (len(lease.ids) - lease.spare) // self._size
            lease.hash_blocks(known, self._size)
            found = self._pool.match(lease.hashes[1 : 1 + known])
        missing = blocks - lease.size - len(found)
        if missing > self._pool.free:
            self._pool.release(found)
            return False
        if not lease.blocks:
            lease.found = len(found)
            self._set_cached(lease, lease.found)
        lease.blocks += found + self._pool.allocate(missing)
        return True

    def cache(self, lease: BlockLease, tokens: int) -> None:
        """Add the full blocks of the first ``tokens`` to the prefix cache."""
        full = tokens // self._size
        if full <= lease.cached:
            return
        lease.hash_blocks(full, self._size)
        first, hashes = lease.cached, lease.hashes[lease.cached : full + 1]
        for start, end in self._pool.cache_blocks(lease.blocks[first:full], hashes[1:]):
            new = hashes[start : end + 1]
            self.kv_events.record_stored(first + start, new, lease.ids, lease.media, lease.salt)
        self._set_cached(lease, full)

    def _set_cached(self, lease: BlockLease, cached: int) -> None:
        lease.cached, lease.full = cached, (cached + 1) * self._size

    def release(self, lease: BlockLease) -> None:
        """Free the blocks. ``serve`` gives them to waiting leases."""
        self._pool.release(lease.blocks)
        lease.blocks = []
        self._set_cached(lease, 0)

    def serve(self) -> None:
        """Give free blocks to the waiting leases, in order."""
        while self._waiting:
            _, blocks, lease, ready = self._waiting[0]
            if not ready.done():  # done: cancelled
                if not self.grow(lease, blocks):
                    return
                ready.set_result(None)
            heapq.heappop(self._waiting)
