"""Threads for calls that may hang, apart from those that everybody else uses.

A call that nobody waits for any more goes on, and its thread is not there for others until it ends:
so no one may have more than a share of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from triptych.runtime.shares import Shares

T = TypeVar("T")


class Threads:
    """``most`` in all, ``each`` for one. They start when they are needed."""

    def __init__(self, name: str, most: int, each: int) -> None:
        self._pool = ThreadPoolExecutor(most, name)
        self._shares = Shares(most, each)

    async def run(self, who: Hashable, call: Callable[..., T], *args: Any) -> T:
        """What the call gives. Who waits for a thread and is cancelled needs none."""
        await self._shares.take(who)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(self._shares.give_back, who)

        try:
            running = self._pool.submit(call, *args)
        except RuntimeError:  # closed
            self._shares.give_back(who)
            raise OSError("no more calls are taken") from None
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Take no more calls. Those under way go on, but nobody is told how they end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
