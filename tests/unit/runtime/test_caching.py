"""The LRU cache, and single flight: many ask at once, one computes."""

import asyncio

import pytest

from triptych.errors import InvalidMedia
from triptych.runtime.caching import LRUCache, SingleFlight


class Work:
    """Counts how often it is started and cancelled; ends when released."""

    def __init__(self):
        self.started = self.cancelled = 0
        self.go = asyncio.Event()
        self.error = None

    async def __call__(self):
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return object()


async def spin():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_fifty_callers_at_once_share_one_result():
    flights, work = SingleFlight(), Work()
    asked = [asyncio.ensure_future(flights.join("a", work)) for _ in range(50)]
    await spin()
    work.go.set()
    got = await asyncio.gather(*asked)
    assert work.started == 1
    assert len(set(map(id, got))) == 1
    assert flights.joined == 49
    assert len(flights) == 0


async def test_other_keys_run_separately_and_a_later_caller_starts_again():
    flights, work = SingleFlight(), Work()
    work.go.set()
    one, two = await asyncio.gather(flights.join("a", work), flights.join("b", work))
    three = await flights.join("a", work)
    assert work.started == 3
    assert len({id(one), id(two), id(three)}) == 3


async def test_a_failure_is_everyones_each_with_an_error_of_their_own():
    flights, work = SingleFlight(), Work()
    work.error = InvalidMedia("It is bad.")
    asked = [asyncio.ensure_future(flights.join("a", work)) for _ in range(3)]
    await spin()
    work.go.set()
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [InvalidMedia] * 3
    assert len(set(map(id, errors))) == 3, "whoever names its part must not rename the others'"
    assert len(flights) == 0


async def test_one_waiter_that_leaves_ends_no_other_wait():
    flights, work = SingleFlight(), Work()
    first, second = (asyncio.ensure_future(flights.join("a", work)) for _ in range(2))
    await spin()
    first.cancel()
    await spin()
    assert first.cancelled()
    assert work.cancelled == 0
    work.go.set()
    assert await second is not None
    assert work.started == 1


async def test_when_all_callers_left_the_work_ends_and_the_next_caller_starts_again():
    flights, work = SingleFlight(), Work()
    asked = [asyncio.ensure_future(flights.join("a", work)) for _ in range(3)]
    await spin()
    for one in asked:
        one.cancel()
    await asyncio.sleep(0)
    late = asyncio.ensure_future(flights.join("a", work))  # while the first is being cancelled
    await spin()
    assert (work.started, work.cancelled) == (2, 1)
    work.go.set()
    assert await late is not None
    with pytest.raises(asyncio.CancelledError):
        await asked[0]
    assert len(flights) == 0


async def test_close_ends_running_work_for_all_waiters():
    flights, work = SingleFlight(), Work()
    asked = [asyncio.ensure_future(flights.join("a", work)) for _ in range(2)]
    await spin()
    await flights.close()
    assert (work.started, work.cancelled) == (1, 1)
    await asyncio.wait(asked)
    assert all(one.cancelled() for one in asked)
    assert len(flights) == 0


def test_the_least_recently_used_is_evicted_first_and_released():
    kept = LRUCache(100)
    for key in "abcd":
        assert kept.put(key, key.upper(), 25) == []
    assert kept.get("a") == "A"
    assert kept.put("e", "E", 45) == ["B", "C"]
    assert [key for key in "abcde" if kept.get(key)] == ["a", "d", "e"]
    assert (kept.bytes, kept.evictions, sorted(kept.values)) == (95, 2, ["A", "D", "E"])


def test_an_item_that_is_too_large_is_not_cached_and_evicts_nothing():
    kept = LRUCache(100, largest=25)
    kept.put("a", "A", 25)
    assert kept.put("b", "B", 26) == []
    assert (kept.get("a"), kept.get("b")) == ("A", None)
    for nothing in (LRUCache(0), LRUCache(0, largest=100), LRUCache(100, largest=0)):
        nothing.put("a", "A", 1)
        assert len(nothing) == nothing.bytes == nothing.evictions == 0


def test_what_is_there_stays_until_it_is_dropped():
    kept = LRUCache(100)
    kept.put("a", "old", 10)
    assert kept.put("a", "new", 20) == []
    assert (kept.get("a"), kept.bytes) == ("old", 10)
    kept.remove("a")
    kept.remove("a")
    kept.put("a", "new", 20)
    assert (kept.get("a"), kept.bytes, kept.evictions) == ("new", 20, 0)
    kept.clear()
    assert (kept.get("a"), kept.bytes) == (None, 0)


def test_there_are_never_more_than_may_be():
    kept = LRUCache(100, most=2)
    gone = [kept.put(number, number, 1) for number in range(4)]
    assert gone == [[], [], [0], [1]]
    assert len(kept) == kept.bytes == 2
