"""Shares: so much for all, so much for each, and turns for those who wait."""

import asyncio

import pytest

from triptych.runtime.concurrency import FairSemaphore


async def steps():
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def asking(shares, who, *sizes):
    return [asyncio.create_task(shares.take(who, size)) for size in sizes]


def had(tasks):
    return [task.done() for task in tasks]


async def test_as_much_as_there_is():
    shares = FairSemaphore(10)
    tasks = asking(shares, "a", 6, 4, 1)
    await steps()
    assert had(tasks) == [True, True, False]
    assert (shares.taken, shares.peak, shares.waiting) == (10, 10, 1)
    shares.give_back("a", 4)
    await tasks[2]
    assert (shares.taken, shares.peak, shares.waiting) == (7, 10, 0)


async def test_one_who_has_a_whole_share_holds_up_nobody_else():
    shares = FairSemaphore(4, 2)
    first = asking(shares, "a", 1, 1, 1)
    await steps()
    second = asking(shares, "b", 1, 1, 1)
    await steps()
    assert had(first) == had(second) == [True, True, False]
    third = asking(shares, "c", 1)
    await steps()
    assert had(third) == [False]  # there are none left
    shares.give_back("a")
    await steps()
    assert had(first + third) == [True, True, True, False]  # who waited longer
    shares.give_back("b")
    await steps()
    assert had(second + third) == [True, True, True, False]
    shares.give_back("b")
    await third[0]


async def test_those_who_wait_take_turns():
    shares, order = FairSemaphore(1), []

    async def ask(who):
        async with shares.lent(who):
            order.append(who)

    await shares.take("first")
    waiting = [asyncio.create_task(ask(who)) for who in "aaabbc"]
    await steps()
    shares.give_back("first")
    await asyncio.gather(*waiting)
    assert order == list("abcaba")
    assert (shares.taken, shares.waiting) == (0, 0)


async def test_a_small_one_does_not_overtake_a_large_one_for_ever():
    shares = FairSemaphore(10)
    await shares.take("a", 5)
    large = asking(shares, "b", 8)
    await steps()
    small = asking(shares, "c", 1)
    await steps()
    assert had(large + small) == [False, False]
    shares.give_back("a", 5)
    await steps()
    assert had(large + small) == [True, True]


async def test_who_leaves_the_line_makes_way():
    shares = FairSemaphore(10)
    await shares.take("a", 5)
    large, small = asking(shares, "b", 8, 1)
    await steps()
    large.cancel()
    await steps()
    assert small.done()
    assert (shares.taken, shares.waiting) == (6, 0)


@pytest.mark.parametrize("given_first", [False, True])
async def test_who_leaves_at_the_moment_of_its_turn_has_nothing(given_first):
    shares = FairSemaphore(1)
    await shares.take("a")
    [waiting] = asking(shares, "b", 1)
    await steps()
    for act in [lambda: shares.give_back("a"), waiting.cancel][:: 1 if given_first else -1]:
        act()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (shares.taken, shares.waiting) == (0, 0)
    async with asyncio.timeout(1):
        await shares.take("c")
