"""vLLM behind the Engine protocol: requests in, deltas out.

vLLM's client runs on the worker's event loop; its scheduler and model run in other processes.
Prefill hands over a note that says where its KV cache is, and vLLM's connector on the decode side
fetches it. Decode generates the first token again, so that all tokens come from there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from triptych.checkpoint import Model
from triptych.engines.adapter.base import (
    FINISH_REASONS,
    LONG_PROMPT,
    RequestStream,
    SamplingRequest,
    cancelled_in_emit,
    emit_inputs_copied,
    engine_boundary,
    in_thread,
    lay_out,
    read_note,
    write_note,
)
from triptych.engines.adapter.kv_events import KvListener
from triptych.engines.adapter.processes import EngineProcesses
from triptych.engines.base import (
    Allocate,
    Emit,
    EngineReport,
    Generation,
    PrefillOutput,
    PrefixCacheInfo,
)
from triptych.engines.checks import max_new_tokens
from triptych.engines.vllm import extension, requests
from triptych.engines.vllm.inputs import VllmInputs
from triptych.errors import (
    EngineFailed,
    InvalidSchema,
    InvalidValue,
    Overloaded,
    TicketLost,
    TriptychError,
    WorkerLost,
)
from triptych.messages import (
    Delta,
    ParameterCounts,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from triptych.models.layouts import Layout
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import LOOP_COPY_BYTES

Handle = Callable[[Any], None]  # of one RequestOutput
VLLM_COUNTERS = (
    "steps",
    "preemptions",
    "generated_tokens",
    "prompt_tokens",  # computed here or not
    "prefix_cache_hits",
    "prefix_cache_queries",
    "transferred_tokens",  # of prompts whose KV cache came from another engine
)


class VllmStatistics(StatLoggerBase):  # type: ignore[misc]
    """vLLM calls ``record`` on the event loop with the statistics of each step."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(VLLM_COUNTERS, 0)
        self._usage = 0.0
        self._running = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        counts = self._counts
        counts["steps"] += 1
        if scheduler_stats is not None:
            self._usage = scheduler_stats.kv_cache_usage
            self._running = scheduler_stats.num_running_reqs
            counts["prefix_cache_hits"] += scheduler_stats.prefix_cache_stats.hits
            counts["prefix_cache_queries"] += scheduler_stats.prefix_cache_stats.queries
            if (connector := scheduler_stats.connector_prefix_cache_stats) is not None:
                counts["transferred_tokens"] += connector.hits
        if iteration_stats is not None:
            counts["preemptions"] += iteration_stats.num_preempted_reqs
            counts["generated_tokens"] += iteration_stats.num_generation_tokens
            counts["prompt_tokens"] += iteration_stats.num_prompt_tokens

    def log_engine_initialized(self) -> None:
        """``load`` reports progress."""

    def report(self, unfinished: int, blocks: int) -> EngineReport:
        """``unfinished``: requests that are in vLLM now; ``blocks``: of its KV cache.

        A request that came after the last step counts as queued.
        """
        running = min(self._running, unfinished)
        return EngineReport(
            queued=unfinished - running,
            running=running,
            kv_blocks_total=blocks,
            kv_blocks_free=round(blocks * (1.0 - self._usage)),
            counters=dict(self._counts),
        )


class VllmEngine:
    """The Engine protocol over a loaded AsyncLLM. ``sizes``: of the checkpoint's parts."""

    def __init__(
        self,
        llm: AsyncLLM,
        inputs: VllmInputs,
        model: Model,
        statistics: VllmStatistics,
        allocate: Allocate,
        sizes: ParameterCounts,
        listener: KvListener | None = None,
    ) -> None:
        self.died = asyncio.Event()
        self._llm = llm
        self._inputs = inputs
        self._model = model
        self._statistics = statistics
        self._allocate = allocate
        self._sizes = sizes
        self._listener = listener
        self._context: int = llm.model_config.max_model_len
        self._block_size: int = llm.vllm_config.cache_config.block_size
        self._parameters: ParameterCounts | None = None
        self._groups: int | None = None
        self._watched = False
        self._closed = False
        manager = llm.engine_core.resources.engine_manager
        self._processes = EngineProcesses(process.pid for process in manager.processes)

    async def generate(self, generation: Generation, emit: Emit) -> None:
        layout = await lay_out(generation, self._inputs.family, self._model.vocabulary)
        self._inputs.check(generation, layout)
        limit = max_new_tokens(generation.work, len(layout.ids), self._context)
        constrained = generation.work.sampling.grammar is not None
        translate = functools.partial(self._translate, constrained=constrained)
        with engine_boundary(generation.work.id, translate):
            if self._parameters is None:
                self._parameters = await self._loaded_parameters()
            if generation.phases == "P" and limit > 1:
                await self._prefill(generation, layout, emit)
            else:
                await self._stream(generation, layout, limit, emit)

    @property
    def cache(self) -> PrefixCacheInfo | None:
        """None if vLLM publishes no KV events."""
        if self._listener is None:
            return None
        return PrefixCacheInfo(self._block_size, self._blocks, self._listener.listen)

    def report(self) -> EngineReport:
        unfinished = self._llm.get_num_unfinished_requests()
        report = self._statistics.report(unfinished, self._blocks)
        events = {} if self._listener is None else self._listener.counters
        return replace(
            report,
            parameters=self._parameters or ParameterCounts(),
            counters=report.counters | events,
        )

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        # vLLM's processes take seconds to shut down in order, and have nothing to save.
        self._processes.kill()
        self._llm.shutdown()

    @property
    def _blocks(self) -> int:
        """Without the null block."""
        return (self._llm.vllm_config.cache_config.num_gpu_blocks or 1) - 1

    def _translate(self, error: Exception, *, constrained: bool = False) -> TriptychError:
        """``constrained``: of a request with a grammar, which vLLM checks with its parameters."""
        match error:
            case EngineDeadError():
                self._die()
                return WorkerLost("vLLM's engine has died. Try again.")
            case VLLMClientError():
                return InvalidSchema(str(error)) if constrained else InvalidValue(str(error))
            case GracefulHTTPError():  # limits that the operator sets in vLLM
                return Overloaded(str(error))
        return EngineFailed(f"vLLM failed: {type(error).__name__}")

    async def _prefill(self, generation: Generation, layout: Layout, emit: Emit) -> None:
        """Prefill, hand over a note, and keep the blocks until the caller closes the call."""
        outputs: list[Any] = []
        stream = RequestStream(generation, layout)
        params = self._params(generation, 1, dict(requests.PREFILL_PARAMS))
        await self._run(generation, layout, params, outputs.append)
        output = outputs[-1]
        note: dict[str, Any] = output.kv_transfer_params or {}
        if not note:
            raise EngineFailed("vLLM prefilled a prompt, but did not say where its KV cache is")
        last = _delta(stream, output, layout) if output.outputs[0].finish_reason == "stop" else None
        end = extension.abort_stale  # unless the caller accepts the output
        try:
            if last is not None:
                emit(PrefillOutput(last, ()))
            else:
                ranked = _prompt_logprobs(stream, output, layout.ids)
                delta = stream.prefill_delta(output.num_cached_tokens or 0, ranked)
                emit(PrefillOutput(delta, (write_note(self._allocate, note),)))
            if not cancelled_in_emit():
                end = extension.release_blocks
                if last is None:
                    await asyncio.get_running_loop().create_future()  # until cancelled
        finally:
            freeing = end(self._llm, note["remote_request_id"])
            await wait_until_done(asyncio.ensure_future(freeing))

    async def _stream(self, generation: Generation, layout: Layout, limit: int, emit: Emit) -> None:
        """Phases D and PD; and phase P with a limit of one token, which is then emitted here."""
        transfer = None
        if generation.phases == "D":
            note, groups = read_note(generation.kv, requests.KvNote), await self._kv_groups()
            transfer = requests.check_kv_note(note, len(layout.ids), self._block_size, groups)
        stream = RequestStream(generation, layout)

        def handle(output: Any) -> None:
            if (delta := _delta(stream, output, layout)) is not None:
                emit(PrefillOutput(delta, ()) if generation.phases == "P" else delta)

        params = self._params(generation, limit, transfer)
        on_copied = emit if generation.phases == "PD" else None
        await self._run(generation, layout, params, handle, on_copied)

    def _params(
        self, generation: Generation, limit: int, transfer: dict[str, Any] | None
    ) -> SamplingParams:
        request = SamplingRequest(
            generation.work.sampling, self._model, limit, prefills="P" in generation.phases
        )
        options = requests.vllm_sampling_options(request)
        if structured := options.get("structured_outputs"):
            options["structured_outputs"] = StructuredOutputsParams(**structured)
        return SamplingParams(
            **options,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )

    async def _run(
        self,
        generation: Generation,
        layout: Layout,
        params: SamplingParams,
        handle: Handle,
        on_copied: Emit | None = None,
    ) -> None:
        """Submit the request and pass every output to ``handle``; a cancel aborts it in vLLM.

        ``on_copied`` receives an empty delta after borrowed embeddings are copied and before vLLM
        sees them, so that nothing is computed from stale ones.
        """
        borrowed = sum(
            len(array.buffer) for item in generation.media if item.encoded for array in item.arrays
        )
        render = functools.partial(self._inputs.render, generation, layout)
        short = borrowed <= LOOP_COPY_BYTES and len(layout.ids) < LONG_PROMPT
        inputs = render() if short else await in_thread(render)
        if on_copied is not None and borrowed:
            await emit_inputs_copied(on_copied)
        adding = asyncio.ensure_future(self._llm.add_request(generation.work.id, inputs, params))
        # Until the caller accepts an output, the borrowed inputs may prove stale.
        stale = generation.phases == "D" or (borrowed > 0 and on_copied is None)
        finished = False
        try:
            queue = await asyncio.shield(adding)
            self._watch()
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                _check_finish(output, generation)
                handle(output)
                stale = cancelled_in_emit()
        finally:
            if stale or not finished:
                aborting = self._abort(adding, stale=stale, prefill=generation.phases == "P")
                await wait_until_done(asyncio.ensure_future(aborting))

    async def _abort(self, adding: asyncio.Future[Any], *, stale: bool, prefill: bool) -> None:
        """End a request in vLLM. One that is still being added is added first.

        ``stale``: its inputs were, or may have been, stale: evict what was computed from them.
        ``prefill``: vLLM may have finished it and keep its blocks for a peer.
        """
        await wait_until_done(adding)
        if adding.cancelled() or adding.exception() is not None or self._llm.errored:
            return
        request_id = adding.result().request_id
        if stale:
            await extension.abort_stale(self._llm, request_id)
        await self._llm.abort(request_id, internal=True)
        if prefill:  # vLLM's client drops an abort after the last output
            await extension.release_blocks(self._llm, request_id)

    async def _loaded_parameters(self) -> ParameterCounts:
        """vLLM answers on the event loop only, so the first request asks."""
        [(towers, language), *_] = await self._llm.collective_rpc(extension.LOADED_PARTS)
        return ParameterCounts(self._sizes.encoder * towers, self._sizes.language * language)

    async def _kv_groups(self) -> int:
        if self._groups is None:
            [self._groups, *_] = await self._llm.collective_rpc(extension.KV_GROUPS)
        return self._groups

    def _watch(self) -> None:
        """From the first request on, notice the end of vLLM's processes, busy or idle."""
        handler = self._llm.output_handler
        if not self._watched and handler is not None:
            self._watched = True
            handler.add_done_callback(lambda _: self._die())
            if self._listener is not None:
                self._listener.start()

    def _die(self) -> None:
        if not self._closed:
            self.died.set()


def _check_finish(output: Any, generation: Generation) -> None:
    """Raise if vLLM itself ended the request."""
    reason = output.outputs[0].finish_reason
    if reason == "abort":
        raise WorkerLost("vLLM aborted the request. Try again.")
    if reason is not None and reason not in FINISH_REASONS:
        if generation.phases == "D" or any(not item.arrays for item in generation.media):
            raise TicketLost("the KV cache or embedding of this request is gone. Try again.")
        raise EngineFailed(f"vLLM ended the request: {reason}")


def _delta(stream: RequestStream, output: Any, layout: Layout) -> Delta | None:
    new = output.outputs[0]
    logprobs: tuple[TokenLogprob, ...] = ()
    count = stream.sampling.logprobs
    if count is not None and new.token_ids:
        logprobs = tuple(
            _logprob(found, token, count)
            for token, found in zip(new.token_ids, new.logprobs, strict=True)
        )
    finish = FINISH_REASONS.get(new.finish_reason)
    ranked = _prompt_logprobs(stream, output, layout.ids)
    return stream.delta(new.token_ids, finish, logprobs, output.num_cached_tokens or 0, ranked)


def _prompt_logprobs(
    stream: RequestStream, output: Any, ids: Sequence[int]
) -> tuple[PromptLogprob, ...]:
    """Of all tokens of the prompt but the first, which vLLM reports as None."""
    count = stream.sampling.prompt_logprobs
    if count is None or not output.prompt_logprobs:
        return ()
    return tuple(
        PromptLogprob(id, found[id].logprob, found[id].rank, _best(found, count))
        for id, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    )


def _logprob(found: Any, token: int, count: int) -> TokenLogprob:
    """``found``: by token, with ranks from 1; it has the chosen token whatever its rank."""
    return TokenLogprob(found[token].logprob, _best(found, count))


def _best(found: Any, count: int) -> tuple[TopLogprob, ...]:
    best = sorted((one.rank, id, one.logprob) for id, one in found.items() if one.rank <= count)
    return tuple(TopLogprob(id, logprob) for _, id, logprob in best[:count])
