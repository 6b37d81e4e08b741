"""One worker's prefix cache, heard over the request plane for as long as it can be reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from triptych.errors import Draining, TriptychError, WorkerLost
from triptych.messages import Answer, Ask, CacheChange, WatchCache
from triptych.pipeline.kv_routing import KvRouting
from triptych.runtime.requests import Call

log = logging.getLogger(__name__)
AGAIN_SECONDS = 0.25  # before the whole is asked for once more


class Watched(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def call(self, ask: Ask, on_answer: Callable[[Answer], None]) -> Call: ...


async def watch(peer: Watched, kv: KvRouting) -> None:
    """Tell ``kv`` what the worker says. Where a change is missing the call is closed, and another
    one begins with the whole. Ends when the worker is lost or stops."""
    told = False
    while True:
        try:
            await _once(peer, kv)
        except (WorkerLost, Draining):
            return
        except TriptychError as error:  # its requests may do all the same
            if not told:
                log.warning("worker %s does not tell what it has cached: %s", peer.name, error)
            told = True
        await asyncio.sleep(AGAIN_SECONDS)


async def _once(peer: Watched, kv: KvRouting) -> None:
    def hear(answer: Answer) -> None:
        if isinstance(answer, CacheChange) and not kv.heard(peer.name, peer.epoch, answer):
            call.close()

    call = peer.call(WatchCache(), hear)
    try:
        await call.done()
    finally:
        call.close()
