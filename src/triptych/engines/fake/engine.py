"""The fake language engine: prefill takes ``ttft_ms``, and every ``step_ms`` all running streams
get their next token together, in one callback of the event loop.

Its prefix cache works like a real one: cached tokens cost no ``prefill_us_per_token``. No token
depends on it. A stream ends by ``max_tokens`` or ``stop_token_ids`` only; a scripted reply also
ends by itself (``replies``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from triptych.checkpoint import Model
from triptych.config import FakeSettings
from triptych.engines.base import (
    Allocate,
    Emit,
    EngineReport,
    Generation,
    OnKvEvents,
    PrefillOutput,
    PrefixCacheInfo,
)
from triptych.engines.checks import check_work, max_new_tokens
from triptych.engines.fake import content
from triptych.engines.fake.blocks import BlockLease, FakeBlocks
from triptych.engines.fake.replies import ReplyScript
from triptych.errors import EngineFailed, PrefixGone, UnsupportedParameter
from triptych.messages import Delta, FinishReason, PromptInfo
from triptych.transfer.base import Array

# Tokens are drawn from a hash, which these settings do not change.
IGNORED_SAMPLING = frozenset(
    {
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",  # end tokens do not end a stream
    }
)
UNBOUNDED = 256  # tokens of a stream without max_tokens, which would not end


class FakeStream:
    """One running request: its length and its next token."""

    def __init__(self, generation: Generation, emit: Emit, context: int) -> None:
        metas = tuple(media.meta for media in generation.media)
        work = generation.work
        self.sampling = work.sampling
        self.ids = list(content.expanded_prompt(work, metas))  # and the generated ones
        self.media = content.fake_media_places(work, metas)
        # Tokens; given: with those that another worker generated.
        self.prompt = self.given = len(self.ids)
        self.digest = content.prompt_digest(work, metas)
        self.position = 0  # tokens generated so far
        most = max_new_tokens(work, self.prompt, context)
        self.end = most if work.sampling.max_tokens else min(UNBOUNDED, most)  # tokens in all
        self.begun = 0.0  # when decoding began
        self.lease: BlockLease
        self.paused: asyncio.Future[bool]  # True: finished, False: preempted
        self.emit = emit
        self._task = asyncio.current_task()
        self._seed = content.stream_seed(self.digest, work.sampling)
        self._stops = work.sampling.stop_token_ids
        self._restricted = bool(work.sampling.min_tokens or work.sampling.bad_words)
        allowed = work.sampling.allowed_token_ids
        self._allowed = content.draw_table(allowed) if allowed else ()
        self._drawn: tuple[int, ...] = ()

    def next(self, table: Sequence[int]) -> tuple[int, FinishReason | None]:
        at = self.position % content.DRAW_CHUNK
        if at == 0:
            table = self._allowed or table
            self._drawn = content.draw(self._seed, self.position // content.DRAW_CHUNK, table)
        token = self._drawn[at]
        if self._restricted and self._avoided(token):
            token = next((id for id in self._allowed or table if not self._avoided(id)), token)
        self.ids.append(token)
        self.position += 1
        if token in self._stops:
            return token, "stop"
        return token, "length" if self.position >= self.end else None

    def _avoided(self, token: int) -> bool:
        """Whether ``min_tokens`` or ``bad_words`` forbid this token here."""
        if token in self._stops and self.position < self.sampling.min_tokens:
            return True
        made = (*self.ids[self.prompt :], token)
        return any(made[-len(word) :] == word for word in self.sampling.bad_words)

    def resume(self, made: Sequence[int], table: Sequence[int]) -> None:
        """Go on after these tokens, which must be those that this engine generates too."""
        if any(self.next(table)[0] != token for token in made):
            raise EngineFailed("Another worker generated other tokens for this request.")
        self.given = len(self.ids)

    @property
    def computed(self) -> int:
        """Tokens whose blocks the prefix cache may hold: all but the last, which is not computed
        yet; 0 if the media or the KV cache were stale (the first emit has cancelled the task)."""
        return 0 if self._task is not None and self._task.cancelling() else len(self.ids) - 1


class ScriptedStream(FakeStream):
    """A stream whose tokens are given."""

    def __init__(
        self, generation: Generation, emit: Emit, context: int, reply: tuple[int, ...]
    ) -> None:
        super().__init__(generation, emit, context)
        self._reply = reply
        self.end = max_new_tokens(generation.work, self.prompt, context)

    def next(self, table: Sequence[int]) -> tuple[int, FinishReason | None]:
        token = self._reply[self.position]
        self.ids.append(token)
        self.position += 1
        if token in self._stops or self.position == len(self._reply):
            return token, "stop"
        return token, "length" if self.position >= self.end else None


class FakeEngine:
    def __init__(self, model: Model, settings: FakeSettings, allocate: Allocate) -> None:
        self._ttft = settings.ttft_ms / 1e3
        self._token_seconds = settings.prefill_us_per_token / 1e6
        self._step_seconds = settings.step_ms / 1e3
        self._allocate = allocate
        self._script = ReplyScript(model, settings.replies) if settings.replies else None
        self._blocks = FakeBlocks(settings.kv_blocks, content.BLOCK_SIZE)
        self._on_kv_events: OnKvEvents = lambda events: None
        self.cache = PrefixCacheInfo(
            content.BLOCK_SIZE, settings.kv_blocks, self._listen, can_prefill_from_cache=True
        )
        self._context = min(model.context, settings.kv_blocks * content.BLOCK_SIZE)
        self._vocabulary = model.vocabulary
        self._ids = content.printable_ids(model)
        self._table = content.draw_table(self._ids)
        self._running: dict[FakeStream, None] = {}  # an ordered set
        self._prefilling = 0
        self._computing = asyncio.Lock()  # one prompt at a time
        self._computed = 0.0  # when the last one ends
        self._timer: asyncio.Handle | None = None
        self._next_step = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._tokens = 0
        self._preemptions = 0

    async def generate(self, generation: Generation, emit: Emit) -> None:
        arrived = time.perf_counter()
        work = generation.work
        check_work(generation, self._vocabulary)
        stream = self._stream(generation, emit)
        stream.resume(work.generated, self._table)
        # At least one token of a prompt is computed; a received KV cache may be cached in full.
        spare = int("P" in generation.phases)
        with self._blocks.lease(stream.ids, stream.media, work.salt, spare) as stream.lease:
            await self._blocks.reserve(stream.lease, content.blocks_of(stream.given))
            self._report_kv_events()
            if "P" in generation.phases:
                first = await self._prefill(generation, stream, arrived)
                ends = first.finish is not None
                if generation.phases == "P":
                    stream.emit(PrefillOutput(first, () if ends else (self._export(stream),)))
                else:
                    stream.emit(first)
                self._cache_blocks(stream)
                self._report_kv_events()
                if ends or generation.phases == "P":
                    return
            else:
                self._import(generation, stream)
            await self._decode(stream)

    def _stream(self, generation: Generation, emit: Emit) -> FakeStream:
        reply = None if self._script is None else self._script.find(generation.work)
        if reply is not None:
            return ScriptedStream(generation, emit, self._context, reply)
        if generation.work.sampling.grammar is not None:
            raise UnsupportedParameter(
                "Engine fake draws tokens that follow no grammar. Ask for plain text, or script "
                "the reply (--fake-replies).",
                param="response_format",
            )
        return FakeStream(generation, emit, self._context)

    async def _prefill(self, generation: Generation, stream: FakeStream, arrived: float) -> Delta:
        cached = stream.lease.found * content.BLOCK_SIZE
        for media, place in zip(generation.media, stream.media, strict=True):
            if not media.arrays and place.start + place.length > cached:
                raise PrefixGone(
                    "The prefix cache no longer holds the blocks of a media item. Try again."
                )
            if media.arrays and not _holds(media.arrays, content.embedding_bytes(media.meta)):
                raise EngineFailed("An embedding does not match its media key.")
        started = time.perf_counter()
        self._prefilling += 1
        try:
            await self._compute(stream.given - cached)
        finally:
            self._prefilling -= 1
        self._prompt_tokens += stream.given
        self._cached_tokens += cached
        self._tokens += 1
        ids = tuple(stream.ids[: stream.prompt]) if generation.work.return_prompt_ids else None
        token, finish = stream.next(self._table)
        return Delta(
            (token,),
            finish,
            content.logprobs_of(token, stream.sampling, self._ids),
            PromptInfo(
                stream.prompt,
                cached,
                ids,
                stream.media,
                content.prompt_logprobs_of(stream.ids[: stream.prompt], stream.sampling, self._ids),
            ),
            {"queue": started - arrived, "prefill": time.perf_counter() - started},
        )

    async def _compute(self, tokens: int) -> None:
        if self._ttft:
            await asyncio.sleep(self._ttft)
        if seconds := tokens * self._token_seconds:
            loop = asyncio.get_running_loop()
            asked = loop.time()
            async with self._computing:
                end = max(asked, self._computed) + seconds  # delays of the event loop do not add up
                await asyncio.sleep(end - loop.time())
                self._computed = end

    def _export(self, stream: FakeStream) -> Array:
        kv = self._allocate("uint8", (content.blocks_of(stream.given), content.BLOCK_BYTES))
        kv.buffer[:] = content.fake_kv_bytes(stream.digest, stream.given)
        return kv

    def _import(self, generation: Generation, stream: FakeStream) -> None:
        if not _holds(generation.kv, content.fake_kv_bytes(stream.digest, stream.given)):
            raise EngineFailed("The KV cache does not match this prompt and its media.")
        for token in generation.first.ids if generation.first else ():
            if stream.next(self._table)[0] != token:
                raise EngineFailed("Prefill generated another first token.")

    async def _decode(self, stream: FakeStream) -> None:
        loop = asyncio.get_running_loop()
        stream.begun = time.perf_counter()
        finished = False
        while not finished:
            stream.paused = loop.create_future()
            self._running[stream] = None
            if self._timer is None:
                self._next_step = loop.time()
                self._schedule(loop)
            try:
                finished = await stream.paused
            finally:
                self._running.pop(stream, None)
            if not finished:
                blocks = content.blocks_of(stream.prompt + stream.position)
                await self._blocks.reserve(stream.lease, blocks)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._step_seconds:
            self._timer = loop.call_soon(self._step)
            return
        # A late step is followed by a whole interval, not by a burst of steps.
        self._next_step = max(self._next_step + self._step_seconds, loop.time())
        self._timer = loop.call_at(self._next_step, self._step)

    def _step(self) -> None:
        """The next token of every running stream."""
        self._timer = None
        if not self._running:
            return
        self._schedule(asyncio.get_running_loop())
        table = self._table
        for stream in tuple(self._running):
            if stream.paused.done():  # preempted in this step, or cancelled
                continue
            length = stream.prompt + stream.position
            if length > stream.lease.size * content.BLOCK_SIZE and not self._grow(stream, length):
                continue
            token, finish = stream.next(table)
            self._tokens += 1
            if finish is None and stream.sampling.logprobs is None:
                stream.emit(Delta((token,)))
            else:
                self._emit_more(stream, token, finish)
            if length >= stream.lease.full:
                self._cache_blocks(stream)
        self._blocks.serve()
        self._report_kv_events()

    def _emit_more(self, stream: FakeStream, token: int, finish: FinishReason | None) -> None:
        """A token with logprobs, or the last one."""
        logprobs = content.logprobs_of(token, stream.sampling, self._ids)
        spent = {"decode": time.perf_counter() - stream.begun} if finish else None
        if finish:  # before the emit, which may cancel the waiting task
            del self._running[stream]
            stream.paused.set_result(True)
        stream.emit(Delta((token,), finish, logprobs, None, spent))

    def _cache_blocks(self, stream: FakeStream) -> None:
        self._blocks.cache(stream.lease, stream.computed)

    def _report_kv_events(self) -> None:
        if events := self._blocks.kv_events.drain():
            self._on_kv_events(events)

    def _listen(self, on_kv_events: OnKvEvents) -> None:
        self._on_kv_events = on_kv_events
        self._blocks.kv_events.enabled = True

    def _grow(self, stream: FakeStream, length: int) -> bool:
        """Allocate blocks for one more token; if there are none, preempt the youngest streams."""
        while not self._blocks.grow(stream.lease, content.blocks_of(length)):
            youngest = max(self._running, key=lambda other: other.lease.arrival)
            del self._running[youngest]
            self._blocks.release(youngest.lease)
            self._preemptions += 1
            if not youngest.paused.done():
                youngest.paused.set_result(False)
            if youngest is stream:
                return False
        return True

    def report(self) -> EngineReport:
        return EngineReport(
            queued=self._blocks.waiting,
            running=len(self._running) + self._prefilling,
            kv_blocks_total=self._blocks.total,
            kv_blocks_free=self._blocks.free,
            counters={
                "prompt_tokens": float(self._prompt_tokens),
                "cached_tokens": float(self._cached_tokens),
                "generated_tokens": float(self._tokens),
                "preemptions": float(self._preemptions),
            },
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._running:
            stream.paused.cancel()


def _holds(arrays: Sequence[Array], expected: bytes) -> bool:
    return len(arrays) == 1 and bytes(arrays[0].buffer) == expected
