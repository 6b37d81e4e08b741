"""Routing by prefix cache: a prompt goes where most of its KV blocks are, weighed against load.

The cost of a worker is what it would have to compute of the prompt plus what it has queued, both in
blocks; the lowest cost wins. The index may be wrong, late or empty: that costs cache hits and never
a token. Knows no connections.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from triptych.config import KvSettings
from triptych.messages import MediaItem, Work
from triptych.pipeline.kv import prompt_blocks
from triptych.pipeline.kv.index import KvIndex
from triptych.pipeline.kv.media_layouts import MediaLayoutCache
from triptych.pipeline.kv.prompt_blocks import PromptBlocks
from triptych.pipeline.router import rendezvous_order

EXPECT_SECONDS = 10.0  # that a prompt counts as cached where it was sent, until events confirm it
EXPECT_WITHOUT_EVENTS_SECONDS = 120.0
ASSUMED_BLOCK_SIZE = 16  # tokens, of workers that report nothing, where there are no events


class PrefillWorker(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def queued_blocks(self) -> float:
        """Blocks of work that this frontend has given it and that are not done."""

    @property
    def can_prefill_from_cache(self) -> bool:
        """Whether it can prefill media from its prefix cache alone."""


W = TypeVar("W", bound=PrefillWorker)


class KvRouting:
    """``max_local_prefill``: tokens, besides the last block, that a decode worker may prefill."""

    def __init__(
        self, settings: KvSettings, max_local_prefill: int = 0, index: KvIndex | None = None
    ) -> None:
        self.settings = settings
        self.max_local_prefill = max_local_prefill
        self.index = KvIndex() if index is None else index
        self.layouts = MediaLayoutCache()
        self._seconds = EXPECT_SECONDS if settings.events else EXPECT_WITHOUT_EVENTS_SECONDS
        self._turn = itertools.count()
        counted = ("lookups", "blocks", "matched_blocks", "predicted_blocks", "decode_only")
        self._counts = dict.fromkeys(counted, 0)

    @property
    def counters(self) -> dict[str, float]:
        """``blocks``: of the prompts that were looked up; ``matched_blocks``: of these, cached at
        the chosen worker, and ``predicted_blocks``: of these, expected and not reported.
        ``decode_only``: prompts that only a decode worker got."""
        return {
            **self._counts,
            "changes": self.index.changes,
            "changes_missed": self.index.changes_missed,
            "indexed_blocks": self.index.reported,
            "expected_blocks": self.index.expected,
            "learned_media": len(self.layouts),
        }

    def block_size(self, worker: PrefillWorker) -> int:
        """The block size by which a prompt is hashed for this worker; 0: it is not."""
        return worker.block_size or (0 if self.settings.events else ASSUMED_BLOCK_SIZE)

    async def hash_prompt(
        self,
        work: Work,
        workers: Sequence[PrefillWorker],
        blocks: dict[int, PromptBlocks],
        digests: Sequence[bytes],
    ) -> None:
        """Add to ``blocks`` the prompt by the block sizes of these workers, unless it is there."""
        for size in {self.block_size(worker) for worker in workers} - {0}:
            if size not in blocks or not blocks[size].complete:
                blocks[size] = await prompt_blocks.hash_prompt(
                    work, self.layouts, size, work.generated, digests
                )

    def choose(
        self, workers: Sequence[W], blocks: dict[int, PromptBlocks], item: MediaItem | None = None
    ) -> tuple[W, float]:
        """A worker to prefill, and the blocks that it must compute for that.

        ``blocks``: the prompt by block size. ``item``: the first media item that it would encode,
        whose rendezvous order decides among equals; without one they take turns.
        """
        cached = self._cached(blocks)
        missing = {worker.name: self._missing(worker, blocks, cached) for worker in workers}
        if item is None:
            start = next(self._turn) % len(workers)
            order = [*workers[start:], *workers[:start]]
        else:
            order = rendezvous_order(workers, item)
        weight = self.settings.overlap_weight
        costs = [weight * missing[worker.name] + worker.queued_blocks for worker in order]
        chosen = order[_draw(costs, self.settings.temperature)]
        self._count_lookup(chosen, blocks, cached)
        return chosen, missing[chosen.name]

    def tokens_to_prefill(
        self, worker: PrefillWorker, blocks: dict[int, PromptBlocks]
    ) -> int | None:
        """Tokens that a decode worker must compute to prefill from its cache, besides the last
        block, which every worker computes. None: it can't, since media are among them."""
        prompt = blocks.get(self.block_size(worker))
        if prompt is None or not prompt.complete:
            return None
        cached = min(self.index.overlap(prompt.hashes).get(worker.name, 0), prompt.cacheable)
        if prompt.media_end:
            media_cached = prompt.media_end <= cached * prompt.block_size
            if not media_cached or prompt.metas is None or not worker.can_prefill_from_cache:
                return None
        return (prompt.cacheable - cached) * prompt.block_size

    def able_to_prefill(self, workers: Sequence[W], blocks: dict[int, PromptBlocks]) -> list[W]:
        """The decode workers that have enough of a prompt cached to prefill the rest."""
        tokens = ((worker, self.tokens_to_prefill(worker, blocks)) for worker in workers)
        return [w for w, count in tokens if count is not None and count <= self.max_local_prefill]

    def best_can_prefill(
        self, workers: Sequence[W], blocks: dict[int, PromptBlocks], prefill_wait: float
    ) -> bool:
        """Whether the worker with the lowest cost to decode a prompt is able to prefill it too.

        A worker costs what it lacks of the prompt and what it has queued; one that is not able also
        ``prefill_wait``: blocks queued at the worker that would prefill for it.
        """
        able = self.able_to_prefill(workers, blocks)
        if not able:
            return False
        cached = self._cached(blocks)
        order = [*able, *(worker for worker in workers if worker not in able)]
        costs = [
            self.settings.overlap_weight * self._missing(worker, blocks, cached)
            + worker.queued_blocks
            + (0 if worker in able else prefill_wait)
            for worker in order
        ]
        return _draw(costs, self.settings.temperature) < len(able)

    def count_prefill_skipped(self) -> None:
        """A prompt goes to a decode worker only."""
        self._counts["decode_only"] += 1

    def expect(self, worker: PrefillWorker, blocks: dict[int, PromptBlocks]) -> None:
        """A prompt is sent to a worker: it counts as cached there until events confirm it."""
        prompt = blocks.get(self.block_size(worker))
        if prompt is not None:
            self.index.expect(worker.name, prompt.hashes, self._seconds)

    def _cached(self, blocks: dict[int, PromptBlocks]) -> dict[int, dict[str, int]]:
        """Cached blocks of a prompt, by block size and worker."""
        return {size: self.index.overlap(prompt.hashes) for size, prompt in blocks.items()}

    def _missing(
        self,
        worker: PrefillWorker,
        blocks: dict[int, PromptBlocks],
        cached: dict[int, dict[str, int]],
    ) -> float:
        size = self.block_size(worker)
        if size not in blocks:
            return max((prompt.count for prompt in blocks.values()), default=0)
        prompt = blocks[size]
        return prompt.count - min(cached[size].get(worker.name, 0), prompt.cacheable)

    def _count_lookup(
        self,
        worker: PrefillWorker,
        blocks: dict[int, PromptBlocks],
        cached: dict[int, dict[str, int]],
    ) -> None:
        size = self.block_size(worker)
        if size in blocks:
            prompt, counts = blocks[size], self._counts
            matched = min(cached[size].get(worker.name, 0), prompt.cacheable)
            reported = min(self.index.reported_overlap(worker.name, prompt.hashes), matched)
            counts["lookups"] += 1
            counts["blocks"] += prompt.count
            counts["matched_blocks"] += matched
            counts["predicted_blocks"] += matched - reported


def _draw(costs: Sequence[float], temperature: float) -> int:
    """The index of the lowest cost; with a temperature, a draw by softmax over negative costs."""
    lowest = min(costs)
    if not temperature:
        return costs.index(lowest)
    weights = [math.exp((lowest - cost) / temperature) for cost in costs]
    return random.choices(range(len(costs)), weights)[0]
