"""The fake language engine: prefill takes ``ttft_ms``, and every ``step_ms`` all running streams
get their next token together, in one callback of the event loop.

A stream ends by ``max_tokens`` or ``stop_token_ids``, never by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from triptych.config import FakeSettings
from triptych.engines.base import Emit, Empty, EngineReport, Generation, Prefilled
from triptych.engines.checks import check_work, most_tokens
from triptych.engines.fake import content
from triptych.engines.fake.pages import Lease, Pages
from triptych.errors import EngineFailed
from triptych.messages import Delta, Finish, PromptInfo
from triptych.model import Model
from triptych.transfer.base import Array

UNBOUNDED = 256  # tokens of a stream without max_tokens: nothing else would end it


class Stream:
    """One request on its way: how long it is, and which token comes next."""

    def __init__(self, generation: Generation, emit: Emit, context: int) -> None:
        self.metas = tuple(media.meta for media in generation.media)
        work = generation.work
        self.sampling = work.sampling
        self.prompt = content.prompt_length(work, self.metas)  # tokens
        self.digest = content.prompt_digest(work, self.metas)
        self.position = 0  # tokens made so far
        most = most_tokens(work, self.prompt, context)
        self.end = most if work.sampling.max_tokens else min(UNBOUNDED, most)  # tokens in all
        self.emit = emit
        self.begun = 0.0  # when decoding began
        self.lease: Lease
        self.resting: asyncio.Future[bool]  # True: finished, False: preempted
        self._seed = content.stream_seed(self.digest, work.sampling)
        self._stops = work.sampling.stop_token_ids
        self._ids: tuple[int, ...] = ()

    def next(self, table: Sequence[int]) -> tuple[int, Finish | None]:
        at = self.position % content.CHUNK
        if at == 0:
            self._ids = content.draw(self._seed, self.position // content.CHUNK, table)
        token = self._ids[at]
        self.position += 1
        if token in self._stops:
            return token, "stop"
        return token, "length" if self.position >= self.end else None


class FakeEngine:
    def __init__(self, model: Model, settings: FakeSettings, empty: Empty) -> None:
        self._ttft = settings.ttft_ms / 1e3
        self._step_seconds = settings.step_ms / 1e3
        self._empty = empty
        self._pages = Pages(settings.kv_blocks)
        self._context = min(model.context, settings.kv_blocks * content.BLOCK)
        self._vocabulary = model.vocabulary
        self._ids = content.printable_ids(model)
        self._table = content.draw_table(self._ids)
        self._running: dict[Stream, None] = {}  # an ordered set
        self._prefilling = 0
        self._timer: asyncio.Handle | None = None
        self._next_step = 0.0
        self._tokens = 0
        self._preemptions = 0

    async def generate(self, generation: Generation, emit: Emit) -> None:
        arrived = time.perf_counter()
        check_work(generation, self._vocabulary)
        stream = Stream(generation, emit, self._context)
        with self._pages.lease() as stream.lease:
            await self._pages.reserve(stream.lease, content.blocks_of(stream.prompt))
            if "P" in generation.span:
                first = await self._prefill(generation, stream, arrived)
                ends = first.finish is not None
                if generation.span == "P":
                    emit(Prefilled(first, () if ends else (self._export(stream),)))
                    return
                emit(first)
                if ends:
                    return
            else:
                self._import(generation, stream)
            await self._decode(stream)

    async def _prefill(self, generation: Generation, stream: Stream, arrived: float) -> Delta:
        for media in generation.media:
            if not _holds(media.arrays, content.embedding_bytes(media.meta)):
                raise EngineFailed("An embedding is not the one of its media key.")
        started = time.perf_counter()
        if self._ttft:
            self._prefilling += 1
            try:
                await asyncio.sleep(self._ttft)
            finally:
                self._prefilling -= 1
        token, finish = stream.next(self._table)
        self._tokens += 1
        wanted = generation.work.return_prompt_ids
        ids = content.expanded_prompt(generation.work, stream.metas) if wanted else None
        return Delta(
            (token,),
            finish,
            content.logprobs_of(token, stream.sampling, self._ids),
            PromptInfo(stream.prompt, 0, ids),
            {"queue": started - arrived, "prefill": time.perf_counter() - started},
        )

    def _export(self, stream: Stream) -> Array:
        kv = self._empty("uint8", (content.blocks_of(stream.prompt), content.BLOCK_BYTES))
        kv.buffer[:] = content.kv_bytes(stream.digest, stream.prompt)
        return kv

    def _import(self, generation: Generation, stream: Stream) -> None:
        if not _holds(generation.kv, content.kv_bytes(stream.digest, stream.prompt)):
            raise EngineFailed("The KV cache is not the one of this prompt and its media.")
        for token in generation.first.ids if generation.first else ():
            if stream.next(self._table)[0] != token:
                raise EngineFailed("Prefill began this stream with another token.")

    async def _decode(self, stream: Stream) -> None:
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
            if length > stream.lease.held * content.BLOCK and not self._grow(stream, length):
                continue
            token, finish = stream.next(table)
            self._tokens += 1
            if finish is None and stream.sampling.logprobs is None:
                stream.emit(Delta((token,)))
                continue
            logprobs = content.logprobs_of(token, stream.sampling, self._ids)
            spent = {"decode": time.perf_counter() - stream.begun} if finish else None
            if finish:  # before the emit, which may cancel whoever waits for it
                del self._running[stream]
                stream.resting.set_result(True)
            stream.emit(Delta((token,), finish, logprobs, None, spent))
        self._pages.serve()

    def _grow(self, stream: Stream, length: int) -> bool:
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
