"""Requests go where their prompt's KV cache is, weighed against who has how much to do.

The cost of a worker is what it would have to compute of the prompt, and what it has to do already,
both in blocks; the least costs wins. What is cached where comes from the workers' own words, and
for the time until they tell from what was sent to them. All of it may be wrong, late or missing:
that costs hits and never a token. Knows no connections; who opens them feeds ``heard``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from triptych.config import KvSettings
from triptych.messages import CacheChange, MediaItem
from triptych.pipeline.kv.index import KvIndex
from triptych.pipeline.kv.media_layouts import MediaLayoutCache
from triptych.pipeline.kv.prompt_blocks import PromptBlocks
from triptych.pipeline.router import rendezvous_order

CONFIRM_SECONDS = 10.0  # that a prompt is expected where it was sent, until events tell
PREDICT_SECONDS = 120.0  # the same where there are no events
ASSUMED_BLOCK = 16  # tokens of a block of workers that tell nothing, where there are no events

COUNTED = ("lookups", "blocks", "matched_blocks", "predicted_blocks", "changes", "gaps", "alone")


class PrefillWorker(Protocol):
    """A worker that prefills."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def blocks(self) -> float:
        """Of work that it has to do for us."""

    @property
    def can_prefill_from_cache(self) -> bool:
        """Whether it can prefill media from its cache alone."""


P = TypeVar("P", bound=PrefillWorker)


class CacheProgress(Struct):
    """How far a worker's changes were heard."""

    epoch: int
    number: int | None = None  # of the last one; None: only the whole will do


class KvRouting:
    """``max_local_prefill``: tokens, besides the last block, that whoever decodes may prefill."""

    def __init__(
        self, settings: KvSettings, max_local_prefill: int = 0, index: KvIndex | None = None
    ) -> None:
        self.settings = settings
        self.max_local_prefill = max_local_prefill
        self.index = KvIndex() if index is None else index
        self.learned = MediaLayoutCache()
        self._seconds = CONFIRM_SECONDS if settings.events else PREDICT_SECONDS
        self._heard: dict[str, CacheProgress] = {}
        self._turn = itertools.count()
        self._counts = dict.fromkeys(COUNTED, 0)

    @property
    def counters(self) -> dict[str, float]:
        """``blocks``: of the prompts that were looked up; ``matched``: of these, held where they
        went, and ``predicted``: of these, not by the worker's own word. ``alone``: prompts that
        went to whoever decodes and to nobody before."""
        now = {
            "indexed_blocks": self.index.told,
            "expected_blocks": self.index.expected,
            "learned_media": len(self.learned),
        }
        return {**self._counts, **now}

    def heard(self, worker: str, epoch: int, change: CacheChange) -> bool:
        """A change of what an incarnation of a worker holds, by whatever way it came.

        False: one before it is missing. Changes then count no more until the whole is heard, for
        which the caller asks. Those of an earlier incarnation are left out.
        """
        last = self._heard.get(worker)
        if last is None or last.epoch < epoch:
            self.index.drop(worker)
            last = self._heard[worker] = CacheProgress(epoch)
        if last.epoch > epoch or (last.number is not None and change.sequence <= last.number):
            return True  # it is old: events may come twice, and late
        says = change.stored or change.removed
        if not change.snapshot and (
            last.number is None or change.sequence != last.number + 1 or not says
        ):
            last.number = None
            self._counts["gaps"] += 1
            return False
        last.number = change.sequence
        self._counts["changes"] += 1
        self.index.take(worker, change)
        return True

    def drop(self, worker: str) -> None:
        """It can't be reached any more. Its epoch stays known: what it sent may still arrive."""
        self.index.drop(worker)
        if worker in self._heard:
            self._heard[worker].number = None

    def block_size(self, peer: PrefillWorker) -> int:
        """By which a prompt is named for this worker; 0: it need not be."""
        return peer.block_size or (0 if self.settings.events else ASSUMED_BLOCK)

    def choose(
        self, peers: Sequence[P], chains: dict[int, PromptBlocks], item: MediaItem | None = None
    ) -> tuple[P, float]:
        """A worker to prefill, and the blocks that it must compute for that.

        ``chains``: the prompt by block size. ``item``: the first media item that it would encode;
        among equals whoever it belongs to is first, else they take turns.
        """
        held = self._held(chains)
        left = {peer.name: self._left(peer, chains, held) for peer in peers}
        start = next(self._turn) % len(peers)
        order = [*peers[start:], *peers[:start]] if item is None else rendezvous_order(peers, item)
        costs = [self.settings.overlap_weight * left[p.name] + p.blocks for p in order]
        chosen = order[_draw(costs, self.settings.temperature)]
        self._count(chosen, chains, held)
        return chosen, left[chosen.name]

    def left(self, peer: PrefillWorker, chains: dict[int, PromptBlocks]) -> int | None:
        """Tokens that a worker must compute if it is given a prompt without embeddings, but for
        the last block, which everybody must. None: it can't, since media are among them."""
        chain = chains.get(self.block_size(peer))
        if chain is None or not chain.known:
            return None
        held = min(self.index.overlap(chain.hashes).get(peer.name, 0), chain.findable)
        if chain.media_end:
            inside = chain.media_end <= held * chain.block_size
            if not inside or chain.metas is None or not peer.can_prefill_from_cache:
                return None
        return (chain.findable - held) * chain.block_size

    def able(self, peers: Sequence[P], chains: dict[int, PromptBlocks]) -> list[P]:
        """Those that decode and hold enough of a prompt to prefill the rest."""
        left = ((peer, self.left(peer, chains)) for peer in peers)
        return [p for p, tokens in left if tokens is not None and tokens <= self.max_local_prefill]

    def left_at_best(
        self, peers: Sequence[P], chains: dict[int, PromptBlocks], before: float
    ) -> int | None:
        """``left`` of the worker that had best decode a prompt; None: nobody is ``able``.

        Each costs what it lacks, which it computes or is brought, and what it has to do; one that
        is not able also ``before``: blocks that whoever would prefill for it has to do.
        """
        able = self.able(peers, chains)
        if not able:
            return None
        held = self._held(chains)
        order = [*able, *(peer for peer in peers if peer not in able)]  # among equals: able ones
        costs = [
            self.settings.overlap_weight * self._left(peer, chains, held)
            + peer.blocks
            + (0 if peer in able else before)
            for peer in order
        ]
        return self.left(order[_draw(costs, self.settings.temperature)], chains)

    def count_alone(self) -> None:
        """A prompt goes to whoever decodes, and to nobody before."""
        self._counts["alone"] += 1

    def sent(self, peer: PrefillWorker, chains: dict[int, PromptBlocks]) -> None:
        """A prompt is on its way to a worker: it counts as held there until events tell."""
        chain = chains.get(self.block_size(peer))
        if chain is not None:
            self.index.expect(peer.name, chain.hashes, self._seconds)

    def _held(self, chains: dict[int, PromptBlocks]) -> dict[int, dict[str, int]]:
        """Blocks by block size and worker."""
        return {size: self.index.overlap(chain.hashes) for size, chain in chains.items()}

    def _left(
        self, peer: PrefillWorker, chains: dict[int, PromptBlocks], held: dict[int, dict[str, int]]
    ) -> float:
        size = self.block_size(peer)
        if size not in chains:
            return max((chain.blocks for chain in chains.values()), default=0)
        chain = chains[size]
        return chain.blocks - min(held[size].get(peer.name, 0), chain.findable)

    def _count(
        self, peer: PrefillWorker, chains: dict[int, PromptBlocks], held: dict[int, dict[str, int]]
    ) -> None:
        size = self.block_size(peer)
        if size in chains:
            chain, counts = chains[size], self._counts
            matched = min(held[size].get(peer.name, 0), chain.findable)
            certain = min(self.index.certain(peer.name, chain.hashes), matched)
            counts["lookups"] += 1
            counts["blocks"] += chain.blocks
            counts["matched_blocks"] += matched
            counts["predicted_blocks"] += matched - certain


def _draw(costs: Sequence[float], temperature: float) -> int:
    """The least; with a temperature one that costs so many blocks more, e times as seldom."""
    least = min(costs)
    if not temperature:
        return costs.index(least)
    weights = [math.exp((least - cost) / temperature) for cost in costs]
    return random.choices(range(len(costs)), weights)[0]
