from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.engines.block_pool import NULL_BLOCK, BlockPool
from triptych.engines.torch.kv_cache import PagedKVCache, block_hashes, root_hash
from triptych.models.layouts import EmbeddingSpan

SIZE = 4


def hashes(ids, spans=(), keys=(), salt=""):
    return list(block_hashes(root_hash(salt), ids, 0, SIZE, spans, keys))


def filled(pool: BlockPool, digests: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        pool.cache_block(block, digest)
    return blocks


def test_a_known_prefix_is_found_again_and_counts_as_free():
    pool = BlockPool(8)
    digests = hashes(range(12))
    blocks = filled(pool, digests)
    assert pool.free == 5
    pool.release(blocks)
    assert pool.free == 8
    other = hashes([*range(8), 99, 99, 99, 99])
    assert pool.match(other) == blocks[:2]
    assert pool.free == 6
    pool.release(blocks[:2])
    assert pool.free == 8


def test_a_shared_block_stays_until_the_last_one_lets_go():
    pool = BlockPool(4)
    (block,) = filled(pool, hashes(range(4)))
    assert pool.match(hashes(range(4))) == [block]
    pool.release([block])
    assert pool.free == 3
    pool.release([block])
    assert pool.free == 4


def test_the_least_recently_used_is_evicted_first_and_tails_before_heads():
    pool = BlockPool(4)
    old, new = hashes(range(8)), hashes(range(100, 108))
    first, second = filled(pool, old), filled(pool, new)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.match(old) == [first[0]]
    assert pool.match(new) == second


def test_without_caching_nothing_is_found():
    pool = BlockPool(4, caching=False)
    pool.release(filled(pool, hashes(range(8))))
    assert pool.match(hashes(range(8))) == []
    assert pool.free == 4


def test_a_second_block_of_the_same_content_stays_private():
    pool = BlockPool(4)
    digests = hashes(range(4))
    one, two = filled(pool, digests), filled(pool, digests)
    pool.release(one + two)
    assert pool.match(digests) == one
    assert pool.free == 3


def test_forgotten_blocks_are_not_found_and_the_shared_are_left_alone():
    pool = BlockPool(4)
    digests = hashes(range(8))
    blocks = filled(pool, digests)
    assert pool.match(digests[:1]) == blocks[:1]
    assert pool.evict(blocks) == blocks[1:]
    pool.release(blocks)
    pool.release(blocks[:1])
    assert pool.match(digests) == []
    assert pool.free == 4


def test_hashes_distinguish_everything_that_a_block_depends_on():
    ids, key, other = list(range(16)), b"k" * 32, b"o" * 32
    span = EmbeddingSpan(6, 4, 0)
    same = hashes(ids, [span], [key])
    assert same == hashes(ids, [span], [key])
    assert all(len(digest) == 32 for digest in same)
    variants = [
        hashes(ids),
        hashes(ids, [span], [other]),
        hashes(ids, [EmbeddingSpan(5, 4, 0)], [key]),
        hashes(ids, [EmbeddingSpan(6, 5, 0)], [key]),
        hashes(ids, [EmbeddingSpan(6, 4, 0, row=1)], [key]),
        hashes(ids, [EmbeddingSpan(6, 1, 0), EmbeddingSpan(7, 3, 0, row=1)], [key]),
        hashes(ids, [span], [key], salt="tenant"),
        hashes([*ids[:6], 7, *ids[7:]], [span], [key]),
    ]
    for variant in variants:
        assert variant[1:] != same[1:]
        assert not set(variant[1:]) & set(same[1:])  # a difference stays in the chain
    assert hashes(ids, [span], [other])[0] == same[0]  # before the picture nothing differs


def test_hashes_see_every_span_of_every_item():
    ids, keys = [7] * 24, [b"a" * 32, b"b" * 32]
    spans = [
        EmbeddingSpan(1, 2, 0),
        EmbeddingSpan(5, 9, 0, row=2),
        EmbeddingSpan(17, 1, 1),
        EmbeddingSpan(19, 1, 1, row=1),
    ]
    same = hashes(ids, spans, keys)
    for at, span in enumerate(spans):
        moved = [*spans[:at], replace(span, row=span.row + 1), *spans[at + 1 :]]
        first = span.offset // SIZE
        assert hashes(ids, moved, keys)[:first] == same[:first]
        assert hashes(ids, moved, keys)[first] != same[first]
    late = list(block_hashes(same[2], ids, 3 * SIZE, SIZE, spans, keys))
    assert late == same[3:]


def test_hashes_distinguish_positions_that_do_not_count_up():
    ids = list(range(16))
    same = hashes(ids)

    def moved(begin, end):
        return b"" if end <= 5 else bytes(range(begin + 1, end + 1))

    other = list(block_hashes(root_hash(""), ids, 0, SIZE, position_bytes=moved))
    assert other[0] == same[0]
    assert not set(other[1:]) & set(same[1:])
    assert list(block_hashes(other[1], ids, 2 * SIZE, SIZE, position_bytes=moved)) == other[2:]


def test_hashes_can_be_continued_and_skip_the_block_that_is_not_full():
    ids = list(range(14))
    whole = hashes(ids)
    assert len(whole) == 3
    assert list(block_hashes(whole[0], ids, SIZE, SIZE)) == whole[1:]


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, fill and give back at random; no block is lost or given out twice."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.owners: list[tuple[list[bytes], list[int]]] = []

    @rule(stem=st.integers(0, 2), length=st.integers(1, 6), fill=st.booleans())
    def start(self, stem, length, fill):
        digests = hashes([stem] * SIZE * length)
        known = self.pool.match(digests)
        if self.pool.free < length - len(known):
            self.pool.release(known)
            return
        blocks = known + self.pool.allocate(length - len(known))
        if fill:
            for block, digest in zip(blocks, digests, strict=True):
                self.pool.cache_block(block, digest)
        self.owners.append((digests, blocks))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), distrust=st.booleans())
    def end(self, data, distrust):
        _, blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        if distrust:
            self.pool.evict(blocks)
        self.pool.release(blocks)

    @invariant()
    def every_block_is_either_free_or_owned(self):
        owned = {block for _, blocks in self.owners for block in blocks}
        assert NULL_BLOCK not in owned
        assert self.pool.free == self.pool.total - len(owned)

    @invariant()
    def only_the_same_content_is_shared(self):
        content: dict[int, bytes] = {}
        for digests, blocks in self.owners:
            for digest, block in zip(digests, blocks, strict=True):
                assert content.setdefault(block, digest) == digest

    def teardown(self):
        for _, blocks in self.owners:
            self.pool.release(blocks)
        assert self.pool.free == self.pool.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_survive_the_way_out_and_in():
    pages = PagedKVCache(
        6, SIZE, layers=2, kv_heads=1, head_dim=3, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert not pages.kv.any()
    pages.kv[:, :, 1:].normal_()
    out = torch.empty(pages.shape(3), dtype=torch.bfloat16)
    pages.save([5, 2, 3], out)
    assert torch.equal(out, pages.kv[:, :, [5, 2, 3]])
    pages.load(out, [1, 4, 6])
    assert torch.equal(pages.kv[:, :, [1, 4, 6]], out)
    pages.clear([4])
    assert not pages.kv[:, :, 4].any()
    assert torch.equal(pages.kv[:, :, 6], out[:, :, 2])
