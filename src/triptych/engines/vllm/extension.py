"""Triptych's additions to vLLM's processes, as the worker refers to them. Does not import vLLM.

vLLM loads them by name: ``WorkerExtension`` into each of its workers, the scheduler (``scheduler``)
into its engine process, and the connectors (``connector``) into both.
"""

from __future__ import annotations

from typing import Any

from triptych.errors import InvalidConfig

STALE_PREFIX = "stale:"  # of an aborted id: also evict what was computed from its inputs
LOADED_PARTS = "loaded_parts"  # methods of WorkerExtension
KV_GROUPS = "kv_groups"
FILE_TENSOR = "rows"  # the tensor in an embedding's file


class WorkerExtension:
    """Methods that vLLM mixes into its worker, in the worker's own process."""

    model_runner: Any  # of vLLM's worker

    def loaded_parts(self) -> tuple[bool, bool]:
        """Whether the worker has loaded the towers, and the language model.

        vLLM replaces parts that it leaves out by a stand-in that is not a module of the model.
        """
        model = self.model_runner.get_model()
        language = tuple(f"{name}." for name in getattr(model, "_language_model_names", ()))
        found = {name.startswith(language or "") for name, _ in model.named_parameters()}
        return False in found, True in found

    def kv_groups(self) -> int:
        """Groups of layers whose blocks the connector transfers."""
        return len(self.model_runner.kv_cache_config.transfer_groups)


def install_scheduler(vllm_config: Any) -> None:
    """Make the engine of this (complete) configuration use Triptych's scheduler."""
    scheduling = vllm_config.scheduler_config
    if scheduling.scheduler_cls is not None:
        raise InvalidConfig("--engine-args --scheduler-cls: Triptych sets its own scheduler")
    name = "GuardedAsyncScheduler" if scheduling.async_scheduling else "GuardedScheduler"
    scheduling.scheduler_cls = f"triptych.engines.vllm.scheduler.{name}"


# An abort is the only message that reaches the scheduler from outside. Both functions take vLLM's
# own id of a request.


async def release_blocks(llm: Any, request_id: str) -> None:
    """Free the prefilled blocks of a request that no peer will read; does nothing after a read."""
    await llm.engine_core.abort_requests_async([request_id])


async def abort_stale(llm: Any, request_id: str) -> None:
    """Abort a request with stale inputs, and evict what vLLM computed from them."""
    await llm.engine_core.abort_requests_async([STALE_PREFIX + request_id])


def embedding_file_name(identifier: str) -> str:
    """The file of an embedding, by vLLM's identifier of the item."""
    return f"{identifier}.safetensors"
