"""What a worker costs: what it must compute of a prompt, and what it has to do already."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest

from triptych.config import KvSettings
from triptych.messages import CacheChange, MediaItem, MediaMeta
from triptych.pipeline.kv.index import KvIndex
from triptych.pipeline.kv.prompt_blocks import PromptBlocks
from triptych.pipeline.kv.routing import EXPECT_WITHOUT_EVENTS_SECONDS, KvRouting


@dataclass
class Peer:
    name: str
    queued_blocks: float = 0.0
    block_size: int = 4
    can_prefill_from_cache: bool = False


META = MediaMeta(b"k", 4)
NAMES = tuple(range(1, 11))
PROMPT = {4: PromptBlocks(4, NAMES, 42)}  # ten full blocks and a part of one


def routing(held=None, **settings):
    kv = KvRouting(KvSettings(**settings))
    for worker, count in (held or {}).items():
        kv.index.receive(worker, 1, CacheChange(1, NAMES[:count], snapshot=True))
    return kv


def chosen(kv, peers, chains=PROMPT, times=1, item=None):
    return [kv.choose(peers, chains, item)[0].name for _ in range(times)]


def test_the_worker_that_holds_most_is_chosen_and_computes_the_rest():
    kv = routing({"a": 3, "b": 8})
    peer, left = kv.choose([Peer("a"), Peer("b"), Peer("c")], PROMPT)
    assert (peer.name, left) == ("b", 3)
    assert kv.counters["matched_blocks"] == 8
    assert (kv.counters["lookups"], kv.counters["blocks"]) == (1, 11)


def test_what_is_left_is_weighed_against_what_there_is_to_do():
    """Proved by leaving the load out of the cost: b is asked whatever it has to do."""
    kv = routing({"b": 8})
    assert chosen(kv, [Peer("a"), Peer("b", queued_blocks=7)]) == ["b"]
    assert chosen(kv, [Peer("a"), Peer("b", queued_blocks=9)]) == ["a"]
    heavy = routing({"b": 8}, overlap_weight=2.0)
    assert chosen(heavy, [Peer("a"), Peer("b", queued_blocks=15)]) == ["b"]
    none = routing({"b": 8}, overlap_weight=0.0)
    assert chosen(none, [Peer("a"), Peer("b", queued_blocks=1)]) == ["a"]


def test_equals_take_turns():
    peers = [Peer("a"), Peer("b"), Peer("c")]
    assert Counter(chosen(routing(), peers, times=9)) == {"a": 3, "b": 3, "c": 3}
    kv = routing({"a": 5, "c": 5})
    assert Counter(chosen(kv, peers, times=30)).keys() == {"a", "c"}


def test_among_equals_a_media_item_stays_with_its_worker():
    """The layout of a new picture is unknown, but requests with it go to one worker."""
    peers = [Peer("a"), Peer("b"), Peer("c")]
    by_picture = [
        set(chosen(routing(), peers, times=6, item=MediaItem("image", 0, b"%d" % n)))
        for n in range(12)
    ]
    assert all(len(names) == 1 for names in by_picture)
    assert len(set.union(*by_picture)) == 3


def test_a_temperature_lets_others_have_some_the_dearer_the_fewer():
    """Proved by a temperature of 0: only the best is asked."""
    kv = routing({"a": 8, "b": 6}, temperature=2.0)
    count = Counter(chosen(kv, [Peer("a"), Peer("b"), Peer("c")], times=4000))
    assert count["a"] > count["b"] > count["c"] > 0
    assert 2.0 < count["a"] / count["b"] < 3.7  # e times
    cold = Counter(chosen(routing({"a": 8, "b": 6}), [Peer("a"), Peer("b")], times=100))
    assert cold == {"a": 100}


def test_the_last_token_is_computed_even_of_a_prompt_that_is_held_whole():
    kv = routing({"a": 10})
    assert kv.choose([Peer("a")], {4: PromptBlocks(4, NAMES, 40)})[1] == 1


def test_workers_that_report_no_cache_are_chosen_by_load():
    kv = routing()
    silent = [Peer("a", 2, block_size=0), Peer("b", 1, block_size=0)]
    assert chosen(kv, silent, {}) == ["b"]
    mixed = [Peer("a", 0, block_size=0), Peer("b", 1)]
    assert chosen(kv, mixed) == ["a"]
    assert kv.block_size(silent[0]) == 0
    assert KvRouting(KvSettings(events=False)).block_size(silent[0]) == 16


def test_sent_requests_count_at_once_and_are_counted_apart():
    """So that requests of one conversation that come together stay together."""
    kv = routing({"b": 2})
    peers = [Peer("a"), Peer("b"), Peer("c")]
    kv.expect(peers[2], PROMPT)
    assert chosen(kv, peers) == ["c"]
    assert (kv.counters["matched_blocks"], kv.counters["predicted_blocks"]) == (10, 10)


def test_without_events_it_is_expected_for_a_while():
    """Proved by the time that events need: after a minute all is forgotten."""
    now = [0.0]
    kv = KvRouting(KvSettings(events=False), index=KvIndex(clock=lambda: now[0]))
    peers = [Peer("a", 1), Peer("b", 0)]
    kv.expect(peers[0], PROMPT)
    now[0] = EXPECT_WITHOUT_EVENTS_SECONDS - 1
    assert chosen(kv, peers) == ["a"]
    now[0] = EXPECT_WITHOUT_EVENTS_SECONDS + 1
    assert chosen(kv, peers) == ["b"]


def test_after_a_missing_change_nothing_counts_until_the_snapshot():
    """F21. Proved by leaving out the number's check: what was removed still counts as held."""
    kv = routing({"a": 4})
    assert kv.index.receive("a", 1, CacheChange(2, NAMES[4:6]))
    assert not kv.index.receive("a", 1, CacheChange(4, NAMES[6:8]))  # 3 was lost
    assert not kv.index.receive("a", 1, CacheChange(3, (), NAMES))  # or came late
    assert not kv.index.receive("a", 1, CacheChange(5, NAMES[8:]))
    assert kv.index.overlap(NAMES) == {"a": 6}
    assert kv.index.receive("a", 1, CacheChange(5, NAMES[:1], snapshot=True))
    assert kv.index.receive("a", 1, CacheChange(6, NAMES[1:2]))
    assert kv.index.overlap(NAMES) == {"a": 2}
    assert kv.counters["changes_missed"] == 3


@pytest.mark.parametrize("number", [1, 2])
def test_a_change_that_comes_late_or_twice_is_left_out(number):
    """Proved without the look at the number: block 3 counts, which was gone by then, perhaps."""
    kv = routing({"a": 1})
    assert kv.index.receive("a", 1, CacheChange(2, (2,)))
    for whole in (False, True):
        assert kv.index.receive("a", 1, CacheChange(number, (3,), snapshot=whole))
    assert kv.index.reported == 2
    assert kv.counters["changes_missed"] == 0


def test_a_beat_shows_that_the_last_change_is_missing():
    """Proved without the look at what it says: it counts as the missing one."""
    kv = routing({"a": 1})
    assert kv.index.receive("a", 1, CacheChange(1))
    assert not kv.index.receive("a", 1, CacheChange(2))


def test_an_earlier_incarnation_is_ignored_and_a_new_one_starts_empty():
    """Proved by leaving out the epoch: the dead one's blocks count for the living."""
    kv = routing({"a": 4})
    assert not kv.index.receive("a", 2, CacheChange(2, (1,)))
    assert kv.index.overlap(NAMES) == {}
    assert kv.index.receive("a", 2, CacheChange(7, (1,), snapshot=True))
    assert kv.index.receive("a", 1, CacheChange(2, NAMES, snapshot=True))  # left out
    assert kv.index.overlap(NAMES) == {"a": 1}
    kv.index.drop("a")
    assert kv.index.reported == 0
    assert not kv.index.receive("a", 2, CacheChange(8, (2,)))


def test_what_a_worker_that_decodes_would_have_to_prefill():
    """But for the last block. Proved by leaving out each of the conditions on media."""
    kv = routing({"a": 10, "b": 6})
    assert [kv.tokens_to_prefill(Peer(name), PROMPT) for name in "abc"] == [0, 16, 40]
    assert (
        kv.tokens_to_prefill(Peer("a"), {4: PromptBlocks(4, NAMES[:5], 42, complete=False)}) is None
    )
    assert kv.tokens_to_prefill(Peer("a", block_size=0), PROMPT) is None
    for end, metas, recalls, left in (
        (24, (META,), True, 16),
        (25, (META,), True, None),  # a media item stands beyond what b holds
        (24, None, True, None),  # its layout is unknown
        (24, (META,), False, None),
    ):
        media = {4: PromptBlocks(4, NAMES, 42, media_end=end, metas=metas)}
        assert kv.tokens_to_prefill(Peer("b", can_prefill_from_cache=recalls), media) == left


def test_a_decode_worker_with_the_prompt_cached_is_weighed_against_less_busy_ones():
    """Proved by looking at the able workers alone: a is best whatever it has queued."""
    kv = routing({"a": 10})

    def best_is_a(queued, prefill_wait=0.0, kv=kv):
        return kv.best_can_prefill([Peer("b"), Peer("a", queued)], PROMPT, prefill_wait)

    assert [best_is_a(10), best_is_a(11)] == [True, False]  # b lacks ten blocks more
    assert [best_is_a(15, 5), best_is_a(16, 5)] == [True, False]  # the prefill worker is busy too
    assert best_is_a(1000, math.inf)  # no worker could prefill for b
    assert not best_is_a(1, kv=routing({"a": 10}, overlap_weight=0.0))
    warm = routing({"a": 10}, temperature=10.0)
    assert {best_is_a(10, kv=warm) for _ in range(100)} == {True, False}
    assert {best_is_a(10, math.inf, warm) for _ in range(100)} == {True}
    assert not kv.best_can_prefill([Peer("b"), Peer("c")], PROMPT, math.inf)
