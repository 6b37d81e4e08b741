"""KV blocks as a paged engine has them, found again by what is in them. They have no memory."""

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
    """The KV blocks of one stream of tokens ``ids``, which may grow.

    ``spare``: tokens at the end that are computed though they are known.
    """

    def __init__(
        self, arrival: int, ids: list[int], media: Sequence[MediaSpan], salt: str, spare: int
    ) -> None:
        self.arrival = arrival
        self.blocks: list[int] = []
        self.found = 0  # of blocks, those that the cache had
        self.kept = 0  # of blocks, those that it has now
        self.full = 0  # tokens with which there is another one for it
        self.ids = ids
        self.media = media
        self.salt = salt
        self.spare = spare
        # Of full blocks, after the root. None of them is what a worker tells of the same block.
        self.hashes = [blocks.hash_salt("fake:" + salt).to_bytes(8, "little")]

    @property
    def held(self) -> int:
        return len(self.blocks)

    def name(self, count: int, block_size: int) -> None:
        """Hash blocks up to this number."""
        begin = (len(self.hashes) - 1) * block_size
        end = count * block_size
        if end > begin:
            parent = int.from_bytes(self.hashes[-1], "little")
            media = media_in_blocks(self.media, begin, end, block_size)
            new = blocks.hash_blocks(parent, self.ids[begin:end], block_size, media)
            self.hashes += (name.to_bytes(8, "little") for name in new)


class FakeBlocks:
    """Who finds no free block waits; whoever arrived first is served first."""

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
        """Unused, or kept only for re-use."""
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
            self.give_back(lease)
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
        """Take what is missing to ``blocks``, or nothing at all. What begins may be found."""
        found: list[int] = []
        if not lease.blocks:
            known = (len(lease.ids) - lease.spare) // self._size
            lease.name(known, self._size)
            found = self._pool.match(lease.hashes[1 : 1 + known])
        missing = blocks - lease.held - len(found)
        if missing > self._pool.free:
            self._pool.release(found)
            return False
        if not lease.blocks:
            lease.found = len(found)
            self._note(lease, lease.found)
        lease.blocks += found + self._pool.allocate(missing)
        return True

    def keep(self, lease: BlockLease, tokens: int) -> None:
        """So many tokens have been computed: blocks that are full can be found by others."""
        full = tokens // self._size
        if full <= lease.kept:
            return
        lease.name(full, self._size)
        first, hashes = lease.kept, lease.hashes[lease.kept : full + 1]
        for start, end in self._pool.cache_blocks(lease.blocks[first:full], hashes[1:]):
            new = hashes[start : end + 1]
            self.kv_events.record_stored(first + start, new, lease.ids, lease.media, lease.salt)
        self._note(lease, full)

    def _note(self, lease: BlockLease, kept: int) -> None:
        lease.kept, lease.full = kept, (kept + 1) * self._size

    def give_back(self, lease: BlockLease) -> None:
        """Return the blocks, but call nobody yet: see ``serve``."""
        self._pool.release(lease.blocks)
        lease.blocks = []
        self._note(lease, 0)

    def serve(self) -> None:
        """Give free blocks to those who wait, in order."""
        while self._waiting:
            _, blocks, lease, ready = self._waiting[0]
            if not ready.done():  # done: cancelled, and about to leave
                if not self.grow(lease, blocks):
                    return
                ready.set_result(None)
            heapq.heappop(self._waiting)
