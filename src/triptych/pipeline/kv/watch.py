"""One worker's prefix cache, heard for as long as it can be reached: in a call, or as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from triptych.errors import Draining, TriptychError, WorkerLost
from triptych.messages import CacheChange, WatchCache, WorkerAnswer, WorkerRequest
from triptych.pipeline.kv.routing import KvRouting
from triptych.runtime.connection import Call
from triptych.runtime.events import EventSubscriber

log = logging.getLogger(__name__)
AGAIN_SECONDS = 0.25  # before the whole is asked for once more


class WatchedWorker(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def events(self) -> str:
        """Where it tells; empty: in calls alone."""

    def call(self, ask: WorkerRequest, on_answer: Callable[[WorkerAnswer], None]) -> Call: ...


async def watch_cache(
    peer: WatchedWorker, kv: KvRouting, listener: EventSubscriber | None = None
) -> None:
    """Tell ``kv`` what the worker says. Where a change is missing the call is closed, and another
    one begins with the whole. Ends when the worker is lost or stops."""
    told = False
    heard = _call if listener is None or not peer.events else partial(_follow, listener)
    while True:
        try:
            await heard(peer, kv)
        except (WorkerLost, Draining):
            return
        except TriptychError as error:  # its requests may do all the same
            if not told:
                log.warning("worker %s does not tell what it has cached: %s", peer.name, error)
            told = True
        await asyncio.sleep(AGAIN_SECONDS)


async def _call(peer: WatchedWorker, kv: KvRouting, once: bool = False) -> None:
    """Hear it in a call, until a change is missing; ``once``: until the first answer, the whole."""

    def hear(answer: WorkerAnswer) -> None:
        if isinstance(answer, CacheChange) and (
            not kv.heard(peer.name, peer.epoch, answer) or once
        ):
            call.close()

    call = peer.call(WatchCache(), hear)
    try:
        await call.done()
    finally:
        call.close()


async def _follow(listener: EventSubscriber, peer: WatchedWorker, kv: KvRouting) -> None:
    """Hear its events. Where one is missing the whole is asked for, in a call that ends with it."""
    missing = asyncio.Event()

    def hear(change: CacheChange) -> None:
        if not kv.heard(peer.name, peer.epoch, change):
            missing.set()

    leave = listener.follow(peer.name, peer.epoch, peer.events, hear)
    try:
        while True:
            await _call(peer, kv, once=True)
            await asyncio.sleep(AGAIN_SECONDS)
            await missing.wait()
            missing.clear()
    finally:
        leave()
