"""Paged, variable-length attention, registered with transformers under a name.

One step is one row of tokens from many sequences. A layer writes keys and values of the new tokens
to their slots, then attends sequences with one new token together, in groups of similar length, and
longer chunks one by one. AttentionMetadata holds all indices and masks: they are made once for a
step, not once for a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.engines.torch.kv_cache import PagedKVCache

ATTENTION_NAME = "triptych_paged"  # transformers builds no masks for an unknown name


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, at rows ``start`` to ``stop`` of the step."""

    start: int
    stop: int
    blocks: Tensor  # [sequences * width] int64, padded with the null block
    mask: Tensor  # [sequences, 1, 1, width * block_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several new tokens of one sequence, at rows ``start`` to ``stop`` of the step."""

    start: int
    stop: int
    blocks: Tensor | None  # [width] int64; None: the chunk begins its sequence
    mask: Tensor | None  # [tokens, length], 0 or -inf; None: all of ``length`` is seen
    length: int  # tokens of the sequence, this chunk included


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The blocks, slots and masks of one step, for every layer."""

    kv_cache: PagedKVCache
    slots: Tensor  # [tokens] int64: where new keys and values go
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, dim]
    key: Tensor,  # [1, kv_heads, tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_metadata: AttentionMetadata,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = attention_metadata.kv_cache.by_slot[layer]
    keys.index_copy_(0, attention_metadata.slots, key[0].transpose(0, 1))
    values.index_copy_(0, attention_metadata.slots, value[0].transpose(0, 1))
    parts = [
        _attend_group(group, attention_metadata.kv_cache, layer, query[0], scaling)
        for group in attention_metadata.groups
    ]
    for chunk in attention_metadata.chunks:
        new = (key[:, :, chunk.start : chunk.stop], value[:, :, chunk.start : chunk.stop])
        parts.append(_attend_chunk(chunk, attention_metadata.kv_cache, layer, query, new, scaling))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None  # [1, tokens, heads, dim]


def _attend_group(
    group: DecodeGroup, kv_cache: PagedKVCache, layer: int, query: Tensor, scaling: float
) -> Tensor:
    count = group.stop - group.start
    gathered = kv_cache.gather(layer, group.blocks)
    kv_heads, dim = gathered.shape[-2:]
    heads = query.shape[0]
    gathered = gathered.view(2, count, -1, kv_heads, dim).transpose(2, 3)
    # Heads that share a key take the axis of query tokens, so that no key is repeated.
    rows = query[:, group.start : group.stop].transpose(0, 1)  # [sequences, heads, dim]
    out = scaled_dot_product_attention(
        rows.reshape(count, kv_heads, heads // kv_heads, dim),
        gathered[0],
        gathered[1],
        attn_mask=group.mask,
        scale=scaling,
    )
    return out.reshape(count, heads, dim)


def _attend_chunk(
    chunk: PrefillChunk,
    kv_cache: PagedKVCache,
    layer: int,
    query: Tensor,
    new: tuple[Tensor, Tensor],  # keys and values of the chunk, each [1, kv_heads, tokens, dim]
    scaling: float,
) -> Tensor:
    query = query[:, :, chunk.start : chunk.stop]
    key, value = new
    if chunk.blocks is not None:
        gathered = kv_cache.gather(layer, chunk.blocks).flatten(1, 2)[:, : chunk.length]
        key, value = gathered.transpose(1, 2).unsqueeze(1)  # each [1, kv_heads, length, dim]
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and chunk.mask is not None and key.is_cuda:
        # With a mask, CUDA's fast kernels do not share keys among heads by themselves.
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        shared = 1
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=chunk.mask,
        is_causal=chunk.blocks is None,
        scale=scaling,
        enable_gqa=shared > 1,
    )
    return out[0].transpose(0, 1)  # [tokens, heads, dim]


AttentionInterface.register(ATTENTION_NAME, paged_attention)
