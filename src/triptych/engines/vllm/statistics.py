"""What vLLM tells of itself after every step, as a report."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from triptych.engines.base import EngineReport


class VllmStatistics(StatLoggerBase):  # type: ignore[misc]
    """vLLM calls ``record`` on the event loop, with what its scheduler counted in a step."""

    def __init__(self) -> None:
        self.steps = 0
        self.preempted = 0
        self.generated = 0
        self.prompts = 0  # tokens of prompts, computed here or not
        self.prefix_hits = 0
        self.prefix_asked = 0
        self.transferred = 0  # tokens of prompts whose KV cache another engine had
        self._usage = 0.0
        self._running = 0
        self._waiting = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self._usage = scheduler_stats.kv_cache_usage
            self._running = scheduler_stats.num_running_reqs
            self._waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
            self.prefix_asked += scheduler_stats.prefix_cache_stats.queries
            if (theirs := scheduler_stats.connector_prefix_cache_stats) is not None:
                self.transferred += theirs.hits
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs
            self.generated += iteration_stats.num_generation_tokens
            self.prompts += iteration_stats.num_prompt_tokens

    def log_engine_initialized(self) -> None:
        """It is said elsewhere."""

    def report(self, unfinished: int, blocks: int) -> EngineReport:
        """``unfinished``: requests that are in vLLM now; ``blocks``: of its KV cache.

        Of a request that came since the last step, it is not known yet what it does: it waits.
        """
        running = min(self._running, unfinished)
        return EngineReport(
            queued=unfinished - running,
            running=running,
            kv_blocks_total=blocks,
            kv_blocks_free=round(blocks * (1.0 - self._usage)),
            counters={
                "steps": float(self.steps),
                "preemptions": float(self.preempted),
                "generated_tokens": float(self.generated),
                "prompt_tokens": float(self.prompts),
                "prefix_cache_hits": float(self.prefix_hits),
                "prefix_cache_queries": float(self.prefix_asked),
                "transferred_tokens": float(self.transferred),
            },
        )
