"""The decode pool: prepares media files for an encoder, in sandboxed processes.

Files come from untrusted clients and decoders are large C libraries, so no file is decoded in a
process that serves anything else. A decoder that crashes, hangs or exhausts memory costs its own
item an InvalidMedia and the pool that process. Does not know models: the processes follow recipes.
``decode_queue`` bounds the memory and keeps the order fair to tenants.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os

from triptych.config import Config
from triptych.errors import Draining, rebuild_error
from triptych.media.base import PreparedMedia, digest_of
from triptych.media.decode_queue import DecodeQueue
from triptych.media.decoder_channel import DecoderSetup
from triptych.media.options import apply_options
from triptych.media.process_pool import DecodeOutcome, ProcessPool
from triptych.messages import Failure, MediaItem
from triptych.recipe import Recipes
from triptych.runtime.caching import LRUCache, SingleFlight
from triptych.runtime.process import memory_map_share
from triptych.transfer.base import LOOP_COPY_BYTES, align
from triptych.transfer.segment import Memory

DEFAULT_MAX_PROCESSES = 8
MEDIA_PREPARER = "triptych.media.prepare"
_CACHE_SHARE = 4  # an item over a quarter of the cache is not cached
POOL_CLOSE_SECONDS = 10.0  # for running items to end when the pool is closed
_MAPS_SHARE = 0.125  # of all memory maps: each cached item has one, however small it is

_CacheKey = tuple[str, bytes]  # salt, digest of kind, form, options and bytes


def default_process_count(cores: int) -> int:
    """Processes of a pool by default. Each holds its own copy of the libraries."""
    return min(DEFAULT_MAX_PROCESSES, max(1, cores - 1))


class DecodePool:
    """Processes start when they are first needed. ``close`` it on the loop that uses it.

    ``preparer``: the module that follows the recipes, in the processes.
    """

    def __init__(self, recipes: Recipes, config: Config, *, preparer: str = MEDIA_PREPARER) -> None:
        torch = config.allow_torch_embeddings
        setup = DecoderSetup(recipes, config.limits, torch, preparer)
        most = config.decode_processes or default_process_count(len(os.sched_getaffinity(0)))
        self._recipes = recipes
        self._processes = ProcessPool(setup, most)
        most_bytes = config.cache.decoded
        self._cache: LRUCache[_CacheKey, PreparedMedia] = LRUCache(
            most_bytes, largest=most_bytes // _CACHE_SHARE, most=memory_map_share(_MAPS_SHARE)
        )
        self._queue = DecodeQueue(most, lambda: self._cache.bytes)
        self._flights: SingleFlight[PreparedMedia] = SingleFlight()
        self._tasks: set[asyncio.Task[PreparedMedia]] = set()
        self._closed = False
        self._hits = self._misses = self._items = self._crashes = 0
        self._seconds = 0.0

    @property
    def queued(self) -> int:
        return self._queue.queued

    @property
    def running(self) -> int:
        return self._queue.running

    @property
    def counters(self) -> dict[str, float]:
        return {
            "decoded_items": self._items,
            "decode_crashes": self._crashes,
            "decode_seconds": self._seconds,
            "decoded_cache_hits": self._hits,
            "decoded_cache_misses": self._misses,
            "decoded_cache_bytes": self._cache.bytes,
            "decoded_cache_evictions": self._cache.evictions,
        }

    async def prepare(
        self, item: MediaItem, salt: str = "", digest: bytes | None = None
    ) -> PreparedMedia:
        """What the recipes make of an item, decoded once for all concurrent callers.

        ``digest``: the item's, if the caller knows it. Raises a MediaError for a bad file, and
        another RequestError for options that the recipes cannot follow. The arrays are read-only;
        dropping the last reference frees their memory.
        """
        if item.options is not None:
            apply_options(self._recipes, item.kind, item.options)
        key = (salt, digest or await digest_of(item))
        if self._closed:
            raise Draining("This process is stopping.")
        if (cached := self._cache.get(key)) is not None:
            self._hits += 1
            return cached
        self._misses += 1
        return await self._flights.join(key, functools.partial(self._queue_and_decode, key, item))

    async def close(self) -> None:
        """End all processes. Callers that wait get Draining. Prepared items stay readable."""
        self._closed = True
        self._queue.close()
        self._processes.kill()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=POOL_CLOSE_SECONDS)
            for task in late:
                task.cancel()
        await asyncio.to_thread(self._processes.close)
        self._cache.clear()

    async def _queue_and_decode(self, key: _CacheKey, item: MediaItem) -> PreparedMedia:
        tenant = key[0].partition("\n")[0]  # the client chooses the rest of the salt
        await self._queue.start(tenant)
        # A process completes what it has started, even if no caller waits for it any more.
        task = asyncio.create_task(self._decode(key, item, tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _decode(self, key: _CacheKey, item: MediaItem, tenant: str) -> PreparedMedia:
        try:
            outcome = await self._processes.prepare(item, self._release)
            self._record(key, outcome)
        except asyncio.CancelledError:  # by ``close``, after POOL_CLOSE_SECONDS
            raise Draining("This process is stopping.") from None
        finally:
            self._queue.end(tenant)
        if isinstance(outcome.result, Failure):
            raise rebuild_error(outcome.result)
        return outcome.result

    def _record(self, key: _CacheKey, outcome: DecodeOutcome) -> None:
        self._seconds += outcome.seconds
        self._crashes += outcome.lost
        if isinstance(outcome.result, PreparedMedia):
            self._items += 1
            self._queue.hold(sum(align(array.buffer.nbytes) for array in outcome.result.arrays))
            self._cache.put(key, outcome.result, outcome.result.size)

    def _release(self, memory: list[Memory]) -> None:
        """The last view of this memory is gone. Called in any thread."""
        size = ctypes.sizeof(memory[0])
        try:
            self._queue.release(size)
            if size > LOOP_COPY_BYTES:
                self._processes.unmap(memory)
        except RuntimeError:
            return  # the pool is closed: the list unmaps it here and now
