"""One generation on its way through the engine, and the checks it must pass to get in."""

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
from triptych.engines.torch.kv_cache import block_hashes, root_hash
from triptych.errors import EngineFailed
from triptych.messages import Delta, MediaMeta, MediaSpan, Sampling
from triptych.models.layouts import EmbeddingSpan, Layout, locate_media
from triptych.models.tensors import tensor_view

LayoutFunction = Callable[[tuple[int, ...], list[int], list[MediaMeta]], Layout]


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """What a sequence must fit in."""

    context: int  # tokens of a sequence, for the model and for the pages
    vocabulary: int
    width: int  # of an embedding row
    block_size: int
    kv_shape: Callable[[int], tuple[int, ...]]  # of so many blocks


@dataclass(eq=False, slots=True)
class Sequence:
    """Owned by the step loop from ``add`` to the end; the event loop reads what is marked."""

    span: str  # event loop too
    sampling: Sampling
    emit: Emit  # event loop only
    done: asyncio.Future[None]  # event loop only
    task: asyncio.Task[Any]  # event loop only: who called
    borrowed: bool  # it reads memory of other workers, which may prove stale by the first emit
    ids: list[int]  # prompt and generated tokens
    prompt: int  # how many of ids were given
    limit: int  # length of ids at which it ends
    positions: np.ndarray  # [axes, prompt] int64
    shift: int  # position of a generated token less its index
    spans: tuple[EmbeddingSpan, ...]  # where rows of media stand
    keys: tuple[bytes, ...]  # media key of each item
    media: tuple[Tensor, ...]  # embedding [tokens, width] of each item; empty after the prompt
    kv: Tensor | None  # holds what is computed, while it is not in pages
    hashes: list[bytes]  # of the blocks known to be full, in order; the first is the root
    return_ids: bool
    places: tuple[MediaSpan, ...] = ()  # where each item stands, its marks too
    salt: str = ""
    computed: int = 0  # tokens whose keys and values exist
    cached: int = 0  # of these, found in the prefix cache at the start
    recalled: int = 0  # tokens that must be found there: of the media in them there are no rows
    kept: int = 0  # blocks that were made findable
    row: int = -1  # of the tables, while it runs
    blocks: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0  # when decoding began
    trusted: bool = False  # its blocks may be found by others
    handover: Delta | None = None  # span P: the first token, for the event loop
    cancelled: bool = False  # set by the event loop
    told: bool = False  # event loop only: something was emitted
    counted: int = field(init=False)  # tokens from the start whose position is their index

    def __post_init__(self) -> None:
        self.trusted = not self.borrowed
        self.counted = _counted(self.positions, self.shift)

    @property
    def pending(self) -> int:
        return len(self.ids) - self.computed

    @property
    def decodes(self) -> bool:
        """One token is new, and it was generated."""
        return self.computed >= self.prompt and self.pending == 1

    def where(self, begin: int, end: int) -> np.ndarray:
        """Positions [axes, tokens] of these; generated ones count up from the prompt."""
        given = self.positions[:, begin:end]
        if end <= self.prompt:
            return given
        made = np.arange(max(begin, self.prompt), end) + self.shift
        return np.concatenate((given, np.broadcast_to(made, (len(given), len(made)))), axis=1)

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that became full since the last time."""
        start = (len(self.hashes) - 1) * block_size
        self.hashes += block_hashes(
            self.hashes[-1], self.ids, start, block_size, self.spans, self.keys, self._moved
        )

    def _moved(self, begin: int, end: int) -> bytes:
        """Positions of these, unless all tokens up to here just count."""
        return b"" if end <= self.counted else self.where(begin, end).tobytes()


def make_sequence(
    generation: Generation,
    emit: Emit,
    done: asyncio.Future[None],
    task: asyncio.Task[Any],
    lay_out: LayoutFunction,
    bounds: SequenceLimits,
) -> Sequence:
    """A sequence that can run to its end. Raises what the client or the operator must know."""
    work, metas = generation.work, [item.meta for item in generation.media]
    check_work(generation, bounds.vocabulary)
    layout = lay_out(work.prompt, [item.at for item in work.media], metas)
    prompt = len(layout.ids)
    sequence = Sequence(
        span=generation.span,
        sampling=work.sampling,
        emit=emit,
        done=done,
        task=task,
        borrowed=bool(generation.media) or "P" not in generation.span,
        ids=[*layout.ids, *work.generated],
        prompt=prompt,
        limit=prompt + max_new_tokens(work, prompt, bounds.context),
        positions=layout.positions,
        shift=layout.next_position - prompt,
        spans=layout.spans,
        keys=tuple(meta.key for meta in metas),
        media=_embeddings(generation, bounds.width) if "P" in generation.span else (),
        kv=None,
        hashes=[root_hash(work.salt)],
        return_ids=work.return_prompt_ids,
        places=locate_media(layout, work, metas),
        salt=work.salt,
    )
    if "P" not in generation.span:
        _take_over(sequence, generation, bounds)
    elif not sequence.media:
        sequence.recalled = max((span.offset + span.length for span in layout.spans), default=0)
    sequence.extend_hashes(bounds.block_size)
    return sequence


def _counted(positions: np.ndarray, shift: int) -> int:
    """How many tokens of a sequence, from its start, stand at the position that is their index."""
    prompt = positions.shape[1]
    moved = (positions != np.arange(prompt)).any(axis=0)
    if moved.any():
        return int(moved.argmax())
    return prompt if shift else sys.maxsize


def _embeddings(generation: Generation, width: int) -> tuple[Tensor, ...]:
    if not any(item.arrays for item in generation.media):
        return ()  # none, or all of them are to be found in the prefix cache
    tensors = []
    for item in generation.media:
        check_embedding(item, width)
        tensors.append(tensor_view(item.arrays[0]))
    return tuple(tensors)


def _take_over(sequence: Sequence, generation: Generation, bounds: SequenceLimits) -> None:
    """Go on where prefill ended: its KV cache and its first token."""
    if generation.first is None or not generation.first.ids:
        raise EngineFailed("decode was asked for without prefill's first token")
    given = len(sequence.ids)
    shape = bounds.kv_shape(-(-given // bounds.block_size))
    shapes = [array.shape for array in generation.kv]
    if shapes != [shape]:
        raise EngineFailed(
            f"a KV cache of shape {shape} is needed, but prefill gave {shapes}: prefill and decode "
            "must have the same model and block_size"
        )
    sequence.kv = tensor_view(generation.kv[0])
    sequence.computed = given
    sequence.ids += generation.first.ids
