"""The fake language engine: prefill takes ``ttft_ms``, and every ``step_ms`` all running streams
get their next token together, in one callback of the event loop.

Its prefix cache works as a real one's: what is found in it costs no ``prefill_us_per_token``. No
token depends on it. A stream ends by ``max_tokens`` or ``stop_token_ids``, never by itself.
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
from triptych.engines.fake.pages import BlockLease, FakeBlocks
from triptych.errors import EngineFailed, PrefixEvicted
from triptych.messages import Delta, FinishReason, PromptInfo
from triptych.transfer.base import Array

UNBOUNDED = 256  # tokens of a stream without max_tokens: nothing else would end it


class FakeStream:
    """One request on its way: how long it is, and which token comes next."""

    def __init__(self, generation: Generation, emit: Emit, context: int) -> None:
        metas = tuple(media.meta for media in generation.media)
        work = generation.work
        self.sampling = work.sampling
        self.ids = list(content.expanded_prompt(work, metas))  # and what was made
        self.media = content.fake_media_places(work, metas)
        self.prompt = self.given = len(self.ids)  # tokens, and with those made elsewhere before
        self.digest = content.prompt_digest(work, metas)
        self.position = 0  # tokens made so far
        most = max_new_tokens(work, self.prompt, context)
        self.end = most if work.sampling.max_tokens else min(UNBOUNDED, most)  # tokens in all
        self.begun = 0.0  # when decoding began
        self.lease: BlockLease
        self.resting: asyncio.Future[bool]  # True: finished, False: preempted
        self.emit = emit
        self._task = asyncio.current_task()
        self._seed = content.stream_seed(self.digest, work.sampling)
        self._stops = work.sampling.stop_token_ids
        self._drawn: tuple[int, ...] = ()

    def next(self, table: Sequence[int]) -> tuple[int, FinishReason | None]:
        at = self.position % content.DRAW_CHUNK
        if at == 0:
            self._drawn = content.draw(self._seed, self.position // content.DRAW_CHUNK, table)
        token = self._drawn[at]
        self.ids.append(token)
        self.position += 1
        if token in self._stops:
            return token, "stop"
        return token, "length" if self.position >= self.end else None

    def resume(self, made: Sequence[int], table: Sequence[int]) -> None:
        """Go on after these, which must be the ones that come here too."""
        if any(self.next(table)[0] != token for token in made):
            raise EngineFailed("Another worker began this stream with other tokens.")
        self.given = len(self.ids)

    @property
    def computed(self) -> int:
        """Tokens whose blocks others may find: of the last one nothing is computed yet, and of one
        whose media or KV cache were stale (its first emit has cancelled it), nothing."""
        return 0 if self._task is not None and self._task.cancelling() else len(self.ids) - 1


class FakeEngine:
    def __init__(self, model: Model, settings: FakeSettings, empty: Allocate) -> None:
        self._ttft = settings.ttft_ms / 1e3
        self._token_seconds = settings.prefill_us_per_token / 1e6
        self._step_seconds = settings.step_ms / 1e3
        self._empty = empty
        self._pages = FakeBlocks(settings.kv_blocks, content.BLOCK_SIZE)
        self._receive: OnKvEvents = lambda events: None
        self.cache = PrefixCacheInfo(
            content.BLOCK_SIZE, settings.kv_blocks, self._listen, can_prefill_from_cache=True
        )
        self._context = min(model.context, settings.kv_blocks * content.BLOCK_SIZE)
        self._vocabulary = model.vocabulary
        self._ids = content.printable_ids(model)
        self._table = content.draw_table(self._ids)
        self._running: dict[FakeStream, None] = {}  # an ordered set
        self._prefilling = 0
        self._computing = asyncio.Lock()  # one prompt at a time,
        self._computed = 0.0  # the last one by then
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
        stream = FakeStream(generation, emit, self._context)
        stream.resume(work.generated, self._table)
        # A prompt leaves one token to compute; a KV cache that comes along may be known in full.
        spare = int("P" in generation.span)
        with self._pages.lease(stream.ids, stream.media, work.salt, spare) as stream.lease:
            await self._pages.reserve(stream.lease, content.blocks_of(stream.given))
            self._tell()
            if "P" in generation.span:
                first = await self._prefill(generation, stream, arrived)
                ends = first.finish is not None
                if generation.span == "P":
                    stream.emit(PrefillOutput(first, () if ends else (self._export(stream),)))
                else:
                    stream.emit(first)
                self._keep(stream)
                self._tell()
                if ends or generation.span == "P":
                    return
            else:
                self._import(generation, stream)
            await self._decode(stream)

    async def _prefill(self, generation: Generation, stream: FakeStream, arrived: float) -> Delta:
        cached = stream.lease.found * content.BLOCK_SIZE
        for media, place in zip(generation.media, stream.media, strict=True):
            if not media.arrays and place.start + place.length > cached:
                raise PrefixEvicted(
                    "What stands for an item is not in the cache any more. Try again."
                )
            if media.arrays and not _holds(media.arrays, content.embedding_bytes(media.meta)):
                raise EngineFailed("An embedding is not the one of its media key.")
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
            PromptInfo(stream.prompt, cached, ids, stream.media),
            {"queue": started - arrived, "prefill": time.perf_counter() - started},
        )

    async def _compute(self, tokens: int) -> None:
        if self._ttft:
            await asyncio.sleep(self._ttft)
        if seconds := tokens * self._token_seconds:
            loop = asyncio.get_running_loop()
            asked = loop.time()
            async with self._computing:
                end = max(asked, self._computed) + seconds  # that a loop is late does not add up
                await asyncio.sleep(end - loop.time())
                self._computed = end

    def _export(self, stream: FakeStream) -> Array:
        kv = self._empty("uint8", (content.blocks_of(stream.given), content.BLOCK_BYTES))
        kv.buffer[:] = content.fake_kv_bytes(stream.digest, stream.given)
        return kv

    def _import(self, generation: Generation, stream: FakeStream) -> None:
        if not _holds(generation.kv, content.fake_kv_bytes(stream.digest, stream.given)):
            raise EngineFailed("The KV cache is not the one of this prompt and its media.")
        for token in generation.first.ids if generation.first else ():
            if stream.next(self._table)[0] != token:
                raise EngineFailed("Prefill began this stream with another token.")

    async def _decode(self, stream: FakeStream) -> None:
        loop = asyncio.get_running_loop()
        stream.begun = time.perf_counter()
        finished = False
        while not finished:
            stream.resting = loop.create_future()
            self._running[stream] = None
            if self._timer is None:
                self._next_step = loop.time()
                self._schedule(loop)
            try:
                finished = await stream.resting
            finally:
                self._running.pop(stream, None)
            if not finished:
                blocks = content.blocks_of(stream.prompt + stream.position)
                await self._pages.reserve(stream.lease, blocks)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._step_seconds:
            self._timer = loop.call_soon(self._step)
            return
        # A late step is not made up for by a burst: no engine is faster than its steps.
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
            if stream.resting.done():  # preempted by an older one in this step, or cancelled
                continue
            length = stream.prompt + stream.position
            if length > stream.lease.held * content.BLOCK_SIZE and not self._grow(stream, length):
                continue
            token, finish = stream.next(table)
            self._tokens += 1
            if finish is None and stream.sampling.logprobs is None:
                stream.emit(Delta((token,)))
            else:
                self._emit_more(stream, token, finish)
            if length >= stream.lease.full:
                self._keep(stream)
        self._pages.serve()
        self._tell()

    def _emit_more(self, stream: FakeStream, token: int, finish: FinishReason | None) -> None:
        """A token with logprobs, or the last one."""
        logprobs = content.logprobs_of(token, stream.sampling, self._ids)
        spent = {"decode": time.perf_counter() - stream.begun} if finish else None
        if finish:  # before the emit, which may cancel whoever waits for it
            del self._running[stream]
            stream.resting.set_result(True)
        stream.emit(Delta((token,), finish, logprobs, None, spent))

    def _keep(self, stream: FakeStream) -> None:
        self._pages.keep(stream.lease, stream.computed)

    def _tell(self) -> None:
        if events := self._pages.kv_events.drain():
            self._receive(events)

    def _listen(self, receive: OnKvEvents) -> None:
        self._receive = receive
        self._pages.kv_events.enabled = True

    def _grow(self, stream: FakeStream, length: int) -> bool:
        """Blocks for one token more; when there are none, the youngest streams make room."""
        while not self._pages.grow(stream.lease, content.blocks_of(length)):
            youngest = max(self._running, key=lambda other: other.lease.arrival)
            del self._running[youngest]
            self._pages.give_back(youngest.lease)
            self._preemptions += 1
            if not youngest.resting.done():
                youngest.resting.set_result(False)
            if youngest is stream:
                return False
        return True

    def report(self) -> EngineReport:
        return EngineReport(
            queued=self._pages.waiting,
            running=len(self._running) + self._prefilling,
            kv_blocks_total=self._pages.total,
            kv_blocks_free=self._pages.free,
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
            stream.resting.cancel()


def _holds(arrays: Sequence[Array], expected: bytes) -> bool:
    return len(arrays) == 1 and bytes(arrays[0].buffer) == expected
