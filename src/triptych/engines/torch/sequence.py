"""One generation in the engine, and the checks that it must pass first."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from triptych.engines.base import Emit, Generation
from triptych.engines.checks import check_embedding, check_work, max_new_tokens
from triptych.engines.torch.grammar import GrammarMatcher
from triptych.engines.torch.kv_cache import block_hashes, root_hash
from triptych.errors import EngineFailed
from triptych.messages import Delta, MediaMeta, MediaSpan, PromptLogprob, Sampling
from triptych.models.layouts import EmbeddingSpan, Layout, locate_media
from triptych.models.tensors import tensor_view

LayoutFunction = Callable[[tuple[int, ...], list[int], list[MediaMeta]], Layout]


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits that a sequence must fit in."""

    context: int  # tokens of a sequence, for the model and for the KV cache
    vocabulary: int
    width: int  # of an embedding row
    block_size: int
    kv_shape: Callable[[int], tuple[int, ...]]  # of so many blocks


@dataclass(eq=False, slots=True)
class Sequence:
    """Owned by the step loop from ``add`` on; the event loop uses the marked fields only."""

    request_id: str
    phases: str  # event loop too
    sampling: Sampling
    emit: Emit  # event loop only
    done: asyncio.Future[None]  # event loop only
    task: asyncio.Task[Any]  # event loop only: the caller's task
    borrowed: bool  # it reads memory of other workers, which may turn out stale by the first emit
    ids: list[int]  # prompt and generated tokens
    prompt: int  # tokens of the prompt in ids
    limit: int  # length of ids at which it ends
    positions: np.ndarray  # [axes, prompt] int64
    shift: int  # position of a generated token less its index
    spans: tuple[EmbeddingSpan, ...]  # where rows of media stand
    keys: tuple[bytes, ...]  # media key of each item
    media: tuple[Tensor, ...]  # embedding [tokens, width] of each item; empty after the prompt
    kv: Tensor | None  # what is computed, while it is not in the KV cache
    hashes: list[bytes]  # of the blocks known to be full, in order; the first is the root
    return_ids: bool
    places: tuple[MediaSpan, ...] = ()  # where each item stands, its marks too
    salt: str = ""
    computed: int = 0  # tokens whose keys and values exist
    cached: int = 0  # of these, found in the prefix cache at the start
    required_cached: int = 0  # tokens that must be found there: no rows came for their media
    shared_blocks: int = 0  # its first blocks that other sequences can find
    row: int = -1  # of the tables, while it runs
    blocks: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0  # when decoding began
    trusted: bool = False  # others may find its blocks
    handover: Delta | None = None  # phase P: the first token, for the event loop
    cancelled: bool = False  # set by the event loop
    emitted: bool = False  # event loop only: a delta was emitted
    # Of the tokens of the prompt from the second on, as far as they are computed, where asked for.
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    matcher: GrammarMatcher | None = None  # of its grammar, if it has one
    index_positioned: int = field(init=False)  # tokens from the start whose position is their index

    def __post_init__(self) -> None:
        self.trusted = not self.borrowed
        self.index_positioned = _count_index_positioned(self.positions, self.shift)

    @property
    def pending(self) -> int:
        return len(self.ids) - self.computed

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt :]

    @property
    def decodes(self) -> bool:
        """One token is new, and it was generated."""
        return self.computed >= self.prompt and self.pending == 1

    @property
    def ranks_prompt(self) -> bool:
        """Whether it needs the logits of the prompt, so that no token of it may be skipped."""
        return self.sampling.prompt_logprobs is not None and not self.first

    def positions_of(self, begin: int, end: int) -> np.ndarray:
        """Positions [axes, tokens] of a range; generated tokens count up from the prompt."""
        given = self.positions[:, begin:end]
        if end <= self.prompt:
            return given
        made = np.arange(max(begin, self.prompt), end) + self.shift
        return np.concatenate((given, np.broadcast_to(made, (len(given), len(made)))), axis=1)

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that became full since the last time."""
        start = (len(self.hashes) - 1) * block_size
        self.hashes += block_hashes(
            self.hashes[-1],
            self.ids,
            start,
            block_size,
            self.spans,
            self.keys,
            self._position_bytes,
        )

    def _position_bytes(self, begin: int, end: int) -> bytes:
        """Positions of a range as bytes; none if every token up to it is at its index."""
        return b"" if end <= self.index_positioned else self.positions_of(begin, end).tobytes()


def make_sequence(
    generation: Generation,
    emit: Emit,
    done: asyncio.Future[None],
    task: asyncio.Task[Any],
    lay_out: LayoutFunction,
    limits: SequenceLimits,
    matcher: GrammarMatcher | None = None,
) -> Sequence:
    """A sequence that can run to its end; raises an error for the client or the operator."""
    work, metas = generation.work, [item.meta for item in generation.media]
    check_work(generation, limits.vocabulary)
    layout = lay_out(work.prompt, [item.at for item in work.media], metas)
    prompt = len(layout.ids)
    sequence = Sequence(
        request_id=work.id,
        phases=generation.phases,
        sampling=work.sampling,
        emit=emit,
        done=done,
        task=task,
        borrowed=bool(generation.media) or "P" not in generation.phases,
        ids=[*layout.ids, *work.generated],
        prompt=prompt,
        limit=prompt + max_new_tokens(work, prompt, limits.context),
        positions=layout.positions,
        shift=layout.next_position - prompt,
        spans=layout.spans,
        keys=tuple(meta.key for meta in metas),
        media=_embeddings(generation, limits.width) if "P" in generation.phases else (),
        kv=None,
        hashes=[root_hash(work.salt)],
        return_ids=work.return_prompt_ids,
        places=locate_media(layout, work, metas),
        salt=work.salt,
        matcher=matcher,
    )
    if "P" not in generation.phases:
        _take_over(sequence, generation, limits)
    elif not sequence.media:
        sequence.required_cached = max(
            (span.offset + span.length for span in layout.spans), default=0
        )
    sequence.extend_hashes(limits.block_size)
    return sequence


def _count_index_positioned(positions: np.ndarray, shift: int) -> int:
    """How many tokens, from the start, have their index as position."""
    prompt = positions.shape[1]
    moved = (positions != np.arange(prompt)).any(axis=0)
    if moved.any():
        return int(moved.argmax())
    return prompt if shift else sys.maxsize


def _embeddings(generation: Generation, width: int) -> tuple[Tensor, ...]:
    if not any(item.arrays for item in generation.media):
        return ()  # no media, or all of them must be in the prefix cache
    tensors = []
    for item in generation.media:
        check_embedding(item, width)
        tensors.append(tensor_view(item.arrays[0]))
    return tuple(tensors)


def _take_over(sequence: Sequence, generation: Generation, limits: SequenceLimits) -> None:
    """Continue after prefill with its KV cache and its first token."""
    if generation.first is None or not generation.first.ids:
        raise EngineFailed("decode was asked for without prefill's first token")
    given = len(sequence.ids)
    shape = limits.kv_shape(-(-given // limits.block_size))
    shapes = [array.shape for array in generation.kv]
    if shapes != [shape]:
        raise EngineFailed(
            f"a KV cache of shape {shape} is needed, but prefill gave {shapes}: prefill and decode "
            "must have the same model and block_size"
        )
    sequence.kv = tensor_view(generation.kv[0])
    sequence.computed = given
    sequence.ids += generation.first.ids
