"""Chooses the tokens of the next step and gives sequences their blocks.

First come, first served. A sequence starts when there are blocks for its whole prompt. When running
sequences need more blocks than there are, the youngest is preempted: its KV cache moves to host
memory, and it waits at the head of the queue. Nothing is computed twice, since the media of a
prompt may be gone. Knows no model.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from triptych.config import TorchSettings
from triptych.engines.block_pool import NULL_BLOCK, BlockPool, KvEventLog
from triptych.engines.torch.kv_cache import PagedKVCache
from triptych.engines.torch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The sequences and tokens of one forward pass."""

    decodes: list[Sequence]  # one new token each
    chunks: list[tuple[Sequence, int]]  # and the number of its new tokens
    # Sequences that start or resume in this step.
    placed: list[Sequence] = field(default_factory=list)
    # Their media are neither here nor in the prefix cache.
    refused: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(sequence for sequence, _ in self.chunks)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def alone(self) -> list[ScheduledStep]:
        """The same work as one step per sequence."""
        return [ScheduledStep([s], []) for s in self.decodes] + [
            ScheduledStep([], [c]) for c in self.chunks
        ]


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        kv_cache: PagedKVCache,
        settings: TorchSettings,
        width: int,
        kv_events: KvEventLog,
    ) -> None:
        self._pool = pool
        self._kv_events = kv_events
        self._kv_cache = kv_cache
        self._size = kv_cache.block_size
        self._settings = settings
        self._rows = list(range(settings.max_running))[::-1]
        # [row, block of the sequence]
        self.table = np.full((settings.max_running, width), NULL_BLOCK)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove the sequence and free its blocks. Dropping twice does nothing."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.retire(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.kv, sequence.media = None, ()

    def drop_invalid(self, sequence: Sequence) -> None:
        """Drop a sequence whose keys and values are not finite, and clear its blocks."""
        self._kv_cache.clear(self._pool.evict(sequence.blocks))
        self.drop(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Stop running a sequence. It keeps its blocks until it is dropped."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self.table[sequence.row] = NULL_BLOCK
            self._rows.append(sequence.row)
            sequence.row = -1

    def trust(self, sequence: Sequence) -> None:
        """The borrowed memory was valid: others may find the blocks of the sequence from now on."""
        sequence.trusted = True
        if sequence.blocks:
            self.advance(sequence, 0)

    def schedule(self) -> ScheduledStep:
        self._grow()
        decodes = [s for s in self.running if s.decodes]
        # Prompts always advance, by a block at least, however many sequences decode.
        budget = max(self._settings.step_tokens - len(decodes), self._size)
        step = ScheduledStep(decodes, [])
        for sequence in [s for s in self.running if not s.decodes]:
            budget -= self._cut(step, sequence, budget)
        while budget > 0 and self.waiting and self._rows and self._place(self.waiting[0]):
            sequence = self.waiting.popleft()
            if sequence.row < 0:
                step.refused.append(sequence)
                continue
            step.placed.append(sequence)
            budget -= self._cut(step, sequence, budget)
        return step

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """So many more tokens have keys and values; share blocks that became full."""
        sequence.computed += tokens
        full = sequence.computed // self._size
        if full > sequence.shared_blocks and sequence.trusted:
            if full >= len(sequence.hashes):
                sequence.extend_hashes(self._size)
            self._share(sequence, full)

    def _share(self, sequence: Sequence, full: int) -> None:
        """Make blocks up to this number findable, and write down which of them are new."""
        first, hashes = sequence.shared_blocks, sequence.hashes[sequence.shared_blocks : full + 1]
        for start, end in self._pool.cache_blocks(sequence.blocks[first:full], hashes[1:]):
            new = hashes[start : end + 1]
            self._kv_events.record_stored(
                first + start, new, sequence.ids, sequence.places, sequence.salt
            )
        sequence.shared_blocks = full

    def _cut(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        if sequence.decodes:
            step.decodes.append(sequence)
            return 1
        tokens = min(sequence.pending, budget)
        if tokens > 0:
            step.chunks.append((sequence, tokens))
        return tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _grow(self) -> None:
        """A block for every token of the next step; preempts the youngest if none is free."""
        for sequence in self.running.copy():
            while sequence.row >= 0 and len(sequence.ids) > len(sequence.blocks) * self._size:
                if self._pool.free:
                    (block,) = self._pool.allocate(1)
                    self.table[sequence.row, len(sequence.blocks)] = block
                    sequence.blocks.append(block)
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        blocks = sequence.blocks[: self._blocks_for(sequence.computed)]
        if blocks:
            kv = self._kv_cache.kv
            sequence.kv = torch.empty(self._kv_cache.shape(len(blocks)), dtype=kv.dtype)
            self._kv_cache.save(blocks, sequence.kv)
        self.retire(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.shared_blocks = [], 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks and fill those it brings; False: too few are free.

        A sequence whose media had to be in the prefix cache, and are not, gets no row.
        """
        needed = self._blocks_for(len(sequence.ids))
        # All blocks that it brings may be cached; a new prompt must leave one token to compute.
        have = sequence.computed if sequence.kv is not None else len(sequence.ids) - 1
        if sequence.kv is None and sequence.ranks_prompt:
            have = 0  # the prefix cache has keys and values, but no logits
        known = self._pool.match(sequence.hashes[1 : 1 + have // self._size])
        if sequence.kv is None and len(known) * self._size < sequence.required_cached:
            self._pool.release(known)
            return True
        # Leave a block for each running sequence, or the next steps would preempt this one.
        if self._pool.free < needed - len(known) + len(self.running):
            self._pool.release(known)
            return False
        sequence.blocks = known + self._pool.allocate(needed - len(known))
        sequence.shared_blocks = len(known)
        if sequence.kv is not None:
            filled = self._blocks_for(sequence.computed)
            self._kv_cache.load(
                sequence.kv[:, :, len(known) :], sequence.blocks[len(known) : filled]
            )
            sequence.kv = None
            self.advance(sequence, 0)
        else:
            sequence.computed = sequence.cached = len(known) * self._size
        self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.row = self._rows.pop()
        self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        sequence.started = sequence.started or time.perf_counter()
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrived)
