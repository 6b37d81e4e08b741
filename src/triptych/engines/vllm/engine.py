"""vLLM's engine behind the Engine protocol: requests in, deltas out.

vLLM's client lives on the worker's event loop; scheduler and model are in processes of their own.
Prefill hands over a note that says where its KV cache lies, and vLLM's connector on the decode side
fetches it. Decode makes the first token again, so all tokens come from there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triptych.checkpoint import Model
from triptych.engines.adapter import notes
from triptych.engines.adapter.kv_listener import KvListener
from triptych.engines.adapter.leftovers import EngineProcesses
from triptych.engines.adapter.spent import RequestTimer
from triptych.engines.adapter.threads import in_thread
from triptych.engines.base import (
    Allocate,
    Emit,
    EngineReport,
    Generation,
    PrefillOutput,
    PrefixCacheInfo,
)
from triptych.engines.checks import check_work, max_new_tokens
from triptych.engines.vllm import guard, handover, parts
from triptych.engines.vllm.inputs import VllmInputs
from triptych.engines.vllm.sampling import vllm_sampling_options
from triptych.engines.vllm.statistics import VllmStatistics
from triptych.errors import (
    EngineFailed,
    InvalidValue,
    Overloaded,
    TicketLost,
    TriptychError,
    WorkerLost,
)
from triptych.messages import (
    Delta,
    FinishReason,
    ParameterCounts,
    PromptInfo,
    Sampling,
    TokenLogprob,
    TopLogprob,
)
from triptych.models.layouts import Layout, locate_media
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import LOOP_COPY_BYTES

log = logging.getLogger(__name__)

LONG_PROMPT = 4096  # tokens of a prompt that is prepared off the event loop
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
Take = Callable[[Any], None]


class VllmEngine:
    """The Engine protocol over a loaded AsyncLLM.

    ``stored``: how large the parts are that it may have loaded.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        inputs: VllmInputs,
        model: Model,
        statistics: VllmStatistics,
        empty: Allocate,
        stored: ParameterCounts,
        listener: KvListener | None = None,
    ) -> None:
        self.died = asyncio.Event()
        self._llm = llm
        self._inputs = inputs
        self._model = model
        self._statistics = statistics
        self._empty = empty
        self._stored = stored
        self._listener = listener
        self._context: int = llm.model_config.max_model_len
        self._block_size: int = llm.vllm_config.cache_config.block_size
        self._parameters: ParameterCounts | None = None
        self._groups: int | None = None
        self._watched = False
        self._closed = False
        manager = llm.engine_core.resources.engine_manager
        self._leftovers = EngineProcesses(process.pid for process in manager.processes)

    async def generate(self, generation: Generation, emit: Emit) -> None:
        check_work(generation, self._model.vocabulary)
        layout = await self._lay_out(generation)
        limit = max_new_tokens(generation.work, len(layout.ids), self._context)
        try:
            if self._parameters is None:
                self._parameters = await self._loaded_parts()
            if generation.span == "P" and limit > 1:
                await self._prefill(generation, layout, emit)
            else:
                await self._stream(generation, layout, limit, emit)
        except EngineDeadError:
            self._die()
            raise WorkerLost("vLLM's engine has ended. Try again.") from None
        except VLLMClientError as error:
            raise InvalidValue(str(error)) from None
        except GracefulHTTPError as error:  # its own limits, where the operator has set some
            raise Overloaded(str(error)) from None
        except TriptychError:
            raise
        except Exception as error:  # the engine's edge: vLLM's errors have no common name
            log.exception("vLLM failed")
            raise EngineFailed(f"vLLM failed: {type(error).__name__}") from error

    @property
    def cache(self) -> PrefixCacheInfo | None:
        """Known as far as its events are."""
        if self._listener is None:
            return None
        return PrefixCacheInfo(self._block_size, self._blocks, self._listener.listen)

    def report(self) -> EngineReport:
        unfinished = self._llm.get_num_unfinished_requests()
        report = self._statistics.report(unfinished, self._blocks)
        heard = {} if self._listener is None else self._listener.counters
        return replace(
            report,
            parameters=self._parameters or ParameterCounts(),
            counters=report.counters | heard,
        )

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        # vLLM's processes take seconds to end in peace, and hold nothing that is worth it.
        self._leftovers.clear()
        self._llm.shutdown()

    @property
    def _blocks(self) -> int:
        return (self._llm.vllm_config.cache_config.num_gpu_blocks or 1) - 1  # one is nobody's

    async def _lay_out(self, generation: Generation) -> Layout:
        work = generation.work
        length = len(work.prompt) + sum(item.meta.tokens for item in generation.media)
        if length < LONG_PROMPT:  # a thread would cost more than it saves
            return self._inputs.lay_out(generation)
        return await in_thread(functools.partial(self._inputs.lay_out, generation))

    async def _prefill(self, generation: Generation, layout: Layout, emit: Emit) -> None:
        """Prefill, hand over a note, and keep the blocks until the call is closed."""
        last: list[Any] = []
        spent = RequestTimer("P")
        params = self._params(generation.work.sampling, 1, dict(handover.PREFILL_PARAMS))
        await self._run(generation, layout, params, last.append)
        output = last[-1]
        note: dict[str, Any] = output.kv_transfer_params or {}
        if not note:
            raise EngineFailed("vLLM prefilled, but did not say where its KV cache lies")
        info = _prompt_info(generation, layout, output)
        stopped = output.outputs[0].finish_reason == "stop"
        told = spent.until_now(ended=False)
        end = guard.abort_stale  # unless the caller takes it
        try:
            if stopped:
                emit(PrefillOutput(_delta(output, generation.work.sampling, info, told), ()))
            else:
                delta = Delta((), prompt=info, timings=told)
                emit(PrefillOutput(delta, (notes.write_note(self._empty, note),)))
            if not _stale():
                end = guard.release_blocks
                if not stopped:
                    await asyncio.get_running_loop().create_future()
        finally:
            freeing = end(self._llm, note["remote_request_id"])
            await wait_until_done(asyncio.ensure_future(freeing))

    async def _stream(self, generation: Generation, layout: Layout, limit: int, emit: Emit) -> None:
        """Span D and PD; and P where one token is all, which then is emitted here."""
        sampling = generation.work.sampling
        transfer = None
        if generation.span == "D":
            note = notes.read_note(generation.kv)
            groups = await self._kv_groups()
            transfer = handover.check_kv_note(note, len(layout.ids), self._block_size, groups)
        first, spent = True, RequestTimer(generation.span)

        def take(output: Any) -> None:
            nonlocal first
            info = None
            if first and output.outputs[0].token_ids:
                first = False
                info = _prompt_info(generation, layout, output)
            told = spent.until_now(ended=output.finished)
            delta = _delta(output, sampling, info, told)
            emit(PrefillOutput(delta, ()) if generation.span == "P" else delta)

        params = self._params(sampling, limit, transfer)
        copied = emit if generation.span == "PD" else None
        await self._run(generation, layout, params, take, copied)

    def _params(
        self, sampling: Sampling, limit: int, transfer: dict[str, Any] | None
    ) -> SamplingParams:
        return SamplingParams(
            **vllm_sampling_options(sampling, self._model.end_ids, limit),
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )

    async def _run(
        self,
        generation: Generation,
        layout: Layout,
        params: SamplingParams,
        take: Take,
        copied: Emit | None = None,
    ) -> None:
        """Submit and give every output to ``take``; a cancel ends the request in vLLM too.

        ``copied``: is told with an empty delta when borrowed embeddings have been copied, and
        before vLLM has seen them: should they have been stale, nothing is made of them.
        """
        borrowed = sum(
            len(array.buffer) for item in generation.media if item.encoded for array in item.arrays
        )
        render = functools.partial(self._inputs.render, generation, layout)
        short = borrowed <= LOOP_COPY_BYTES and len(layout.ids) < LONG_PROMPT
        inputs = render() if short else await in_thread(render)
        if copied is not None and borrowed:
            copied(Delta(()))
            await asyncio.sleep(0)  # where we are cancelled if they were
        adding = asyncio.ensure_future(self._llm.add_request(generation.work.id, inputs, params))
        # Until the caller has taken something it may not have looked, or found them stale.
        stale = generation.span == "D" or (borrowed > 0 and copied is None)
        finished = False
        try:
            queue = await asyncio.shield(adding)
            self._watch()
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                self._check(output, generation)
                take(output)
                stale = _stale()
        finally:
            if stale or not finished:
                ending = self._abort(adding, stale=stale, held=generation.span == "P")
                await wait_until_done(asyncio.ensure_future(ending))

    def _check(self, output: Any, generation: Generation) -> None:
        """Raise if vLLM ended the request of itself."""
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise WorkerLost("vLLM ended the request. Try again.")
        if reason is not None and reason not in FINISHES:
            if generation.span == "D" or any(not item.arrays for item in generation.media):
                raise TicketLost("what this request was to go on from is gone. Try again.")
            raise EngineFailed(f"vLLM ended the request: {reason}")

    async def _abort(self, adding: asyncio.Future[Any], *, stale: bool, held: bool) -> None:
        """Also while it is still being added, which must not stop halfway.

        ``stale``: what it was made of had been taken back, or may have been, so nothing of it may
        stay in caches. ``held``: vLLM may have ended it already, and keep blocks for a reader.
        """
        await wait_until_done(adding)
        if adding.cancelled() or adding.exception() is not None or self._llm.errored:
            return
        request_id = adding.result().request_id
        if stale:
            await guard.abort_stale(self._llm, request_id)
        await self._llm.abort(request_id, internal=True)
        if held:  # an abort goes no further than the client once that has seen the last output
            await guard.release_blocks(self._llm, request_id)

    async def _loaded_parts(self) -> ParameterCounts:
        """Asked once, by the first request: vLLM answers on the event loop only."""
        [(towers, language), *_] = await self._llm.collective_rpc(parts.LOADED_PARTS)
        return ParameterCounts(self._stored.encoder * towers, self._stored.language * language)

    async def _kv_groups(self) -> int:
        if self._groups is None:
            [self._groups, *_] = await self._llm.collective_rpc(parts.KV_GROUPS)
        return self._groups

    def _watch(self) -> None:
        """From the first request on, know when vLLM's processes are gone, busy or idle."""
        handler = self._llm.output_handler
        if not self._watched and handler is not None:
            self._watched = True
            handler.add_done_callback(lambda _: self._die())
            if self._listener is not None:
                self._listener.start()

    def _die(self) -> None:
        if not self._closed:
            self.died.set()


def _stale() -> bool:
    """Whether the caller has cancelled us while we emitted: by this it tells that what we read
    had been taken back."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _prompt_info(generation: Generation, layout: Layout, output: Any) -> PromptInfo:
    if generation.first is not None and generation.first.prompt is not None:
        return generation.first.prompt
    return PromptInfo(
        tokens=len(layout.ids),
        cached=output.num_cached_tokens or 0,
        ids=layout.ids if generation.work.return_prompt_ids else None,
        media=locate_media(layout, generation.work, [item.meta for item in generation.media]),
    )


def _delta(
    output: Any, sampling: Sampling, info: PromptInfo | None, spent: dict[str, float] | None
) -> Delta:
    new = output.outputs[0]
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None and new.token_ids:
        logprobs = tuple(
            _logprob(found, token, sampling.logprobs)
            for token, found in zip(new.token_ids, new.logprobs, strict=True)
        )
    return Delta(tuple(new.token_ids), FINISHES.get(new.finish_reason), logprobs, info, spent)


def _logprob(found: Any, token: int, count: int) -> TokenLogprob:
    """``found``: by token, with ranks from 1; the chosen one is there whatever its rank."""
    best = sorted((one.rank, id, one.logprob) for id, one in found.items() if one.rank <= count)
    return TokenLogprob(
        found[token].logprob, tuple(TopLogprob(id, logprob) for _, id, logprob in best[:count])
    )
