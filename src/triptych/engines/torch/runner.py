"""One forward step over a flat batch: tokens of all its sequences in one row.

Turns a Step into tensors, runs transformers' text model with our attention, and gives the last
hidden states from which logits are needed. Changes nothing but the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.engines.torch.attention import (
    ATTENTION_NAME,
    AttentionMetadata,
    DecodeGroup,
    PrefillChunk,
)
from triptych.engines.torch.kv_cache import PagedKVCache
from triptych.engines.torch.scheduler import ScheduledStep
from triptych.engines.torch.sequence import Sequence
from triptych.models.family import LanguageModel

GATHER = 1 << 18  # tokens of context that one group of decoding sequences may gather
CACHED = 2 << 20  # bytes on a CPU: gathered blocks are read again while they are in the CPU's cache


@dataclass(frozen=True, slots=True)
class StepStates:
    """The last hidden states of a step that become logits."""

    sampled: list[Sequence]  # that get a token
    last: Tensor  # [sampled, hidden]
    # Of the prompts whose log-probabilities were asked for: the index of the first token that they
    # predict, and a state [tokens, hidden] for each of these tokens.
    prompts: list[tuple[Sequence, int, Tensor]]


class Runner:
    def __init__(self, language: LanguageModel, kv_cache: PagedKVCache, table: np.ndarray) -> None:
        config = language.model.config
        config._attn_implementation = ATTENTION_NAME  # type: ignore[union-attr]
        self._language = language
        self._kv_cache = kv_cache
        self._size = kv_cache.block_size
        self._table = table
        self._device = kv_cache.device
        self._dtype = kv_cache.kv.dtype
        self._gather = GATHER
        if kv_cache.device.type == "cpu":
            self._gather = min(GATHER, CACHED // kv_cache.token_bytes)

    def run(self, step: ScheduledStep) -> StepStates:
        decodes = sorted(step.decodes, key=lambda s: s.computed)
        starts = np.array([s.computed for s in decodes], np.int64)
        rows = np.array([s.row for s in decodes], np.int64)
        shifts = np.array([s.shift for s in decodes], np.int64)
        ids = [s.ids[-1] for s in decodes]
        slots = [self._table[rows, starts // self._size] * self._size + starts % self._size]
        positions = [(starts + shifts)[None]]
        chunks, sampled, last = [], decodes, list(range(len(decodes)))
        ranked: list[tuple[Sequence, int, int, int]] = []
        for sequence, tokens in step.chunks:
            begin, end = sequence.computed, sequence.computed + tokens
            chunks.append(self._chunk(sequence, len(ids), tokens))
            if sequence.ranks_prompt and (most := min(end, sequence.prompt - 1) - begin) > 0:
                ranked.append((sequence, begin + 1, len(ids), len(ids) + most))
            ids += sequence.ids[begin:end]
            at = np.arange(begin, end)
            slots.append(self._table[sequence.row, at // self._size] * self._size + at % self._size)
            positions.append(sequence.positions_of(begin, end))
            if end == len(sequence.ids):
                sampled.append(sequence)
                last.append(len(ids) - 1)
        metadata = AttentionMetadata(
            self._kv_cache,
            self._put(np.concatenate(slots)),
            self._groups(rows, starts + 1),
            tuple(chunks),
        )
        embeds, deep = self._embed(ids, step, len(rows))
        hidden = self._forward(embeds, _join(positions), metadata, deep)
        return StepStates(
            sampled,
            hidden[self._put(np.array(last, np.int64))],
            [(sequence, first, hidden[low:high]) for sequence, first, low, high in ranked],
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[sequences, hidden] to [sequences, vocabulary]."""
        logits: Tensor = self._language.head(hidden)
        return logits

    def probe(self) -> None:
        """Raise RuntimeError if the device is broken, not just out of memory."""
        torch.ones(1, device=self._device).add_(1).item()

    def _forward(
        self,
        embeds: Tensor,
        positions: np.ndarray,
        metadata: AttentionMetadata,
        deep: dict[str, Any],
    ) -> Tensor:
        """[tokens, hidden] to the same, through all layers."""
        where = self._put(positions)
        out = self._language.model(
            inputs_embeds=embeds[None],
            position_ids=where[:, None] if len(positions) > 1 else where,
            attention_mask=None,
            use_cache=False,
            attention_metadata=metadata,
            **deep,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _embed(
        self, ids: list[int], step: ScheduledStep, start: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Embeddings [tokens, hidden], and the deepstack inputs of later layers.

        Chunks begin at ``start``. The first ``hidden`` columns of a media row are its embedding,
        and as many again belong to each deepstack layer.
        """
        embeds: Tensor = self._language.embed(self._put(np.array(ids, np.int64)))
        found = list(_media(step, start))
        if not found:
            return embeds, {}
        # All rows in one copy: a video may have hundreds of spans.
        parts = [part for _, part in found]
        if len({part.device for part in parts}) > 1:  # small embeddings arrive in host memory
            parts = [part.to(embeds.device) for part in parts]
        rows = torch.cat(parts).to(embeds.device, embeds.dtype)
        where = np.concatenate([np.arange(at, at + len(part)) for at, part in found])
        own, *deep = rows.split(self._language.hidden, dim=1)
        embeds[self._put(where)] = own
        if not deep:
            return embeds, {}
        mask = np.zeros((1, len(embeds)), np.bool_)
        mask[:, where] = True
        return embeds, {"visual_pos_masks": self._put(mask), "deepstack_visual_embeds": deep}

    def _groups(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[DecodeGroup, ...]:
        """Decoding sequences, shortest first, in groups that pad none to over twice its length."""
        groups, start = [], 0
        widths = -(-lengths // self._size)
        while start < len(rows):
            reach = int(widths[start]) * 2 if widths[start] > 4 else 8
            stop = int(np.searchsorted(widths, reach, side="right"))
            most = max(1, self._gather // (int(widths[stop - 1]) * self._size))
            stop = min(stop, start + most)
            width = int(widths[stop - 1])
            seen = np.arange(width * self._size) < lengths[start:stop, None]
            groups.append(
                DecodeGroup(
                    start,
                    stop,
                    self._put(self._table[rows[start:stop], :width].reshape(-1)),
                    self._mask(seen)[:, None, None],
                )
            )
            start = stop
        return tuple(groups)

    def _chunk(self, sequence: Sequence, start: int, tokens: int) -> PrefillChunk:
        before, length = sequence.computed, sequence.computed + tokens
        if not before:
            return PrefillChunk(start, start + tokens, None, None, length)
        width = -(-length // self._size)
        mask = None
        if tokens > 1:
            mask = self._mask(np.arange(length) <= np.arange(before, length)[:, None])
        blocks = self._put(self._table[sequence.row, :width])
        return PrefillChunk(start, start + tokens, blocks, mask, length)

    def _mask(self, seen: np.ndarray) -> Tensor:
        """True to 0, False to -inf."""
        visible = torch.from_numpy(seen).to(self._device)
        zero = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return zero.masked_fill_(visible.logical_not_(), float("-inf"))

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _media(step: ScheduledStep, start: int) -> Iterator[tuple[int, Tensor]]:
    """Media rows within the chunks, each with its first index in the batch."""
    for sequence, tokens in step.chunks:
        begin, end = sequence.computed, sequence.computed + tokens
        for span in sequence.spans if sequence.media else ():
            low, high = max(begin, span.offset), min(end, span.offset + span.length)
            if low < high:
                row = span.row + low - span.offset
                yield start + low - begin, sequence.media[span.item][row : row + high - low]
        start += tokens


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """All positions [axes, tokens]; a decoding token has the same position on every axis."""
    axes = max(len(part) for part in parts)
    return np.concatenate([np.broadcast_to(p, (axes, p.shape[1])) for p in parts], axis=1)
