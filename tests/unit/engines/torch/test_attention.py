"""Paged attention against plain attention over the same keys and values."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.config import TorchSettings
from triptych.engines.block_pool import BlockPool, KvEventLog
from triptych.engines.torch import runner as runner_module
from triptych.engines.torch.attention import AttentionMetadata, paged_attention
from triptych.engines.torch.kv_cache import PagedKVCache
from triptych.engines.torch.runner import Runner
from triptych.engines.torch.scheduler import Scheduler
from triptych.engines.torch.sequence import Sequence
from triptych.messages import Sampling

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


class Harness:
    """Sequences of random keys and values, part of which stand in the pages already."""

    def __init__(self, lengths: list[int], computed: list[int]) -> None:
        torch.manual_seed(0)
        self.pages = PagedKVCache(
            200,
            SIZE,
            layers=2,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        pool = BlockPool(200)
        scheduler = Scheduler(pool, self.pages, TorchSettings(), 100, KvEventLog(SIZE))
        language = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace()))
        self.runner = Runner(language, self.pages, scheduler.table)
        self.kv = [torch.randn(2, KV_HEADS, length, DIM) for length in lengths]
        self.sequences = []
        for length, done, kv in zip(lengths, computed, self.kv, strict=True):
            sequence = made(length, done)
            assert scheduler._place(sequence)
            sequence.computed = done
            self.sequences.append(sequence)
            for at in range(done):
                block = sequence.blocks[at // SIZE]
                self.pages.kv[1, :, block, at % SIZE] = kv[:, :, at]

    def expected(self, at: int, query: torch.Tensor) -> torch.Tensor:
        done = self.sequences[at].computed
        length = self.kv[at].shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[done:]
        keys, values = (half.repeat_interleave(HEADS // KV_HEADS, 0) for half in self.kv[at])
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return out.transpose(0, 1)


def made(length: int, computed: int) -> Sequence:
    loop = asyncio.new_event_loop()
    done = loop.create_future()
    loop.close()
    return Sequence(
        request_id="request",
        phases="PD",
        sampling=Sampling(seed=1),
        emit=lambda _: None,
        done=done,
        task=None,
        borrowed=False,
        ids=list(range(length)),
        prompt=length,
        limit=length + 1,
        positions=np.zeros((1, length), np.int64),
        shift=0,
        spans=(),
        keys=(),
        media=(),
        kv=None,
        hashes=[b""],
        return_ids=False,
    )


@pytest.mark.parametrize("gather", [1 << 18, 64], ids=["one call", "many calls"])
def test_every_sequence_sees_its_own_past_and_nothing_else(monkeypatch, gather):
    monkeypatch.setattr(runner_module, "GATHER", gather)
    decoding = [1, 2, 4, 5, 17, 33, 150]
    chunked = [(6, 0), (9, 4), (30, 29), (40, 13)]
    lengths = decoding + [length for length, _ in chunked]
    computed = [length - 1 for length in decoding] + [done for _, done in chunked]
    harness = Harness(lengths, computed)
    counts = [length - done for length, done in zip(lengths, computed, strict=True)]
    queries = [torch.randn(HEADS, count, DIM) for count in counts]
    fresh = [kv[:, :, done:] for kv, done in zip(harness.kv, computed, strict=True)]
    rows = np.array([s.row for s in harness.sequences[: len(decoding)]])
    groups = harness.runner._groups(rows, np.array(decoding))
    assert len(groups) > 1
    start, chunks, slots = len(decoding), [], []
    for sequence, count in zip(harness.sequences, counts, strict=True):
        at = np.arange(sequence.computed, sequence.computed + count)
        slots.append(np.array(sequence.blocks)[at // SIZE] * SIZE + at % SIZE)
    for sequence, count in list(zip(harness.sequences, counts, strict=True))[len(decoding) :]:
        chunks.append(harness.runner._chunk(sequence, start, count))
        start += count
    paged = AttentionMetadata(
        harness.pages, torch.from_numpy(np.concatenate(slots)), groups, tuple(chunks)
    )
    joined = torch.cat(fresh, dim=2)  # [2, kv_heads, tokens, dim]
    out, weights = paged_attention(
        SimpleNamespace(layer_idx=1),
        torch.cat(queries, dim=1)[None],
        joined[0][None],
        joined[1][None],
        None,
        scaling=DIM**-0.5,
        dropout=0.0,
        attention_metadata=paged,
    )
    assert weights is None
    wanted = torch.cat([harness.expected(at, query) for at, query in enumerate(queries)])
    torch.testing.assert_close(out[0], wanted, atol=1e-5, rtol=1e-5)
    assert not harness.pages.kv[0].any()  # the other layer
    assert not harness.pages.kv[:, :, 0].any()  # the null block
