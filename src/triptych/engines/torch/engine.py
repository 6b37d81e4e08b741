"""The torch engine: continuous batching of one language model.

``generate`` checks a generation on the event loop, hands it to the step loop and waits. Deltas come
back to the event loop in one call per step. The event loop sees this module only.

Phase D emits an empty delta as soon as prefill's KV cache is copied into its own blocks, so that
the prefill worker can free it before the next token exists.

Embeddings and KV caches may lie in memory of another worker, which may reclaim it while we read.
The caller finds out at the first emit, and then cancels its own task inside ``emit``. Only after
that can other requests find blocks made from such memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from triptych.checkpoint import Model
from triptych.config import Limits, TorchSettings
from triptych.engines.base import (
    Allocate,
    Emit,
    EngineReport,
    Generation,
    OnKvEvents,
    PrefillOutput,
    PrefixCacheInfo,
)
from triptych.engines.block_pool import BlockPool, KvEventLog
from triptych.engines.torch import memory
from triptych.engines.torch.grammar import GrammarCompiler
from triptych.engines.torch.kv_cache import PagedKVCache
from triptych.engines.torch.masks import TokenMasker
from triptych.engines.torch.runner import Runner
from triptych.engines.torch.sampler import Sampler
from triptych.engines.torch.scheduler import Scheduler
from triptych.engines.torch.sequence import LayoutFunction, Sequence, SequenceLimits, make_sequence
from triptych.engines.torch.step_loop import StepLoop, StepOutcome
from triptych.errors import EngineFailed, TriptychError
from triptych.messages import Delta
from triptych.models.family import LanguageModel
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import Array

log = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 4096  # tokens of a prompt that is prepared off the event loop
STEP_END_SECONDS = 10.0  # time for the step under way when the engine is closed


def _exit() -> None:
    os._exit(70)


class TorchEngine:
    """The Engine protocol. ``fatal`` is called when only a new process can help."""

    def __init__(
        self,
        language: LanguageModel,
        lay_out: LayoutFunction,
        model: Model,
        settings: TorchSettings,
        empty: Allocate,
        fatal: Callable[[], None] = _exit,
        *,
        grammar_seconds: float = Limits().grammar_seconds,
    ) -> None:
        self._kv_cache = _make_kv_cache(language, settings)
        blocks, size = self._kv_cache.blocks, self._kv_cache.block_size
        self._kv_events = KvEventLog(size)
        self._receive: OnKvEvents = lambda events: None
        self._pool = BlockPool(
            blocks, caching=settings.prefix_cache, on_removed=self._kv_events.record_removed
        )
        cache = PrefixCacheInfo(size, blocks, self._listen, can_prefill_from_cache=True)
        self.cache = cache if settings.prefix_cache else None
        context = min(model.context, blocks * size)
        if context < model.context:
            log.warning(
                "the KV cache limits requests to %d tokens, the model allows %d: raise "
                "--torch-kv-blocks or --kv-cache-bytes",
                context,
                model.context,
            )
        vocabulary = min(language.head.out_features, language.embed.num_embeddings)
        width = language.hidden * (1 + language.deepstack)
        self._limits = SequenceLimits(context, vocabulary, width, size, self._kv_cache.shape)
        self._scheduler = Scheduler(
            self._pool, self._kv_cache, settings, -(-context // size), self._kv_events
        )
        self._lay_out = lay_out
        self._empty = empty
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exporter = ThreadPoolExecutor(1, "triptych-export")
        ends, device = frozenset(model.end_ids), self._kv_cache.device
        self._masker = TokenMasker(language.head.out_features)
        self._grammars = GrammarCompiler(model, grammar_seconds)
        self._steps = StepLoop(
            self._scheduler,
            Runner(language, self._kv_cache, self._scheduler.table),
            Sampler(settings.max_running, language.head.out_features, device, ends),
            self._masker,
            ends,
            self._post,
            fatal,
        )

    async def generate(self, generation: Generation, emit: Emit) -> None:
        self._loop = asyncio.get_running_loop()
        sequence = await self._prepare(generation, emit)
        self._steps.add(sequence)
        try:
            await asyncio.shield(sequence.done)
            if sequence.handover is not None:
                kv = await self._export(sequence)
                self._emit(sequence, PrefillOutput(sequence.handover, kv))
        except asyncio.CancelledError:
            sequence.cancelled = True
            self._steps.cancel(sequence)
            # From here on nothing reads its media and KV any more.
            await wait_until_done(sequence.done)
            raise
        finally:
            if sequence.handover is not None or sequence.borrowed:
                self._steps.release(sequence)

    def report(self) -> EngineReport:
        return EngineReport(
            queued=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            kv_blocks_total=self._pool.total,
            kv_blocks_free=self._pool.free,
            counters=self._steps.counters | {"preemptions": float(self._scheduler.preemptions)},
        )

    def close(self) -> None:
        """Stop; running generations fail."""
        self._steps.close(STEP_END_SECONDS)
        self._masker.close()
        self._grammars.close()
        self._exporter.shutdown(wait=False)

    async def _prepare(self, generation: Generation, emit: Emit) -> Sequence:
        if not self._steps.alive:
            raise EngineFailed("the engine is closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.current_task()
        assert task is not None
        work = generation.work
        matcher = None
        if work.sampling.grammar is not None:
            matcher = await self._grammars.matcher(work.sampling, work.salt)
        arguments = (generation, emit, done, task, self._lay_out, self._limits, matcher)
        length = (
            len(work.prompt) + len(work.generated) + sum(m.meta.tokens for m in generation.media)
        )
        if length < LONG_PROMPT_TOKENS:  # a thread would cost more than it saves
            return make_sequence(*arguments)
        return await asyncio.to_thread(make_sequence, *arguments)

    async def _export(self, sequence: Sequence) -> tuple[Array, ...]:
        """The KV cache of the prompt, in memory that can be sent without another copy.

        Allocated and filled in a thread beside the step loop, since the kernel clears every page of
        new memory. No step writes to the blocks of a complete prompt.
        """
        loop = asyncio.get_running_loop()
        copied = loop.run_in_executor(self._exporter, self._copy, sequence.blocks)
        try:
            return (await asyncio.shield(copied),)
        finally:
            await wait_until_done(copied)  # until then the blocks must not change

    def _copy(self, blocks: list[int]) -> Array:
        array = self._empty(DTYPE_NAMES[self._kv_cache.kv.dtype], self._kv_cache.shape(len(blocks)))
        self._kv_cache.save(blocks, tensor_view(array))
        return array

    def _post(self, outcomes: list[StepOutcome]) -> None:
        """From the step loop to the event loop."""
        events = self._kv_events.drain()
        if self._loop is None or self._loop.is_closed():
            return
        if outcomes:
            self._loop.call_soon_threadsafe(self._deliver, outcomes)
        if events:
            self._loop.call_soon_threadsafe(self._receive, events)

    def _listen(self, receive: OnKvEvents) -> None:
        self._receive = receive
        self._kv_events.enabled = True

    def _deliver(self, outcomes: Iterable[StepOutcome]) -> None:
        left = iter(outcomes)
        try:
            for sequence, outcome in left:
                if not sequence.done.done():
                    self._give(sequence, outcome)
        finally:
            if rest := list(left):  # an emit raised: deliver to the others
                self._deliver(rest)

    def _give(self, sequence: Sequence, outcome: Delta | TriptychError | None) -> None:
        """Pass an outcome to the caller of ``generate``."""
        if isinstance(outcome, TriptychError):
            sequence.done.set_exception(outcome)
            return
        if outcome is None or outcome.finish is not None or sequence.phases == "P":
            sequence.done.set_result(None)  # the waiting task resumes after this call
        if outcome is None or sequence.cancelled:
            return
        if sequence.phases != "P":
            self._emit(sequence, outcome)
        elif outcome.finish is not None:
            self._emit(sequence, PrefillOutput(outcome, ()))
        else:
            sequence.handover = outcome

    def _emit(self, sequence: Sequence, answer: Delta | PrefillOutput) -> None:
        sequence.emit(answer)
        if not sequence.emitted and sequence.borrowed and not sequence.task.cancelling():
            self._steps.trust(sequence)
        sequence.emitted = True


def _make_kv_cache(language: LanguageModel, settings: TorchSettings) -> PagedKVCache:
    """As many blocks as the settings ask for, or as fit in the default memory of a CPU."""
    weight = language.embed.weight
    return PagedKVCache(
        settings.kv_blocks or memory.count_blocks(memory.CPU_KV_BYTES, language, settings),
        settings.block_size,
        layers=language.layers,
        kv_heads=language.kv_heads,
        head_dim=language.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
