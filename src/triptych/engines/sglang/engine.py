"""SGLang behind the Engine protocol: one generation is one request to SGLang.

With prefill and decode in separate workers, a request is two requests to two engines that run at
the same time: prefill hands over a note with its bootstrap address at once and goes on; SGLang
moves the KV cache and the first token to the decode engine. So decode emits all tokens.

The adapter copies borrowed embeddings and emits an empty delta before SGLang sees them: a caller
that finds them stale cancels, and nothing has been computed from them.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import torch

from triptych.checkpoint import Model
from triptych.engines.adapter.base import (
    FINISH_REASONS,
    LONG_PROMPT,
    RequestStream,
    SamplingRequest,
    emit_inputs_copied,
    engine_boundary,
    in_thread,
    lay_out,
    write_note,
)
from triptych.engines.base import Allocate, Emit, EngineReport, Generation, PrefillOutput
from triptych.engines.checks import check_embedding, max_new_tokens
from triptych.engines.sglang import requests
from triptych.engines.sglang.processes import SGLangProcesses
from triptych.engines.sglang.requests import BootstrapAddress
from triptych.errors import EngineFailed, InvalidValue, Overloaded, TicketLost, TriptychError
from triptych.messages import Delta, FinishReason, TokenLogprob, TopLogprob
from triptych.models.family import Family
from triptych.models.layouts import Layout
from triptych.transfer.base import LOOP_COPY_BYTES


class SGLangStream(RequestStream):
    """Makes deltas of the chunks that SGLang streams for one request."""

    def take(self, chunk: Mapping[str, Any]) -> Delta | None:
        """None if the chunk has nothing new. Raises if SGLang aborted the request."""
        meta = chunk["meta_info"]
        ids = tuple(chunk["output_ids"])
        finish = self._finish(meta["finish_reason"])
        stops = requests.stops_after_ignored_eos(self.sampling)
        for count, id in enumerate(ids, 1):
            if id in stops:
                ids, finish = ids[:count], "stop"
                break
        cached = int(meta.get("cached_tokens") or 0)
        return self.delta(ids, finish, self._logprobs(meta, len(ids)), cached)

    def abort_error(self, why: str, status: int | None = None) -> TriptychError:
        """The error for an abort by SGLang; ``status``: the HTTP status of SGLang's server."""
        if status == HTTPStatus.SERVICE_UNAVAILABLE:  # limits that the operator sets in SGLang
            return Overloaded(f"SGLang refuses the request: {why}")
        if self.phases != "PD":  # the worker at the other end may be the cause
            return TicketLost(f"The transfer of the KV cache failed: {why}")
        return EngineFailed(f"SGLang could not complete the request: {why}")

    def translate(self, error: Exception) -> TriptychError:
        if isinstance(error, ValueError):  # SGLang's answer to invalid parameters
            return InvalidValue(f"SGLang refuses the request: {error}")
        why = getattr(error, "detail", "") or error
        return self.abort_error(str(why), getattr(error, "status_code", None))

    def _logprobs(self, meta: Mapping[str, Any], count: int) -> tuple[TokenLogprob, ...]:
        if self.sampling.logprobs is None or not count:
            return ()
        chosen = meta["output_token_logprobs"][:count]
        best = (meta.get("output_top_logprobs") or [])[:count] or [()] * count
        return tuple(
            TokenLogprob(own, tuple(TopLogprob(id, value) for value, id, _ in top or ()))
            for (own, _, _), top in zip(chosen, best, strict=True)
        )

    def _finish(self, reason: Mapping[str, Any] | None) -> FinishReason | None:
        if reason is None:
            return None
        if reason["type"] in FINISH_REASONS:
            return FINISH_REASONS[reason["type"]]
        why = str(reason.get("message") or "SGLang gave no reason")
        raise self.abort_error(why, reason.get("status_code"))


class SGLangEngine:
    """The Engine protocol over SGLang's processes.

    ``bootstrap``: host and port where decode engines meet this one, in role P. ``split``: whether
    this engine only prefills or only decodes.
    """

    def __init__(
        self,
        processes: SGLangProcesses,
        family: Family,
        model: Model,
        dtype: torch.dtype,
        allocate: Allocate,
        bootstrap: tuple[str, int] | None,
        split: bool,
    ) -> None:
        self._processes = processes
        self._family = family
        self._model = model
        self._dtype = dtype
        self._allocate = allocate
        self._bootstrap = bootstrap
        self._split = split
        self._counters: Counter[str] = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0)
        processes.manager.mm_processor.process_mm_data_async = _return_prepared

    async def generate(self, generation: Generation, emit: Emit) -> None:
        layout = await lay_out(generation, self._family, self._model.vocabulary)
        for item in generation.media if "P" in generation.phases else ():
            check_embedding(item, self._family.width)  # SGLang's scheduler would die of a wrong one
        context = min(self._model.context, self._processes.manager.max_req_input_len)
        limit = max_new_tokens(generation.work, len(layout.ids), context)
        async with self._processes.request():
            embeddings = await self._copy_embeddings(generation)
            address = self._bootstrap_address(generation)
            if generation.phases == "P":
                assert address is not None
                note = write_note(self._allocate, address)
                emit(PrefillOutput(Delta(()), (note,)))
                await asyncio.sleep(0)  # a caller that finds stale embeddings cancels here
            elif any(embedding is not None for embedding in embeddings):
                await emit_inputs_copied(emit)
            arguments = self._arguments(generation, layout, limit, address)
            if generation.media:
                inputs = await self._scheduler_inputs(generation, layout, embeddings)
                arguments["image_data"] = [inputs]
            await self._stream(generation, layout, arguments, emit)

    def report(self) -> EngineReport:
        manager = self._processes.manager
        loads = manager.load_snapshot_reader.read_all()
        running = sum(load.num_running_reqs for load in loads)
        page = manager.server_args.page_size or 1
        total = sum(load.max_total_num_tokens for load in loads) // page
        used = -(-sum(load.num_used_tokens for load in loads) // page)
        return EngineReport(
            queued=max(0, len(manager.rid_to_state) - running),
            running=running,
            kv_blocks_total=total,
            kv_blocks_free=total - used,
            counters=dict(self._counters)
            | {"computed_prompt_tokens": sum(load.total_prefill_uncached_tokens for load in loads)},
        )

    async def _copy_embeddings(self, generation: Generation) -> list[torch.Tensor | None]:
        if "P" not in generation.phases:
            return [None] * len(generation.media)
        size = sum(array.buffer.nbytes for item in generation.media for array in item.arrays)
        copy = functools.partial(requests.copy_embeddings, generation.media, self._dtype)
        return copy() if size <= LOOP_COPY_BYTES else await in_thread(copy)

    async def _scheduler_inputs(
        self, generation: Generation, layout: Layout, embeddings: list[torch.Tensor | None]
    ) -> Any:
        processor = self._processes.manager.mm_processor
        prepare = functools.partial(
            requests.scheduler_inputs, generation, layout, self._family, embeddings, processor
        )
        return prepare() if len(layout.ids) < LONG_PROMPT else await in_thread(prepare)

    def _bootstrap_address(self, generation: Generation) -> BootstrapAddress | None:
        """Where prefill and decode of this request meet; None: this engine does both."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        match generation.phases:
            case "P":
                if self._bootstrap is None:
                    raise EngineFailed("an engine of another role was asked to prefill")
                return requests.new_bootstrap_address(*self._bootstrap)
            case "D":
                return requests.read_bootstrap_address(generation.kv, FAKE_BOOTSTRAP_HOST)
        if not self._split:
            return None
        # The health check of an engine that does one half: SGLang skips the other half.
        return requests.new_bootstrap_address(FAKE_BOOTSTRAP_HOST, 0)

    def _arguments(
        self,
        generation: Generation,
        layout: Layout,
        limit: int,
        address: BootstrapAddress | None,
    ) -> dict[str, Any]:
        """Of SGLang's ``async_generate``."""
        work = generation.work
        arguments: dict[str, Any] = {
            "rid": uuid.uuid4().hex,  # all of one length, because SGLang aborts by prefix
            "input_ids": list(layout.ids),
            "cache_salt": work.salt or None,
            "stream": True,
        }
        sampling = SamplingRequest(work.sampling, self._model, limit)
        arguments |= requests.sglang_sampling_options(sampling)
        if address is not None:
            arguments |= {
                "bootstrap_host": address.host,
                "bootstrap_port": address.port,
                "bootstrap_room": address.room,
            }
        return arguments

    async def _stream(
        self, generation: Generation, layout: Layout, arguments: dict[str, Any], emit: Emit
    ) -> None:
        stream = SGLangStream(generation, layout, self._counters)
        with engine_boundary(generation.work.id, stream.translate):
            chunks = await self._processes.client.async_generate(**arguments)
            async with aclosing(chunks):
                async for chunk in chunks:
                    delta = stream.take(chunk)
                    if delta is None:
                        continue
                    if delta.prompt is not None:
                        for inputs in arguments.pop("image_data", ()):
                            requests.drop_embeddings(inputs)
                    if generation.phases != "P":
                        emit(delta)
                    if delta.finish is not None:
                        return
        raise stream.abort_error("its stream ended early")


async def _return_prepared(*, image_data: list[Any], **_rest: Any) -> Any:
    """Replaces SGLang's own preprocessing: ``scheduler_inputs`` has done all of it."""
    return image_data[0]
