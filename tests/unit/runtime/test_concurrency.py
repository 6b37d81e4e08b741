"""Cancelling, task groups without reference cycles, fair semaphores and thread pools."""

import asyncio
import contextlib
import gc
import logging
import threading
import weakref

import pytest

from triptych.errors import WorkerLost
from triptych.runtime.concurrency import (
    FairSemaphore,
    FairThreadPool,
    QuietTaskGroup,
    cancel_and_wait,
    log_failure,
)


async def steps():
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def asking(shares, who, *sizes):
    return [asyncio.create_task(shares.acquire(who, size)) for size in sizes]


def had(tasks):
    return [task.done() for task in tasks]


async def test_as_much_as_there_is():
    shares = FairSemaphore(10)
    tasks = asking(shares, "a", 6, 4, 1)
    await steps()
    assert had(tasks) == [True, True, False]
    assert (shares.in_use, shares.peak, shares.waiting) == (10, 10, 1)
    shares.release("a", 4)
    await tasks[2]
    assert (shares.in_use, shares.peak, shares.waiting) == (7, 10, 0)


async def test_a_tenant_that_uses_its_whole_share_delays_no_other():
    shares = FairSemaphore(4, 2)
    first = asking(shares, "a", 1, 1, 1)
    await steps()
    second = asking(shares, "b", 1, 1, 1)
    await steps()
    assert had(first) == had(second) == [True, True, False]
    third = asking(shares, "c", 1)
    await steps()
    assert had(third) == [False]  # there are none left
    shares.release("a")
    await steps()
    assert had(first + third) == [True, True, True, False]  # who waited longer
    shares.release("b")
    await steps()
    assert had(second + third) == [True, True, True, False]
    shares.release("b")
    await third[0]


async def test_waiting_tenants_take_turns():
    shares, order = FairSemaphore(1), []

    async def ask(who):
        async with shares.slot(who):
            order.append(who)

    await shares.acquire("first")
    waiting = [asyncio.create_task(ask(who)) for who in "aaabbc"]
    await steps()
    shares.release("first")
    await asyncio.gather(*waiting)
    assert order == list("abcaba")
    assert (shares.in_use, shares.waiting) == (0, 0)


async def test_a_small_one_does_not_overtake_a_large_one_for_ever():
    shares = FairSemaphore(10)
    await shares.acquire("a", 5)
    large = asking(shares, "b", 8)
    await steps()
    small = asking(shares, "c", 1)
    await steps()
    assert had(large + small) == [False, False]
    shares.release("a", 5)
    await steps()
    assert had(large + small) == [True, True]


async def test_a_waiter_that_leaves_the_queue_unblocks_the_next():
    shares = FairSemaphore(10)
    await shares.acquire("a", 5)
    large, small = asking(shares, "b", 8, 1)
    await steps()
    large.cancel()
    await steps()
    assert small.done()
    assert (shares.in_use, shares.waiting) == (6, 0)


@pytest.mark.parametrize("given_first", [False, True])
async def test_a_waiter_cancelled_at_its_turn_holds_nothing(given_first):
    shares = FairSemaphore(1)
    await shares.acquire("a")
    [waiting] = asking(shares, "b", 1)
    await steps()
    for act in [lambda: shares.release("a"), waiting.cancel][:: 1 if given_first else -1]:
        act()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (shares.in_use, shares.waiting) == (0, 0)
    async with asyncio.timeout(1):
        await shares.acquire("c")


async def test_a_task_that_swallows_a_cancel_is_cancelled_again():
    """Proved by cancelling it once: this never ends."""
    lost = []

    async def deaf():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(True)

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await cancel_and_wait(task)
    assert lost
    assert task.cancelled()


async def test_how_it_ended_does_not_matter():
    async def fails():
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    await cancel_and_wait(task)


async def test_a_task_that_ends_in_an_error_says_what_is_lost(caplog):
    """Proved by leaving the callback out. One that was cancelled, or was done, says nothing."""

    async def fails():
        raise ValueError("why")

    tasks = [asyncio.create_task(one) for one in (fails(), asyncio.sleep(0), asyncio.sleep(60))]
    for number, task in enumerate(tasks):
        log_failure(task, logging.getLogger("tests"), f"number {number} is lost")
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    [said] = caplog.records
    assert (said.getMessage(), said.levelname) == ("number 0 is lost", "CRITICAL")
    assert "why" in caplog.text


class Media(bytearray):
    """Bytes that can be watched."""


async def waits(media, fail):
    """Holds its own task, as who wants to be cancelled does."""
    task = asyncio.current_task()
    await fail.wait()
    assert not task.done()
    raise WorkerLost("on purpose")


async def two(group, media, fail, awaited):
    group.create_task(asyncio.sleep(60))
    last = group.create_task(waits(media, fail))
    await (last if awaited else asyncio.sleep(60))


async def edge(media, fail, awaited):
    """Whatever happens goes no further."""
    with contextlib.suppress(asyncio.CancelledError, WorkerLost):
        async with QuietTaskGroup() as group:
            await two(group, media, fail, awaited)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_group_holds_nothing_of_where_it_was(how, awaited):
    """Off: asyncio's own TaskGroup, in Python 3.11, or Together without one of its steps."""
    media, fail = Media(1), asyncio.Event()
    watched = weakref.ref(media)
    task = asyncio.create_task(edge(media, fail, awaited))
    del media
    await asyncio.sleep(0.01)
    gc.disable()
    try:
        if how == "cancelled":
            task.cancel()
        else:
            fail.set()
        await task
        del task
        await asyncio.sleep(0)  # callbacks of the task run
        assert watched() is None
    finally:
        gc.enable()


async def test_a_group_raises_one_error_and_prefers_triptychs_own():
    async def fails(error):
        raise error

    async def both():
        async with QuietTaskGroup() as group:
            group.create_task(fails(ValueError()))
            group.create_task(fails(WorkerLost("on purpose")))

    with pytest.raises(WorkerLost) as raised:
        await both()
    assert raised.value.__context__ is None


@pytest.fixture
def go():
    """What calls that hang wait for."""
    go = threading.Event()
    yield go
    go.set()


async def test_gives_what_the_call_gives_or_raises():
    threads = FairThreadPool("test", 2, 1)
    assert await threads.run("a", divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", divmod, 7, 0)
    threads.close()
    with pytest.raises(OSError, match="closed"):
        await threads.run("a", divmod, 7, 3)


async def test_calls_that_hang_take_up_a_share_until_they_end(go):
    threads = FairThreadPool("test", 3, 2)
    hanging = [asyncio.create_task(threads.run("a", go.wait, 10)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    more = asyncio.create_task(threads.run("a", int))
    assert await threads.run("b", str) == ""  # others are none the wiser
    assert not more.done()  # the callers have gone, the calls have not
    go.set()
    assert await more == 0
    threads.close()


async def test_a_call_cancelled_before_it_has_a_thread_uses_none(go):
    threads, ran = FairThreadPool("test", 1, 1), []
    hanging = asyncio.create_task(threads.run("a", go.wait, 10))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run("a", ran.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go.set()
    assert await hanging
    assert await threads.run("a", int) == 0
    assert ran == []
    threads.close()
