"""Threads of their own: calls that hang cost their asker's share, and nobody else's."""

import asyncio
import threading

import pytest

from triptych.runtime.concurrency import FairThreadPool


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
    with pytest.raises(OSError, match="no more"):
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
    assert not more.done()  # whoever asked has gone, the calls have not
    go.set()
    assert await more == 0
    threads.close()


async def test_who_leaves_before_there_is_a_thread_needs_none(go):
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
