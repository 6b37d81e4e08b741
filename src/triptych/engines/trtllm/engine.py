"""TensorRT-LLM's LLM behind the Engine protocol: one generation is one ``generate_async``.

With prefill and decode in separate workers, decode emits all tokens; prefill's note has the first
one. A RequestError fails one request. Any other exception while a request runs means that the
executor is gone, as in TensorRT-LLM's own server: this worker then dies.

The engine can't evict blocks. So the adapter copies borrowed embeddings and emits an empty delta
before the engine computes from them. Phase P can emit only once, after prefill: if its embeddings
prove stale then, their media get other identifiers from there on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from triptych.checkpoint import Model
from triptych.engines.adapter.base import (
    FINISH_REASONS,
    RequestStream,
    SamplingRequest,
    cancelled_in_emit,
    emit_inputs_copied,
    engine_boundary,
    in_thread,
    lay_out,
    write_note,
)
from triptych.engines.base import Allocate, Emit, EngineReport, Generation, Media, PrefillOutput
from triptych.engines.checks import max_new_tokens
from triptych.engines.trtllm.api import TrtApi
from triptych.engines.trtllm.monitor import ExecutorMonitor
from triptych.engines.trtllm.requests import (
    TrtPrompt,
    TrtPromptBuilder,
    pack_kv_note,
    trt_sampling_options,
)
from triptych.errors import (
    ContextLengthExceeded,
    EngineFailed,
    TicketLost,
    TriptychError,
    WorkerLost,
)
from triptych.messages import Delta, FinishReason, TokenLogprob, TopLogprob
from triptych.models.family import Family
from triptych.models.layouts import Layout

log = logging.getLogger(__name__)

TRANSFER_ERROR = "kv cache transfer"  # part of a request's error when the hand-over failed


class TrtStream(RequestStream):
    """Makes deltas of the results of one request: every result repeats all tokens so far.

    ``first_ids``: tokens that prefill generated; the answer must begin with them. ``inputs``:
    memory that the engine reads before its first output.
    """

    first_ids: Sequence[int] = ()
    inputs: tuple[Tensor, ...] = ()

    def take(self, result: Any) -> Delta | None:
        """None if the result has neither new tokens nor a finish."""
        output, sent = result.outputs[0], self.generated
        ids = tuple(output.token_ids[sent:])
        finish = _finish(result)
        if not sent and list(ids[: len(self.first_ids)]) != list(self.first_ids[: len(ids)]):
            raise EngineFailed("decode did not begin with the token that prefill generated")
        logprobs: tuple[TokenLogprob, ...] = ()
        count = self.sampling.logprobs
        if count is not None and ids:
            logprobs = to_logprobs(ids, output.logprobs[sent : sent + len(ids)], count)
        delta = self.delta(ids, finish, logprobs, self.cached_tokens(result))
        if delta is not None:
            self.inputs = ()
        return delta

    def cached_tokens(self, result: Any) -> int:
        return min(int(result.cached_tokens or 0), self.length)


class TrtEngine:
    """The Engine protocol. ``llm`` is a loaded ``tensorrt_llm.LLM``; ``close`` shuts it down."""

    def __init__(
        self,
        api: TrtApi,
        llm: Any,
        model: Model,
        family: Family,
        prompts: TrtPromptBuilder,
        monitor: ExecutorMonitor,
        allocate: Allocate,
    ) -> None:
        self._api = api
        self._llm = llm
        self._model = model
        self._family = family
        self._longest_prompt = _longest_prompt(llm, model)
        self._prompts = prompts
        self._monitor = monitor
        self._allocate = allocate
        self._thread = ThreadPoolExecutor(1, "triptych-trtllm")
        self._streams: dict[TrtStream, None] = {}  # an ordered set
        self._aborting: set[asyncio.Task[None]] = set()
        self._counters: Counter[str] = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0)

    async def generate(self, generation: Generation, emit: Emit) -> None:
        self._monitor.start()
        if self._monitor.dead:
            raise WorkerLost("TensorRT-LLM's executor has died")
        layout = await lay_out(generation, self._family, self._model.vocabulary)
        if len(layout.ids) > self._longest_prompt:
            raise ContextLengthExceeded.of(len(layout.ids), None, self._longest_prompt + 1)
        limit = max_new_tokens(generation.work, len(layout.ids), self._model.context)
        # With a limit of one token there is nothing to hand over.
        phases = "PD" if generation.phases == "P" and limit == 1 else generation.phases
        request = SamplingRequest(generation.work.sampling, self._model, limit)
        options = trt_sampling_options(request)
        if guided := options.get("guided_decoding"):
            options["guided_decoding"] = self._api.guided(**guided)
        sampling = self._api.sampling(**options)
        with self._registered(TrtStream(generation, layout, self._counters)) as stream:
            prompt = await self._prepare(generation, phases, layout, sampling)
            if generation.phases == "PD" and any(media.encoded for media in generation.media):
                await emit_inputs_copied(emit)
            stream.first_ids, stream.inputs = prompt.first_ids, prompt.memory
            result = self._submit(prompt, sampling, generation)
            del prompt
            try:
                if generation.phases == "P":
                    await self._prefill(stream, result, phases, generation.media, emit)
                else:
                    await self._stream(stream, result, phases, emit)
            finally:
                self._release(stream, result, phases)

    def report(self) -> EngineReport:
        queued = sum(1 for stream in self._streams if not stream.begun)
        blocks = self._monitor.kv_stats
        return EngineReport(
            queued=queued,
            running=len(self._streams) - queued + len(self._aborting),
            kv_blocks_total=blocks.get("maxNumBlocks", 0),
            kv_blocks_free=blocks.get("freeNumBlocks", 0),
            counters=dict(self._counters),
        )

    def close(self) -> None:
        self._monitor.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._llm.shutdown()

    @contextmanager
    def _registered(self, stream: TrtStream) -> Iterator[TrtStream]:
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]

    async def _prepare(
        self, generation: Generation, phases: str, layout: Layout, sampling: Any
    ) -> TrtPrompt:
        build = functools.partial(self._prompts.build, generation, phases, layout, sampling)
        with engine_boundary(generation.work.id, self._request_failed):
            if not generation.media:
                return build()
            built: list[TrtPrompt] = []  # a future would keep it until garbage is collected
            await in_thread(lambda: built.append(build()), self._thread)
            return built.pop()

    def _submit(self, prompt: TrtPrompt, sampling: Any, generation: Generation) -> Any:
        with engine_boundary(generation.work.id, self._request_failed):
            return self._llm.generate_async(
                prompt.inputs,
                sampling_params=sampling,
                streaming=generation.phases != "P",
                disaggregated_params=prompt.disaggregated,
                cache_salt=generation.work.salt or None,
            )

    async def _prefill(
        self, stream: TrtStream, result: Any, phases: str, media: Sequence[Media], emit: Emit
    ) -> None:
        """Emit the one output of phase P; then wait until decode has fetched the KV cache."""
        while await self._next(stream, result, phases):
            pass
        output = result.outputs[0]
        if phases == "PD" or output.finish_reason == "stop":
            last = stream.take(result)
            assert last is not None
            self._emit_prefill(PrefillOutput(last, ()), media, emit)
            return
        # Prefill generates one token and so finishes with "length".
        if output.finish_reason not in ("length", "not_finished"):
            raise EngineFailed(f"TensorRT-LLM ended prefill: {output.finish_reason}")
        note = pack_kv_note(self._api, output.disaggregated_params)
        delta = stream.prefill_delta(stream.cached_tokens(result))
        stream.inputs = ()
        self._emit_prefill(PrefillOutput(delta, (write_note(self._allocate, note),)), media, emit)
        await asyncio.get_running_loop().create_future()  # until cancelled

    def _emit_prefill(self, output: PrefillOutput, media: Sequence[Media], emit: Emit) -> None:
        emit(output)
        if cancelled_in_emit():
            self._prompts.rename(media)

    async def _stream(self, stream: TrtStream, result: Any, phases: str, emit: Emit) -> None:
        while await self._next(stream, result, phases):
            if (delta := stream.take(result)) is not None:
                emit(delta)
        if not result.finished:
            raise EngineFailed("TensorRT-LLM ended the stream without a reason")

    async def _next(self, stream: TrtStream, result: Any, phases: str) -> bool:
        """Wait for the next output of a request; False: it has ended."""
        with engine_boundary(stream.request_id, functools.partial(self._step_failed, phases)):
            try:
                await anext(result)
            except StopAsyncIteration:
                return False
        return True

    def _request_failed(self, error: Exception) -> TriptychError:
        if not self._monitor.healthy:
            self._monitor.die(repr(error))
            return WorkerLost("TensorRT-LLM's executor has died")
        return EngineFailed(f"TensorRT-LLM failed on the request: {error}")

    def _step_failed(self, phases: str, error: Exception) -> TriptychError:
        if not isinstance(error, self._api.request_error):  # the executor's end
            self._monitor.die(repr(error))
            return WorkerLost("TensorRT-LLM's executor died during the request")
        if phases == "D" and TRANSFER_ERROR in str(error).lower():
            return TicketLost(f"The transfer of the KV cache failed: {error}")
        return self._request_failed(error)

    def _release(self, stream: TrtStream, result: Any, phases: str) -> None:
        """Free everything of a request in the engine. The engine can't cancel the transfer of a KV
        cache, so that one is aborted after its arrival."""
        if self._monitor.dead or (result.finished and phases != "P"):
            return
        if phases != "D" or stream.begun:
            result.abort()
            return
        task = asyncio.get_running_loop().create_task(self._abort_after_transfer(stream, result))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_after_transfer(self, stream: TrtStream, result: Any) -> None:
        try:
            if await self._next(stream, result, "D"):
                result.abort()
        except TriptychError as error:
            extra = {"request_id": stream.request_id}
            log.debug("a cancelled request ended by itself: %s", error, extra=extra)


def _longest_prompt(llm: Any, model: Model) -> int:
    """Tokens. Without chunked prefill, a prompt must fit in one step of the engine."""
    step = llm.args.max_num_tokens
    chunked = llm.args.enable_chunked_prefill or not step
    return model.context if chunked else min(model.context, step)


def _finish(result: Any) -> FinishReason | None:
    if not result.finished:
        return None
    reason = result.outputs[0].finish_reason
    if reason not in FINISH_REASONS:
        raise EngineFailed(f"TensorRT-LLM ended the request: {reason}")
    return FINISH_REASONS[reason]


def to_logprobs(
    ids: Sequence[int], given: Sequence[Mapping[int, Any]], best: int
) -> tuple[TokenLogprob, ...]:
    """``given``: for every token, by id, the log-probabilities of the best ones and its own."""
    found = []
    for id, entries in zip(ids, given, strict=True):
        ordered = sorted(entries.items(), key=lambda entry: -entry[1].logprob)
        top = tuple(TopLogprob(token, float(entry.logprob)) for token, entry in ordered[:best])
        if id not in entries:
            raise EngineFailed(f"TensorRT-LLM gave no log-probability of token {id}")
        found.append(TokenLogprob(float(entries[id].logprob), top))
    return tuple(found)
