"""Looks after TensorRT-LLM's executor, which lives in processes of its own: does it, and how full.

Statistics come only of iterations: those of an idle engine are the last that it made.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

CHECK_INTERVAL = 1.0  # between two looks
STATS_TIMEOUT = 0.1  # seconds without a new one after which there is none


class ExecutorMonitor:
    """Sets ``died`` once. All of it happens on the event loop that first starts it."""

    def __init__(self, llm: Any, died: asyncio.Event) -> None:
        self._llm = llm
        self._died = died
        self._task: asyncio.Task[None] | None = None
        self.blocks: dict[str, int] = {}  # kvCacheStats of the last iteration

    @property
    def dead(self) -> bool:
        return self._died.is_set()

    @property
    def healthy(self) -> bool:
        """Whether the executor says so. What its own server asks."""
        try:
            return bool(self._llm._check_health())
        except Exception:  # whatever an executor raises that can't even be asked
            log.debug("TensorRT-LLM can't be asked", exc_info=True)
            return False

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())

    def die(self, why: str) -> None:
        if not self.dead:
            log.error("TensorRT-LLM died: %s", why)
            self._died.set()

    def close(self) -> None:
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _look(self) -> None:
        while not self.dead:
            await asyncio.sleep(CHECK_INTERVAL)
            if not self.healthy:
                self.die("its executor is no longer there")
                return
            await self._count()

    async def _count(self) -> None:
        try:
            async with asyncio.timeout(CHECK_INTERVAL):  # under load there is always one more
                async for told in self._llm.get_stats_async(timeout=STATS_TIMEOUT):
                    self.blocks = told.get("kvCacheStats") or self.blocks
        except TimeoutError:
            pass
        except Exception:  # of a beta interface, and no request depends on it
            log.debug("TensorRT-LLM told no statistics", exc_info=True)
