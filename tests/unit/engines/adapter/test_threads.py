"""Whoever lends memory to a thread gets it back when the thread has done with it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from triptych.engines.adapter.threads import in_thread


async def test_the_result_comes_back():
    assert await in_thread(lambda: threading.current_thread()) is not threading.main_thread()


async def test_an_error_comes_back():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)


async def test_who_is_cancelled_waits_for_the_end():
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    task = asyncio.create_task(in_thread(read))
    await asyncio.to_thread(begun.wait)
    try:
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
