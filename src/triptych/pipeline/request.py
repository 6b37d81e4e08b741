"""The state of one request while it runs, and its calls to workers.

``RequestRun`` holds what was delivered and what retries must know; ``WorkerCall`` is one hop under
way. ``run`` decides which workers are called, and in which order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from triptych.errors import Draining, WorkerLost
from triptych.messages import (
    Delta,
    EncodeResult,
    Handover,
    Job,
    MediaMeta,
    Ticket,
    Work,
    WorkerAnswer,
)
from triptych.pipeline.decoding import DecodedOffer
from triptych.pipeline.kv.prompt_blocks import PromptBlocks
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Peer
from triptych.runtime.concurrency import Pausable

Deliver = Callable[[Delta], None]


class Backpressure:
    """Lets a slow reader of tokens pause the call that feeds it, whichever call that is by then."""

    def __init__(self) -> None:
        self._paused = False
        self._source: Pausable | None = None

    def attach(self, source: Pausable) -> None:
        self._source = source
        if self._paused:
            source.pause()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            if self._source is not None:
                self._source.pause()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._source is not None:
                self._source.resume()


class RequestRun:
    """One request from its first call to its last token, over all retries."""

    def __init__(self, work: Work, deliver: Deliver, kv: KvRouting | None = None) -> None:
        self.work = work
        self.sent = work  # as workers get it: with tickets where the frontend decoded the media
        self.timings: dict[str, float] = {}  # seconds by stage
        self.tensor_bytes = 0
        self.called = False  # any worker, for this request
        self.finished = False  # the client has all tokens
        self.diverged = False  # a retry generated other tokens than those delivered
        self.losses = 0  # workers that were lost while they worked for it
        self.avoided: set[tuple[str, int]] = set()  # ids and epochs of these
        self.may_use_cache = True  # a decode worker may be asked to prefill from its cache
        self.may_resume = True  # a retry may continue after what was delivered
        self.blocks: dict[
            int, PromptBlocks
        ] = {}  # of the prompt, by block size, where routing is kv
        self.media_digests: tuple[bytes, ...] = ()  # of all bytes of each item, where needed
        self.kv_holders: list[Peer] = []  # workers that have its KV cache
        self._kv = kv
        self._deliver = deliver
        self._delivered: list[int] = []
        self._repeated = 0  # delivered tokens that the current attempt has still to repeat
        self._decoded: DecodedOffer | None = None
        self._unencoded: set[int] = set()  # media items that no encoder has answered for

    @property
    def cached_tokens(self) -> list[int]:
        """Generated tokens that have keys and values: the last one has none."""
        return self._delivered[:-1]

    def use_decoded(self, offer: DecodedOffer, start: float) -> None:
        """Send tickets for decoded media instead of their files."""
        self.add_timings({"prepare": time.monotonic() - start})
        self._decoded, self._unencoded = offer, set(range(len(self.work.media)))
        media = tuple(item for item in offer.items if item is not None)
        self.sent = msgspec.structs.replace(self.work, media=media)

    def mark_encoded(self, items: tuple[int, ...]) -> None:
        """An encoder has answered for these items. After the last one the tickets are released."""
        self._unencoded.difference_update(items)
        if not self._unencoded:
            self.release_decoded()

    def release_decoded(self) -> None:
        if self._decoded is not None:
            self._decoded.close()
            self._decoded = None

    def retry(self, resume: bool) -> None:
        """Prepare another attempt: after what was delivered, or (not ``resume``) from the start,
        which must then repeat what was delivered."""
        generated = tuple(self._delivered) if resume else ()
        self.work = msgspec.structs.replace(self.work, generated=generated)
        self.sent = msgspec.structs.replace(self.sent, generated=generated)
        self._repeated = len(self._delivered) - len(generated)
        self.timings.clear()
        self.kv_holders.clear()
        self.blocks.clear()

    def deliver(self, delta: Delta) -> None:
        if delta.timings is not None:
            self.add_timings(delta.timings)
        if delta.prompt is not None and self._kv is not None:
            self._kv.layouts.add_spans(self.sent.media, delta.prompt.media)
        if self._repeated:
            delta = self._without_repeated(delta)
        elif delta.prompt is not None and self._delivered:  # an earlier attempt delivered it
            delta = msgspec.structs.replace(delta, prompt=None)
        if (delta.ids or delta.finish) and not self.diverged:
            self._delivered += delta.ids
            self._deliver(delta)
            self.finished |= delta.finish is not None

    def _without_repeated(self, delta: Delta) -> Delta:
        """The delta without tokens that the client has; these must be the same again."""
        start = len(self._delivered) - self._repeated
        count = min(self._repeated, len(delta.ids))
        self.diverged |= list(delta.ids[:count]) != self._delivered[start : start + count]
        self._repeated -= count
        return msgspec.structs.replace(
            delta, ids=delta.ids[count:], logprobs=delta.logprobs[count:], prompt=None
        )

    def learn_media(self, items: Iterable[int], metas: Iterable[MediaMeta]) -> None:
        """Remember what workers report of these media items, for kv routing."""
        if self._kv is not None:
            for item, meta in zip(items, metas, strict=False):
                digest = self.media_digests[item] if self.media_digests else b""
                self._kv.layouts.add_meta(self.sent.media[item], meta, digest)

    def count_inline(self, tickets: Sequence[Ticket]) -> None:
        """Count tensor bytes that pass through the frontend, inside tickets."""
        self.tensor_bytes += sum(t.size for t in tickets if t.transport == "inline")

    def add_timings(self, timings: dict[str, float]) -> None:
        for stage, seconds in timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds


class WorkerCall:
    """One hop under way: the open call to a worker, and its first answer.

    ``blocks``: KV blocks that the worker computes before the first answer.
    """

    def __init__(self, run: RequestRun, peer: Peer, job: Job, blocks: float = 0.0) -> None:
        self.first_answer: asyncio.Future[WorkerAnswer] = peer.loop.create_future()
        self._run = run
        self._failure: Exception | None = None
        self._items = job.items
        self._peer: Peer | None = peer
        self.call = peer.call(job, self._on_answer)
        run.called = True
        peer.load += 1
        self._blocks = blocks
        peer.prefilling += blocks
        if "P" in peer.record.role or "D" in peer.record.role:
            run.kv_holders.append(peer)

    def _on_answer(self, answer: WorkerAnswer) -> None:
        try:
            if type(answer) is Delta:  # nearly all of them
                self._run.deliver(answer)
            else:
                self._handle(answer)
        except Exception as error:  # noqa: BLE001 (a bug of ours here must not cost other calls)
            self._failure = error
        if not self.first_answer.done():
            self.first_answer.set_result(answer)
            self._run.mark_encoded(self._items)
            self._end_prefill()
        if self._failure is not None or self._run.diverged:
            self.call.close()

    def _handle(self, answer: WorkerAnswer) -> None:
        match answer:
            case Handover():
                self._run.learn_media(range(len(answer.media)), answer.media)
                self._run.count_inline(() if answer.kv is None else (answer.kv,))
                self._run.deliver(answer.delta)
            case EncodeResult():
                self._run.learn_media(self._items, [one.meta for one in answer.embeddings])
                self._run.add_timings(answer.timings or {})
                self._run.count_inline([embedding.ticket for embedding in answer.embeddings])

    async def wait(self) -> None:
        """Keep the call open until the worker ends it or ``close`` is called."""
        try:
            await self.call.done()
            if self._failure is not None:
                raise self._failure
            if self._run.diverged or not self.first_answer.done():
                raise WorkerLost("A worker was lost and its answer can't be continued. Try again.")
        except Draining:
            if self._peer is not None:
                self._peer.mark_draining()
            raise
        except WorkerLost:
            if self._peer is not None:  # it may be reachable again before discovery shows its end
                self._run.avoided.add((self._peer.record.id, self._peer.record.epoch))
            raise
        finally:
            self.close()
            self.first_answer.cancel()

    def close(self) -> None:
        """Close the call, which frees what the worker holds for it. May be called again."""
        if self._peer is not None:
            self._end_prefill()
            self._peer.load -= 1
            self._peer = None
            self.call.close()

    def _end_prefill(self) -> None:
        if self._peer is not None:
            self._peer.prefilling -= self._blocks
            self._blocks = 0.0
