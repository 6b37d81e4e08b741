"""Ending tasks that wait inside other people's code."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_SECONDS = 0.1


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, however it ends.

    It is told more than once: wait_for of Python 3.11, in which nats-py waits, loses a cancel that
    comes together with what was waited for.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN_SECONDS)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody complains
