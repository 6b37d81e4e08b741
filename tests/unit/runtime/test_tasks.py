import asyncio
import contextlib
import gc
import logging
import weakref

import pytest

from triptych.errors import WorkerLost
from triptych.runtime.concurrency import QuietTaskGroup, cancel_and_wait, log_failure


async def test_a_task_that_loses_a_cancel_is_told_again():
    """Proved by telling it once: this never ends."""
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
        await asyncio.sleep(0)  # whoever waits for a task is called with it
        assert watched() is None
    finally:
        gc.enable()


async def test_a_group_raises_one_error_and_rather_ours():
    async def fails(error):
        raise error

    async def both():
        async with QuietTaskGroup() as group:
            group.create_task(fails(ValueError()))
            group.create_task(fails(WorkerLost("on purpose")))

    with pytest.raises(WorkerLost) as raised:
        await both()
    assert raised.value.__context__ is None
