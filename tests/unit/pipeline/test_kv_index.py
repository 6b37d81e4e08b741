"""Which worker holds which block: reported, expected, bounded."""

import random

from triptych.messages import CacheChange
from triptych.pipeline.kv.index import KvIndex


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_blocks_count_from_the_start_and_up_to_the_first_gap():
    index = KvIndex()
    index.update("a", CacheChange(1, (1, 2, 3), snapshot=True))
    index.update("b", CacheChange(1, (1, 3, 4), snapshot=True))
    index.update("c", CacheChange(1, (2, 3), snapshot=True))
    assert index.overlap((1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert index.overlap((9,)) == index.overlap(()) == {}
    assert index.reported_overlap("a", (1, 2, 9)) == 2
    assert index.reported_overlap("nobody", (1,)) == 0


def test_removed_blocks_are_gone_and_a_snapshot_replaces_all():
    index = KvIndex()
    index.update("a", CacheChange(1, (1, 2, 3), snapshot=True))
    index.update("a", CacheChange(2, (4,), (2,)))
    assert index.overlap((1, 2, 3)) == {"a": 1}
    assert index.reported == 3
    index.update("a", CacheChange(9, (7,), snapshot=True))
    assert (index.overlap((1,)), index.overlap((7,)), index.reported) == ({}, {"a": 1}, 1)


def test_a_worker_that_goes_is_forgotten():
    index = KvIndex()
    for worker in "ab":
        index.update(worker, CacheChange(1, (1, 2), snapshot=True))
    index.expect("a", (3,), 9.0)
    index.drop("a")
    index.drop("a")
    assert index.overlap((1, 2, 3)) == {"b": 2}
    assert (index.reported, index.expected) == (2, 0)


def test_the_oldest_block_of_the_worker_with_most_is_forgotten_first():
    """Proved by leaving out the bound in Book.add: it grows without end."""
    index = KvIndex(limit=6)
    index.update("a", CacheChange(1, (1, 2, 3, 4)))
    index.update("b", CacheChange(1, (1, 2)))
    index.update("a", CacheChange(2, (1,)))  # young again
    index.update("b", CacheChange(2, (5,)))
    assert index.reported == 6
    assert index.overlap((1,)) == {"a": 1, "b": 1}
    assert index.overlap((2,)) == {"b": 1}
    index.update("a", CacheChange(3, tuple(range(100, 200)), snapshot=True))
    assert index.reported == 6
    assert index.overlap((199,)) == {"a": 1}


def test_a_sent_request_counts_until_it_expires_or_is_withdrawn():
    """Proved by leaving out the time in ``_run``: what was sent stays for good."""
    clock = Clock()
    index = KvIndex(clock=clock)
    index.update("a", CacheChange(1, (1,), snapshot=True))
    index.expect("a", (1, 2, 3), 10.0)
    index.expect("b", (1, 2), 10.0)
    assert index.overlap((1, 2, 3)) == {"a": 3, "b": 2}
    assert index.reported_overlap("a", (1, 2, 3)) == 1
    index.update("a", CacheChange(2, (), (3,)))
    assert index.overlap((1, 2, 3)) == {"a": 2, "b": 2}
    clock.now += 9
    index.expect("b", (1,), 10.0)
    clock.now += 2
    assert index.overlap((1, 2, 3)) == {"a": 1, "b": 1}
    index.expect("c", (8,), 10.0)
    assert index.expected == 2  # of b and c: the rest was cleared
    clock.now += 11
    assert index.overlap((8,)) == {}


def test_expected_blocks_are_bounded_too():
    index = KvIndex(limit=10)
    for turn in range(50):
        index.expect(f"w{turn % 3}", range(turn, turn + 4), 60.0)
        assert index.expected <= 10


def test_sizes_stay_right_whatever_happens():
    """A count that drifted would forget all, or nothing."""
    draw = random.Random(3)
    index = KvIndex(limit=200)
    for number in range(2000):
        worker = draw.choice("abcd")
        some = tuple(draw.randrange(300) for _ in range(draw.randrange(20)))
        match draw.randrange(12):
            case 0:
                index.drop(worker)
            case 1:
                index.update(worker, CacheChange(number, some, snapshot=True))
            case 2 | 3:
                index.expect(worker, some, 0.001)
            case _:
                index.update(worker, CacheChange(number, some, some[:3]))
        for book in (index._reported, index._expected):
            assert book.size == sum(map(len, book.workers.values())) <= 200
