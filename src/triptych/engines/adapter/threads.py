"""Work off the event loop, on what was only lent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from triptych.runtime.concurrency import wait_until_done

T = TypeVar("T")


async def in_thread(function: Callable[[], T], threads: Executor | None = None) -> T:
    """Its result. It can't be called off: what it reads stays until it has ended."""
    running = asyncio.get_running_loop().run_in_executor(threads, function)
    try:
        return await asyncio.shield(running)
    finally:
        await wait_until_done(running)
