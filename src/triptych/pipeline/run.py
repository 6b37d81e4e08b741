"""The corridor: one request walks its plan, from worker to worker, tickets in hand.

Plan, choose a worker, call it, pass on what it handed over, stream. Tensors never come here.
A hop's call stays open for as long as its ticket is needed: the first answer of the next step
closes it, and closing a call is what frees the worker's memory, whatever the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from triptych.errors import Draining, TicketLost, WorkerLost, first_error
from triptych.messages import (
    Answer,
    Delta,
    Describe,
    Embedding,
    Encoded,
    Handover,
    Job,
    Ticket,
    Work,
    WorkerReport,
)
from triptych.pipeline.decoding import Decoding, Offered
from triptych.pipeline.flow import Flow
from triptych.pipeline.membership import Membership, Peer
from triptych.pipeline.plan import Hop, Step, plan
from triptych.runtime.discovery import Standing
from triptych.topology import Topology

Deliver = Callable[[Delta], None]
DESCRIBE_SECONDS = 2.0
PASSING = (WorkerLost, TicketLost, Draining)  # faults of a place, not of the request


class Carried(Struct, frozen=True):
    """What the steps so far have handed over."""

    embeddings: tuple[Embedding, ...] = ()
    handover: Handover | None = None

    @property
    def ended(self) -> bool:
        return self.handover is not None and self.handover.kv is None

    def after(self, answers: Sequence[Answer]) -> Carried:
        match answers[0]:
            case Encoded():
                encoded = (a.embeddings for a in answers if isinstance(a, Encoded))
                return Carried(tuple(e for embeddings in encoded for e in embeddings))
            case Handover() as handover:
                return Carried((), handover)
        return self


class Pipeline:
    """``decoding``: where media are decoded here, and not where they are encoded.

    ``migrations``: how often a request goes on elsewhere after it has lost a worker. One by
    default: a request that has cost two workers their life is not given a third.
    """

    def __init__(
        self,
        topology: Topology,
        membership: Membership,
        decoding: Decoding | None = None,
        migrations: int = 1,
    ) -> None:
        self._topology = topology
        self._membership = membership
        self._decoding = decoding
        self._migrations = migrations
        self.tensor_bytes = 0  # of tensors that came through here inside tickets: inline ones only

    async def run(self, work: Work, deliver: Deliver, flow: Flow | None = None) -> dict[str, float]:
        """Deliver the tokens of ``work``; give the seconds spent by stage.

        Sampling depends on nothing but the request, so when a worker is lost the walk is taken
        again and what was delivered already is checked and left out.
        """
        walk = _Walk(work, deliver)
        try:
            while not await self._arrives(walk, flow or Flow()):
                walk.again()
        finally:
            self.tensor_bytes += walk.tensor_bytes
        return walk.spent

    async def _arrives(self, walk: _Walk, flow: Flow) -> bool:
        """Walk once. False: a worker was lost or is stopping, and another may do."""
        try:
            if self._decoding is not None and walk.work.media:
                start = time.monotonic()
                walk.offer(await self._decoding.offer(walk.work.media, walk.work.salt), start)
            await self._walk(walk, flow)
        except PASSING as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None  # a TaskGroup drops it for its errors
            walk.losses += not isinstance(error, Draining)  # which costs nobody anything
            if walk.losses > self._migrations or walk.unequal:
                raise
            return False
        finally:
            walk.take_back()
        return True

    async def _walk(self, walk: _Walk, flow: Flow) -> None:
        steps = plan(walk.work, self._topology)
        visits: list[_Visit] = []
        try:
            if len(steps) == 1 == len(steps[0]):  # one hop: there is nothing to hold together
                visits = [self._visit(steps[0][0], Carried(), walk)]
                flow.attach(visits[0].call)
                await visits[0].stay()
                return
            async with asyncio.TaskGroup() as hops:
                await self._walk_steps(steps, walk, flow, hops, visits)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            for visit in visits:
                visit.leave()

    async def _walk_steps(
        self,
        steps: tuple[Step, ...],
        walk: _Walk,
        flow: Flow,
        hops: asyncio.TaskGroup,
        visits: list[_Visit],
    ) -> None:
        """Step after step; the first answers of one close the calls of those before."""
        carried = Carried()
        for step in steps:
            before = len(visits)
            for hop in step:
                visits.append(self._visit(hop, carried, walk))
                last = hops.create_task(visits[-1].stay())
            flow.attach(visits[-1].call)
            answers = [await visit.first for visit in visits[before:]]
            for visit in visits[:before]:
                visit.leave()
            carried = carried.after(answers)
            if carried.ended:
                break
        await last  # here and not in the group's exit, which would count a loss as a cancel

    def _visit(self, hop: Hop, carried: Carried, walk: _Walk) -> _Visit:
        first = walk.sent.media[hop.items[0]] if hop.items else None
        peer = self._membership.choose(hop.role, first, walk.avoided)
        job = Job(
            work=_carrying(walk.sent, hop.items),
            items=hop.items,
            embeddings=carried.embeddings,
            handover=carried.handover,
        )
        return _Visit(walk, peer, job)

    def missing(self) -> tuple[str, ...]:
        """Roles without a ready worker: none means that requests can be served."""
        return self._membership.missing()

    @property
    def standing(self) -> Standing:
        """Where workers are found, and whether that is away."""
        return self._membership.standing

    async def cluster(self) -> list[WorkerReport]:
        """Every worker's account of itself; one that does not answer in time is left out."""
        reports: list[WorkerReport] = []

        def take(answer: Answer) -> None:
            if isinstance(answer, WorkerReport):
                reports.append(answer)

        calls = []
        for peer in self._membership.peers:
            with contextlib.suppress(WorkerLost):  # gone a moment ago
                calls.append(peer.call(Describe(), take))
        asked = asyncio.gather(*(call.done() for call in calls), return_exceptions=True)
        try:
            await asyncio.wait_for(asked, DESCRIBE_SECONDS)
        except TimeoutError:
            for call in calls:
                call.close()
        return sorted(reports, key=lambda report: report.id)


class _Walk:
    """One request on its way: what was delivered, and what it cost."""

    def __init__(self, work: Work, deliver: Deliver) -> None:
        self.work = work
        self.sent = work  # as workers get it: with tickets, where media were decoded here
        self._offered: Offered | None = None
        self._unread: set[int] = set()  # media items that no encoder has answered for
        self.spent: dict[str, float] = {}
        self.tensor_bytes = 0
        self.unequal = False
        self.losses = 0  # of workers, on the way
        self.avoided: set[tuple[str, int]] = set()  # ids and epochs of those, if others are there
        self._deliver = deliver
        self._delivered: list[int] = []
        self._repeat = 0  # of these, how many are still to come again

    def offer(self, offered: Offered | None, start: float) -> None:
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

    def again(self) -> None:
        self._repeat = len(self._delivered)
        self.spent.clear()

    def deliver(self, delta: Delta) -> None:
        if delta.spent is not None:
            self.note(delta.spent)
        if self._repeat:
            delta = self._left_out(delta)
        if (delta.ids or delta.finish) and not self.unequal:
            self._delivered += delta.ids
            self._deliver(delta)

    def _left_out(self, delta: Delta) -> Delta:
        """Without the tokens that the client has; they must be the same ones."""
        start = len(self._delivered) - self._repeat
        count = min(self._repeat, len(delta.ids))
        self.unequal |= list(delta.ids[:count]) != self._delivered[start : start + count]
        self._repeat -= count
        return msgspec.structs.replace(
            delta, ids=delta.ids[count:], logprobs=delta.logprobs[count:], prompt=None
        )

    def pass_on(self, tickets: Sequence[Ticket]) -> None:
        """Count the tensors that do not stay with the workers but travel inside their tickets."""
        self.tensor_bytes += sum(t.size for t in tickets if t.transport == "inline")

    def note(self, spent: dict[str, float]) -> None:
        for what, seconds in spent.items():
            self.spent[what] = self.spent.get(what, 0.0) + seconds


class _Visit:
    """A hop under way: its call, and its first answer."""

    def __init__(self, walk: _Walk, peer: Peer, job: Job) -> None:
        self.first: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._walk = walk
        self._failure: Exception | None = None
        self._items = job.items
        self._peer: Peer | None = peer
        self.call = peer.call(job, self._answer)
        peer.load += 1

    def _answer(self, answer: Answer) -> None:
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
        if self._failure is not None or self._walk.unequal:
            self.call.close()

    def _take(self, answer: Answer) -> None:
        match answer:
            case Handover():
                self._walk.pass_on(() if answer.kv is None else (answer.kv,))
                self._walk.deliver(answer.delta)
            case Encoded():
                self._walk.note(answer.spent or {})
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
            self._peer.load -= 1
            self._peer = None
            self.call.close()


def _carrying(work: Work, items: tuple[int, ...]) -> Work:
    """The work with the bytes of these media items only."""
    if len(items) == len(work.media):
        return work
    media = tuple(
        item if i in items else msgspec.structs.replace(item, data=b"", prepared=None)
        for i, item in enumerate(work.media)
    )
    return msgspec.structs.replace(work, media=media)
