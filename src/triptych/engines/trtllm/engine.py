"""TensorRT-LLM's LLM as an engine: one request of ours is one ``generate_async``.

All tokens of a stream that two workers share are emitted by decode, which has the first one from
prefill's note. A request fails alone with RequestError; whatever else the engine raises while a
request runs means that its executor is gone, as its own server takes it too: this worker then dies.

The engine can't forget blocks again. So embeddings that another worker lends are copied first, and
an empty delta asks whether they are still good before anything is made of them. Span P may emit
only once, when all is made: if they prove stale then, their media go by another name from there on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triptych.checkpoint import Model
from triptych.engines.adapter import notes
from triptych.engines.adapter.threads import in_thread
from triptych.engines.base import Allocate, Emit, EngineReport, Generation, Media, PrefillOutput
from triptych.engines.trtllm import handover, sampling
from triptych.engines.trtllm.api import TrtApi
from triptych.engines.trtllm.bounds import PromptLimits
from triptych.engines.trtllm.prompts import TrtPrompt, TrtPromptBuilder
from triptych.engines.trtllm.stream import TrtStream
from triptych.engines.trtllm.watch import ExecutorMonitor
from triptych.errors import EngineFailed, TicketLost, TriptychError, WorkerLost
from triptych.messages import Delta
from triptych.models.layouts import Layout

log = logging.getLogger(__name__)

TRANSFER_ERROR = "kv cache transfer"  # what a request's error says when the hand-over failed


class TrtEngine:
    """The Engine protocol. ``llm`` is a loaded ``tensorrt_llm.LLM``, which ``close`` ends."""

    def __init__(
        self,
        api: TrtApi,
        llm: Any,
        model: Model,
        bounds: PromptLimits,
        prompts: TrtPromptBuilder,
        watch: ExecutorMonitor,
        empty: Allocate,
    ) -> None:
        self._api = api
        self._llm = llm
        self._model = model
        self._bounds = bounds
        self._prompts = prompts
        self._watch = watch
        self._empty = empty
        self._thread = ThreadPoolExecutor(1, "triptych-trtllm")
        self._streams: dict[TrtStream, None] = {}  # an ordered set
        self._leaving: set[asyncio.Task[None]] = set()
        self._counters = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens"), 0.0)

    async def generate(self, generation: Generation, emit: Emit) -> None:
        self._watch.start()
        if self._watch.dead:
            raise WorkerLost("the engine of this worker died")
        layout, most = self._bounds.fit(generation)
        # Where the first token is the last one, nothing is to be handed over.
        span = "PD" if generation.span == "P" and most == 1 else generation.span
        chosen = sampling.trt_sampling_params(
            self._api, generation.work.sampling, self._model, most
        )
        with self._counted(TrtStream(generation, layout)) as stream:
            prompt = await self._prepare(generation, span, layout, chosen)
            if generation.span == "PD" and any(media.encoded for media in generation.media):
                emit(Delta(()))
                await asyncio.sleep(0)
            stream.begins, stream.held = prompt.begins, prompt.held
            result = self._submit(prompt, chosen, generation)
            del prompt
            try:
                if generation.span == "P":
                    await self._prefill(stream, result, span, generation.media, emit)
                else:
                    await self._stream(stream, result, span, emit)
            finally:
                self._leave(stream, result, span)

    def report(self) -> EngineReport:
        queued = sum(1 for stream in self._streams if not stream.begun)
        blocks = self._watch.blocks
        return EngineReport(
            queued=queued,
            running=len(self._streams) - queued + len(self._leaving),
            kv_blocks_total=blocks.get("maxNumBlocks", 0),
            kv_blocks_free=blocks.get("freeNumBlocks", 0),
            counters=dict(self._counters),
        )

    def close(self) -> None:
        self._watch.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._llm.shutdown()

    @contextmanager
    def _counted(self, stream: TrtStream) -> Iterator[TrtStream]:
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]
            if stream.begun:
                self._counters["prompt_tokens"] += stream.length
                self._counters["cached_tokens"] += stream.cached
                self._counters["generated_tokens"] += stream.sent

    async def _prepare(
        self, generation: Generation, span: str, layout: Layout, chosen: Any
    ) -> TrtPrompt:
        make = functools.partial(self._prompts.make, generation, span, layout, chosen)
        try:
            if not generation.media:
                return make()
            made: list[TrtPrompt] = []  # an executor's own result stays until garbage is collected
            await in_thread(lambda: made.append(make()), self._thread)
            return made.pop()
        except TriptychError:
            raise
        except Exception as error:  # the edge: the engine's processor raises what it likes
            raise self._failed(error) from error

    def _submit(self, prompt: TrtPrompt, chosen: Any, generation: Generation) -> Any:
        try:
            return self._llm.generate_async(
                prompt.inputs,
                sampling_params=chosen,
                streaming=generation.span != "P",
                disaggregated_params=prompt.disaggregated,
                cache_salt=generation.work.salt or None,
            )
        except Exception as error:  # the edge, again
            raise self._failed(error) from error

    async def _prefill(
        self, stream: TrtStream, result: Any, span: str, media: Sequence[Media], emit: Emit
    ) -> None:
        """The whole answer at once; then wait until whoever decodes has fetched the KV cache."""
        while await self._more(result, span):
            pass
        output = result.outputs[0]
        if span == "PD" or output.finish_reason == "stop":
            last = stream.take(result)
            assert last is not None
            self._hand_over(PrefillOutput(last, ()), media, emit)
            return
        # "length" is that of prefill, which is told to make one token.
        if output.finish_reason not in ("length", "not_finished"):
            raise EngineFailed(f"TensorRT-LLM ended prefill: {output.finish_reason}")
        note = handover.pack_kv_note(self._api, output.disaggregated_params)
        prompt, spent = stream.prompt(result), stream.spent()
        told = Delta((), None, (), prompt, spent)
        self._hand_over(PrefillOutput(told, (notes.write_note(self._empty, note),)), media, emit)
        await asyncio.get_running_loop().create_future()  # until it is cancelled

    def _hand_over(self, made: PrefillOutput, media: Sequence[Media], emit: Emit) -> None:
        emit(made)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # what it was made of proved stale
            self._prompts.rename(media)

    async def _stream(self, stream: TrtStream, result: Any, span: str, emit: Emit) -> None:
        while await self._more(result, span):
            if (delta := stream.take(result)) is not None:
                emit(delta)
        if not result.finished:
            raise EngineFailed("TensorRT-LLM ended the stream without a reason")

    async def _more(self, result: Any, span: str) -> bool:
        """Wait for the next step of a request; False: it has ended."""
        try:
            await anext(result)
        except StopAsyncIteration:
            return False
        except self._api.request_error as error:
            if span == "D" and TRANSFER_ERROR in str(error).lower():
                raise TicketLost(f"prefill's KV cache did not come over: {error}") from error
            raise self._failed(error) from error
        except Exception as error:  # the edge: what is not a request's own is the executor's end
            self._watch.die(repr(error))
            raise WorkerLost("the engine died while it answered") from error
        return True

    def _failed(self, error: Exception) -> TriptychError:
        if not self._watch.healthy:
            self._watch.die(repr(error))
            return WorkerLost("the engine of this worker died")
        return EngineFailed(f"TensorRT-LLM failed on the request: {error}")

    def _leave(self, stream: TrtStream, result: Any, span: str) -> None:
        """Give everything back. A KV cache that is coming over is let in first: the engine can't
        call off its transfer."""
        if self._watch.dead or (result.finished and span != "P"):
            return
        if span != "D" or stream.begun:
            result.abort()
            return
        task = asyncio.get_running_loop().create_task(self._abort_later(result))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _abort_later(self, result: Any) -> None:
        try:
            if await self._more(result, "D"):
                result.abort()
        except TriptychError as error:
            log.debug("a cancelled request ended by itself: %s", error)
