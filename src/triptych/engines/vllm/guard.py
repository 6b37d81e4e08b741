"""Puts a guard over vLLM's scheduler, so that no request can take the engine along.

The scheduler itself runs in the engine's process (``scheduler``); here is what the worker must
know of it. Its door is the one message that reaches it from outside: the ids of an abort.
"""

from __future__ import annotations

from typing import Any

from triptych.errors import InvalidConfig

STALE_PREFIX = "stale:"  # before an id: also forget what was computed of that request's inputs


def install_scheduler(vllm_config: Any) -> None:
    """Have the engine of this (complete) configuration use the guard."""
    scheduling = vllm_config.scheduler_config
    if scheduling.scheduler_cls is not None:
        raise InvalidConfig(
            "--scheduler-cls can't be given: Triptych brings a scheduler of its own"
        )
    name = "GuardedAsyncScheduler" if scheduling.async_scheduling else "GuardedScheduler"
    scheduling.scheduler_cls = f"triptych.engines.vllm.scheduler.{name}"


async def release_blocks(llm: Any, request_id: str) -> None:
    """Have prefill's blocks freed that nobody will read any more; after a reader had them, nothing
    happens. ``request_id`` is vLLM's own, as its note has it."""
    await llm.engine_core.abort_requests_async([request_id])


async def abort_stale(llm: Any, request_id: str) -> None:
    """End a request whose inputs turned out to be stale, and take what came of them out of the
    caches. ``request_id`` is vLLM's own."""
    await llm.engine_core.abort_requests_async([STALE_PREFIX + request_id])
