"""Waiting for what cannot be called off."""

from __future__ import annotations

import asyncio
from typing import Any


async def wait_until_done(future: asyncio.Future[Any]) -> None:
    """Wait until it is done, even while being cancelled; what it brought is not looked at."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    if not future.cancelled():
        future.exception()
    if cancelled:
        raise asyncio.CancelledError
