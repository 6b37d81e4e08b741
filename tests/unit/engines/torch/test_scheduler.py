from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from triptych.config import TorchSettings
from triptych.engines.block_pool import BlockPool, KvEventLog, short_hash
from triptych.engines.torch.kv_cache import PagedKVCache, root_hash
from triptych.engines.torch.scheduler import ScheduledStep, Scheduler
from triptych.engines.torch.sequence import Sequence
from triptych.messages import KvRemoved, Sampling

SIZE = 4


def made(tokens: int, *, first: int = 100) -> Sequence:
    loop = asyncio.new_event_loop()
    done = loop.create_future()
    loop.close()
    sequence = Sequence(
        request_id="request",
        phases="PD",
        sampling=Sampling(seed=1),
        emit=lambda _: None,
        done=done,
        task=None,
        borrowed=False,
        ids=[first + at for at in range(tokens)],
        prompt=tokens,
        limit=1000,
        positions=np.zeros((1, tokens), np.int64),
        shift=0,
        spans=(),
        keys=(),
        media=(),
        kv=None,
        hashes=[root_hash("")],
        return_ids=False,
    )
    sequence.extend_hashes(SIZE)
    return sequence


class Desk:
    def __init__(self, blocks: int, *, caching: bool = True, **settings: int) -> None:
        self.kv_events = KvEventLog(SIZE)
        self.kv_events.enabled = True
        self.pool = BlockPool(blocks, caching=caching, on_removed=self.kv_events.record_removed)
        self.pages = PagedKVCache(
            blocks,
            SIZE,
            layers=1,
            kv_heads=1,
            head_dim=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.scheduler = Scheduler(
            self.pool, self.pages, TorchSettings(**settings), blocks, self.kv_events
        )

    def step(self) -> ScheduledStep:
        """Schedule, and pretend to have run: every sequence that is through gets a token."""
        step = self.scheduler.schedule()
        for sequence in step.decodes:
            self.scheduler.advance(sequence, 1)
        for sequence, tokens in step.chunks:
            self.scheduler.advance(sequence, tokens)
        for sequence in step.sequences:
            if not sequence.pending:
                sequence.ids.append(7)
        return step


def test_prompts_go_in_chunks_beside_what_decodes():
    desk = Desk(50, step_tokens=10)
    one, two = made(8), made(17, first=200)
    desk.scheduler.add(one)
    desk.scheduler.add(two)
    assert desk.step().chunks == [(one, 8), (two, 2)]
    step = desk.step()
    assert (step.decodes, step.chunks) == ([one], [(two, 9)])
    assert desk.step().chunks == [(two, 6)]
    assert desk.step().decodes == [one, two]


def test_prompts_go_on_however_many_decode():
    desk = Desk(50, step_tokens=2)
    for at in range(4):
        desk.scheduler.add(made(1, first=at * 10))
    while len(desk.step().decodes) < 4:
        pass
    late = made(9, first=500)
    desk.scheduler.add(late)
    step = desk.step()
    assert len(step.decodes) == 4
    assert step.chunks == [(late, SIZE)]


def test_the_first_request_starts_first_though_a_later_one_would_fit():
    desk = Desk(10)
    big, huge, small = made(28), made(30, first=200), made(2, first=300)
    for sequence in (big, huge, small):
        desk.scheduler.add(sequence)
    assert desk.step().placed == [big]
    assert desk.step().placed == []
    desk.scheduler.drop(big)
    assert desk.step().placed == [huge, small]


def test_no_more_run_than_may():
    desk = Desk(50, max_running=2)
    sequences = [made(3, first=at * 10) for at in range(3)]
    for sequence in sequences:
        desk.scheduler.add(sequence)
    assert desk.step().placed == sequences[:2]
    desk.scheduler.drop(sequences[0])
    assert desk.step().placed == sequences[2:]


def test_the_youngest_is_preempted_and_returns_with_its_tokens():
    desk = Desk(7, caching=False)
    old, young = made(8), made(8, first=200)
    desk.scheduler.add(old)
    desk.scheduler.add(young)
    assert desk.step().placed == [old, young]
    mine = young.blocks.copy()
    desk.pages.kv[:, :, mine] = torch.randn(1, 2, 2, SIZE, 1, 2)
    before = desk.pages.kv[:, :, mine].clone()
    while young.row >= 0:
        step = desk.step()
    assert step.decodes == [old]
    assert list(desk.scheduler.waiting) == [young]
    assert young.blocks == []
    computed = young.computed
    desk.pages.kv[:, :, mine] = 0
    desk.scheduler.drop(old)
    assert desk.step().placed == [young]
    assert young.computed == computed + 1
    assert young.kv is None
    assert torch.equal(desk.pages.kv[:, :, young.blocks[:2]], before)
    desk.scheduler.drop(young)
    assert desk.pool.free == 7


def test_two_preempted_sequences_return_in_their_order_of_arrival():
    desk = Desk(20)
    sequences = [made(5, first=at * 10) for at in range(3)]
    for sequence in sequences:
        desk.scheduler.add(sequence)
    desk.step()
    desk.scheduler._preempt(sequences[2])
    desk.scheduler._preempt(sequences[1])
    assert desk.step().placed == sequences[1:]
    assert desk.scheduler.running == sequences


@pytest.mark.parametrize("tokens", [8, 9])
def test_a_known_prompt_leaves_a_token_to_compute(tokens):
    desk = Desk(20)
    first, second = made(tokens), made(tokens)
    desk.scheduler.add(first)
    desk.step()
    desk.scheduler.add(second)
    step = desk.step()
    assert second.cached == (tokens - 1) // SIZE * SIZE
    assert step.chunks == [(second, tokens - second.cached)]
    shared = second.cached // SIZE
    assert second.blocks[:shared] == first.blocks[:shared]
    assert not set(second.blocks[shared:]) & set(first.blocks[shared:])
    desk.scheduler.drop(first)
    desk.scheduler.drop(second)
    desk.scheduler.drop(second)
    assert desk.pool.free == 20


def test_a_retired_sequence_keeps_its_blocks_until_it_is_dropped():
    desk = Desk(20)
    sequence = made(6)
    desk.scheduler.add(sequence)
    desk.step()
    desk.scheduler.retire(sequence)
    assert not desk.step()
    assert desk.pool.free == 18
    desk.scheduler.drop(sequence)
    assert desk.pool.free == 20
    assert not desk.scheduler.table.any()


def test_newly_cached_blocks_are_reported_as_one_run_and_removals_after_it():
    desk = Desk(6)
    one = made(13)
    desk.scheduler.add(one)
    desk.step()
    [stored] = desk.kv_events.drain()
    assert [short_hash(digest) for digest in one.hashes[1:]] == list(stored.blocks)
    assert (stored.parent, stored.tokens) == (None, tuple(range(100, 112)))
    while len(one.ids) < 18:
        desk.step()
    [more] = desk.kv_events.drain()
    assert (more.parent, more.tokens) == (stored.blocks[-1], (112, 7, 7, 7))
    desk.scheduler.drop(one)
    desk.scheduler.add(made(20, first=500))
    desk.step()
    removed, after = desk.kv_events.drain()
    assert removed == KvRemoved((more.blocks[0], *reversed(stored.blocks[1:])))
    assert len(after.blocks) == 5


def test_only_blocks_that_were_not_cached_before_are_reported():
    desk = Desk(50)
    one, two = made(8), made(16)
    desk.scheduler.add(one)
    desk.scheduler.add(two)
    two.ids[9] = 3
    two.hashes = two.hashes[:1]
    two.extend_hashes(SIZE)
    desk.step()  # both at once: neither finds the other's
    first, second = desk.kv_events.drain()
    assert (first.blocks, second.parent) == ((*map(short_hash, one.hashes[1:]),), first.blocks[-1])
    assert len(second.blocks) == 2


def test_untrusted_blocks_are_not_reported_and_are_removed_on_nan():
    desk = Desk(50)
    one = made(8)
    one.trusted = False
    desk.scheduler.add(one)
    desk.step()
    assert desk.kv_events.drain() == []
    desk.scheduler.trust(one)
    [stored] = desk.kv_events.drain()
    desk.scheduler.drop_invalid(one)
    assert desk.kv_events.drain() == [KvRemoved(stored.blocks)]


def test_without_caching_nothing_is_reported():
    desk = Desk(50, caching=False)
    desk.scheduler.add(made(8))
    desk.step()
    assert desk.kv_events.drain() == []
