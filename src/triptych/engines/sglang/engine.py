"""The Engine protocol over SGLang: one generation is one request to it.

Prefill and decode of one request are two requests, to two engines, in flight together: prefill
gives a note of its place at once, and goes on; SGLang moves the KV cache from one to the other, and
with it the first token. So all tokens are decode's to emit.

An embedding is copied and an empty delta is emitted before SGLang sees it: whoever finds then that
the embedding was stale cancels, and nothing was made of it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections import Counter
from contextlib import aclosing
from typing import Any

import msgspec
import torch

from triptych.checkpoint import Model
from triptych.engines.adapter import notes
from triptych.engines.adapter.threads import in_thread
from triptych.engines.base import Allocate, Emit, EngineReport, Generation, PrefillOutput
from triptych.engines.checks import check_embedding, check_work, max_new_tokens
from triptych.engines.sglang import handover, inputs
from triptych.engines.sglang.chunks import SGLangStream
from triptych.engines.sglang.handover import BootstrapAddress
from triptych.engines.sglang.running import SGLangProcesses
from triptych.engines.sglang.sampling import sglang_sampling_options
from triptych.errors import EngineFailed, InvalidValue, TriptychError
from triptych.messages import Delta
from triptych.models.family import Family
from triptych.models.layouts import Layout, locate_media
from triptych.transfer.base import LOOP_COPY_BYTES

log = logging.getLogger(__name__)
LONG_PROMPT = 4096  # tokens of a prompt that is prepared off the event loop


class SGLangEngine:
    """``place``: host and port where this engine's prefill is met, of role P.

    ``apart``: whether it prefills or decodes only.
    """

    def __init__(
        self,
        running: SGLangProcesses,
        family: Family,
        model: Model,
        dtype: torch.dtype,
        empty: Allocate,
        place: tuple[str, int] | None,
        apart: bool,
    ) -> None:
        self._running = running
        self._family = family
        self._model = model
        self._dtype = dtype
        self._empty = empty
        self._place = place
        self._apart = apart
        self._counters: Counter[str] = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0)
        running.manager.mm_processor.process_mm_data_async = _as_given

    async def generate(self, generation: Generation, emit: Emit) -> None:
        self._check(generation)
        layout = await self._lay_out(generation)
        limit = self._limit(generation, layout)
        async with self._running.call():
            embeddings = await self._own(generation)
            place = self._meeting(generation)
            if generation.span == "P":
                assert place is not None
                note = notes.write_note(self._empty, msgspec.structs.asdict(place))
                emit(PrefillOutput(Delta(()), (note,)))
            elif any(embedding is not None for embedding in embeddings):
                emit(Delta(()))
            await asyncio.sleep(0)  # a caller that finds something stale has cancelled by now
            asked = self._asked(generation, layout, limit, place)
            if generation.media:
                asked["image_data"] = [await self._ready(generation, layout, embeddings)]
            await self._stream(generation, layout, asked, emit)

    def report(self) -> EngineReport:
        manager = self._running.manager
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

    def _check(self, generation: Generation) -> None:
        """Refuse what SGLang would refuse later and less clearly, or die of."""
        check_work(generation, self._model.vocabulary)
        for item in generation.media if "P" in generation.span else ():
            check_embedding(item, self._family.width)

    async def _lay_out(self, generation: Generation) -> Layout:
        work, metas = generation.work, [item.meta for item in generation.media]
        places = [item.at for item in work.media]
        lay_out = functools.partial(self._family.layout, work.prompt, places, metas)
        length = len(work.prompt) + sum(meta.tokens for meta in metas)
        # A thread would cost more than it saves where there is little to do.
        return lay_out() if length < LONG_PROMPT else await in_thread(lay_out)

    def _limit(self, generation: Generation, layout: Layout) -> int:
        """The most tokens to generate."""
        context = min(self._model.context, self._running.manager.max_req_input_len)
        return max_new_tokens(generation.work, len(layout.ids), context)

    async def _own(self, generation: Generation) -> list[torch.Tensor | None]:
        media = generation.media if "P" in generation.span else ()
        size = sum(array.buffer.nbytes for item in media for array in item.arrays)
        if not media:
            return [None] * len(generation.media)
        own = functools.partial(inputs.copy_embeddings, media, self._dtype)
        return own() if size <= LOOP_COPY_BYTES else await in_thread(own)

    async def _ready(
        self, generation: Generation, layout: Layout, embeddings: list[torch.Tensor | None]
    ) -> Any:
        processor = self._running.manager.mm_processor
        make = functools.partial(
            inputs.scheduler_inputs, generation, layout, self._family, embeddings, processor
        )
        return make() if len(layout.ids) < LONG_PROMPT else await in_thread(make)

    def _meeting(self, generation: Generation) -> BootstrapAddress | None:
        """Where prefill and decode of this request meet; None: they are one."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        match generation.span:
            case "P":
                if self._place is None:
                    raise EngineFailed("an engine of another role was asked to prefill")
                return handover.new_bootstrap_address(*self._place)
            case "D":
                return handover.read_bootstrap_address(generation.kv, FAKE_BOOTSTRAP_HOST)
        if not self._apart:
            return None
        # What shows that half an engine works: SGLang goes through the motions without the other.
        return handover.new_bootstrap_address(FAKE_BOOTSTRAP_HOST, 0)

    def _asked(
        self, generation: Generation, layout: Layout, limit: int, place: BootstrapAddress | None
    ) -> dict[str, Any]:
        work = generation.work
        asked: dict[str, Any] = {
            "rid": uuid.uuid4().hex,  # all of one length: SGLang aborts by prefix
            "input_ids": list(layout.ids),
            "sampling_params": sglang_sampling_options(work.sampling, self._model.end_ids, limit),
            "cache_salt": work.salt or None,
            "return_logprob": work.sampling.logprobs is not None,
            "top_logprobs_num": work.sampling.logprobs or 0,
            "stream": True,
        }
        if place is not None:
            asked |= {
                "bootstrap_host": place.host,
                "bootstrap_port": place.port,
                "bootstrap_room": place.room,
            }
        return asked

    async def _stream(
        self, generation: Generation, layout: Layout, asked: dict[str, Any], emit: Emit
    ) -> None:
        work, span = generation.work, generation.span
        places = locate_media(layout, work, [item.meta for item in generation.media])
        chunks = SGLangStream(work.sampling, layout.ids, work.return_prompt_ids, span, places)
        try:
            async with aclosing(await self._running.client.async_generate(**asked)) as stream:
                async for chunk in stream:
                    delta = chunks.delta(chunk)
                    if delta is None:
                        continue
                    if delta.prompt is not None:
                        for ready in asked.pop("image_data", ()):
                            inputs.drop_embeddings(ready)
                    self._count(delta)
                    if span != "P":
                        emit(delta)
                    if delta.finish is not None:
                        return
        except TriptychError:
            raise
        except ValueError as error:  # as SGLang refuses what a request asks for
            raise InvalidValue(f"SGLang refuses the request: {error}") from error
        except Exception as error:  # the engine's edge: SGLang raises whatever it likes
            log.exception("a request failed in SGLang")
            why, status = getattr(error, "detail", "") or error, getattr(error, "status_code", None)
            raise chunks.fault(str(why), status) from error
        raise chunks.fault("its stream ended early")

    def _count(self, delta: Delta) -> None:
        self._counters["generated_tokens"] += len(delta.ids)
        if delta.prompt is not None:
            self._counters["prompt_tokens"] += delta.prompt.tokens
            self._counters["cached_tokens"] += delta.prompt.cached


async def _as_given(*, image_data: list[Any], **_rest: Any) -> Any:
    """In place of SGLang's own preprocessing: all of it is done."""
    return image_data[0]
