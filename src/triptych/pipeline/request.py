"""One request on its way, and its visits to workers: what was delivered, what is open, its cost.

Which workers are visited, and in which order, is decided in ``run``.
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

Deliver = Callable[[Delta], None]


class RequestRun:
    """One request. ``kv``: what is told of its media is kept there."""

    def __init__(self, work: Work, deliver: Deliver, kv: KvRouting | None = None) -> None:
        self.work = work
        self._kv = kv
        self.chains: dict[int, PromptBlocks] = {}  # of what is prefilled, by block size
        self.hosts: list[Peer] = []  # that have it in their KV cache
        self.asked = False  # somebody, for it
        self.alone = True  # whoever decodes may be asked to prefill too
        self.resumes = True  # after a loss, whoever is asked may go on after what was delivered
        self.digests: tuple[bytes, ...] = ()  # of its media, where that may be
        self.sent = work  # as workers get it: with tickets, where media were decoded here
        self._offered: DecodedOffer | None = None
        self._unread: set[int] = set()  # media items that no encoder has answered for
        self.spent: dict[str, float] = {}
        self.tensor_bytes = 0
        self.unequal = False
        self.finished = False  # the client has all of it
        self.losses = 0  # of workers, on the way
        self.avoided: set[tuple[str, int]] = set()  # ids and epochs of those, if others are there
        self._deliver = deliver
        self._delivered: list[int] = []
        self._repeat = 0  # of these, how many are still to come again

    def offer(self, offered: DecodedOffer | None, start: float) -> None:
        if offered is not None:
            self.note({"prepare": time.monotonic() - start})
            self._offered, self._unread = offered, set(range(len(self.work.media)))
            media = tuple(item for item in offered.items if item is not None)
            self.sent = msgspec.structs.replace(self.work, media=media)

    def read(self, items: tuple[int, ...]) -> None:
        """An encoder has answered for these: once all are read, their memory goes back."""
        self._unread.difference_update(items)
        if not self._unread:
            self.take_back()

    def take_back(self) -> None:
        if self._offered is not None:
            self._offered.close()
            self._offered = None

    @property
    def made(self) -> list[int]:
        """Tokens with keys and values: the last one has none."""
        return self._delivered[:-1]

    def again(self, resumes: bool) -> None:
        """Once more: from where the client is, or (not ``resumes``) from the start, where what he
        has must come again."""
        generated = tuple(self._delivered) if resumes else ()
        self.work = msgspec.structs.replace(self.work, generated=generated)
        self.sent = msgspec.structs.replace(self.sent, generated=generated)
        self._repeat = len(self._delivered) - len(generated)
        self.spent.clear()
        self.hosts.clear()
        self.chains.clear()

    def deliver(self, delta: Delta) -> None:
        if delta.timings is not None:
            self.note(delta.timings)
        if delta.prompt is not None and self._kv is not None:
            self._kv.learned.hear(self.sent.media, delta.prompt.media)
        if self._repeat:
            delta = self._left_out(delta)
        elif delta.prompt is not None and self._delivered:  # told before
            delta = msgspec.structs.replace(delta, prompt=None)
        if (delta.ids or delta.finish) and not self.unequal:
            self._delivered += delta.ids
            self._deliver(delta)
            self.finished |= delta.finish is not None

    def _left_out(self, delta: Delta) -> Delta:
        """Without the tokens that the client has; they must be the same ones."""
        start = len(self._delivered) - self._repeat
        count = min(self._repeat, len(delta.ids))
        self.unequal |= list(delta.ids[:count]) != self._delivered[start : start + count]
        self._repeat -= count
        return msgspec.structs.replace(
            delta, ids=delta.ids[count:], logprobs=delta.logprobs[count:], prompt=None
        )

    def learn(self, items: Iterable[int], metas: Iterable[MediaMeta]) -> None:
        """What workers tell of these media items."""
        if self._kv is not None:
            for item, meta in zip(items, metas, strict=False):
                digest = self.digests[item] if self.digests else b""
                self._kv.learned.encoded(self.sent.media[item], meta, digest)

    def pass_on(self, tickets: Sequence[Ticket]) -> None:
        """Count the tensors that do not stay with the workers but travel inside their tickets."""
        self.tensor_bytes += sum(t.size for t in tickets if t.transport == "inline")

    def note(self, spent: dict[str, float]) -> None:
        for what, seconds in spent.items():
            self.spent[what] = self.spent.get(what, 0.0) + seconds


class WorkerCall:
    """A hop under way: its call, and its first answer."""

    def __init__(self, walk: RequestRun, peer: Peer, job: Job, blocks: float = 0.0) -> None:
        self.first: asyncio.Future[WorkerAnswer] = asyncio.get_running_loop().create_future()
        self._walk = walk
        self._failure: Exception | None = None
        self._items = job.items
        self._peer: Peer | None = peer
        self.call = peer.call(job, self._answer)
        walk.asked = True
        peer.load += 1
        self._blocks = blocks  # to compute before the first answer
        peer.prefilling += blocks
        if "P" in peer.record.role or "D" in peer.record.role:
            walk.hosts.append(peer)

    def _answer(self, answer: WorkerAnswer) -> None:
        try:
            if type(answer) is Delta:  # nearly all of them
                self._walk.deliver(answer)
            else:
                self._take(answer)
        except Exception as error:  # noqa: BLE001 (a bug of ours here must not cost other calls)
            self._failure = error
        if not self.first.done():
            self.first.set_result(answer)
            self._walk.read(self._items)
            self._prefilled()
        if self._failure is not None or self._walk.unequal:
            self.call.close()

    def _take(self, answer: WorkerAnswer) -> None:
        match answer:
            case Handover():
                self._walk.learn(range(len(answer.media)), answer.media)
                self._walk.pass_on(() if answer.kv is None else (answer.kv,))
                self._walk.deliver(answer.delta)
            case EncodeResult():
                self._walk.learn(self._items, [one.meta for one in answer.embeddings])
                self._walk.note(answer.timings or {})
                self._walk.pass_on([embedding.ticket for embedding in answer.embeddings])

    async def stay(self) -> None:
        """Keep the call open until the worker ends it or we leave."""
        try:
            await self.call.done()
            if self._failure is not None:
                raise self._failure
            if self._walk.unequal or not self.first.done():
                raise WorkerLost("A worker was lost and its answer can't be continued. Try again.")
        except Draining:
            if self._peer is not None:
                self._peer.drains()
            raise
        except WorkerLost:
            if self._peer is not None:  # it may be reached again before it is seen to be ending
                self._walk.avoided.add((self._peer.record.id, self._peer.record.epoch))
            raise
        finally:
            self.leave()
            self.first.cancel()

    def leave(self) -> None:
        """Close the call: whatever the worker holds for it is freed."""
        if self._peer is not None:
            self._prefilled()
            self._peer.load -= 1
            self._peer = None
            self.call.close()

    def _prefilled(self) -> None:
        if self._peer is not None:
            self._peer.prefilling -= self._blocks
            self._blocks = 0.0
