"""Monitors TensorRT-LLM's executor, which runs in other processes: its health and its KV cache.

The engine reports statistics per iteration, so an idle engine keeps those of its last one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

CHECK_INTERVAL = 1.0  # seconds
STATS_TIMEOUT = 0.1  # seconds to wait for the next iteration's statistics


class ExecutorMonitor:
    """Sets ``died`` when the executor is gone. Runs on the event loop of the first ``start``."""

    def __init__(self, llm: Any, died: asyncio.Event) -> None:
        self._llm = llm
        self._died = died
        self._task: asyncio.Task[None] | None = None
        self.kv_stats: dict[str, int] = {}  # kvCacheStats of the last iteration

    @property
    def dead(self) -> bool:
        return self._died.is_set()

    @property
    def healthy(self) -> bool:
        """The result of the health check that TensorRT-LLM's own server uses."""
        try:
            return bool(self._llm._check_health())
        except Exception:  # a dead executor can raise anything
            log.debug("TensorRT-LLM's health check failed", exc_info=True)
            return False

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def die(self, why: str) -> None:
        if not self.dead:
            log.error("TensorRT-LLM died: %s", why)
            self._died.set()

    def close(self) -> None:
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> None:
        while not self.dead:
            await asyncio.sleep(CHECK_INTERVAL)
            if not self.healthy:
                self.die("its executor has ended")
                return
            await self._read_stats()

    async def _read_stats(self) -> None:
        try:
            async with asyncio.timeout(CHECK_INTERVAL):  # under load the stream does not end
                async for stats in self._llm.get_stats_async(timeout=STATS_TIMEOUT):
                    self.kv_stats = stats.get("kvCacheStats") or self.kv_stats
        except TimeoutError:
            pass
        except Exception:  # a beta interface, and no request depends on it
            log.debug("TensorRT-LLM gave no statistics", exc_info=True)
