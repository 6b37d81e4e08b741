"""The corridor: one request walks its plan, from worker to worker, tickets in hand.

Plan, choose a worker, call it, pass on what it handed over, stream. Tensors never come here.
A hop's call stays open for as long as its ticket is needed: the first answer of the next step
closes it, and closing a call is what frees the worker's memory, whatever the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from triptych.errors import Draining, PrefixEvicted, TicketLost, WorkerLost
from triptych.messages import (
    Embedding,
    EncodeResult,
    GetReport,
    Handover,
    Job,
    Work,
    WorkerAnswer,
    WorkerReport,
)
from triptych.pipeline.decoding import FrontendDecoding
from triptych.pipeline.flow import Backpressure
from triptych.pipeline.kv.media_layouts import content_digests
from triptych.pipeline.kv.prompt_blocks import hash_prompt
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership, Peer
from triptych.pipeline.plan import NO_FACTS, CacheFacts, Hop, Step, plan
from triptych.pipeline.request import Deliver, RequestRun, WorkerCall
from triptych.pipeline.unused_workers import UnusedWorker
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.runtime.discovery import DiscoveryStatus
from triptych.topology import Role, Topology

DESCRIBE_SECONDS = 2.0


class NotResumed(Exception):
    """A worker that has just come can't go on after what another made: from the start, then."""


# Faults of a place, not of the request.
AT_NO_COST = (PrefixEvicted, Draining, NotResumed)
PASSING = (WorkerLost, TicketLost, *AT_NO_COST)


class Carried(Struct, frozen=True):
    """What the steps so far have handed over."""

    embeddings: tuple[Embedding, ...] = ()
    handover: Handover | None = None

    @property
    def ended(self) -> bool:
        return self.handover is not None and self.handover.kv is None

    def after(self, answers: Sequence[WorkerAnswer]) -> Carried:
        match answers[0]:
            case EncodeResult():
                encoded = (a.embeddings for a in answers if isinstance(a, EncodeResult))
                return Carried(tuple(e for embeddings in encoded for e in embeddings))
            case Handover() as handover:
                return Carried((), handover)
        return self


class Pipeline:
    """``decoding``: where media are decoded here, and not where they are encoded. ``kv``: what is
    known of caches, where requests go by that.

    ``migrations``: how often a request goes on elsewhere after it has lost a worker. One by
    default: a request that has cost two workers their life is not given a third.
    """

    def __init__(
        self,
        topology: Topology,
        membership: Membership,
        decoding: FrontendDecoding | None = None,
        kv: KvRouting | None = None,
        migrations: int = 1,
    ) -> None:
        self._topology = topology
        self._membership = membership
        self._decoding = decoding
        self._kv = kv
        self._migrations = migrations
        self.tensor_bytes = 0  # of tensors that came through here inside tickets: inline ones only

    async def run(
        self, work: Work, deliver: Deliver, flow: Backpressure | None = None
    ) -> dict[str, float]:
        """Deliver the tokens of ``work``; give the seconds spent by stage.

        Sampling depends on nothing but the request, so when a worker is lost the walk is taken
        again: from what was delivered already, or, where engines cannot go on after that, from
        the start; then it is checked and left out.
        """
        walk = RequestRun(work, deliver, self._kv)
        try:
            while not await self._arrives(walk, flow or Backpressure()):
                walk.again(walk.resumes and self._membership.resumes)
            if self._kv is not None and not self._kv.settings.events:
                await self._expect(walk, self._kv)
        finally:
            self.tensor_bytes += walk.tensor_bytes
        return walk.spent

    async def _arrives(self, walk: RequestRun, flow: Backpressure) -> bool:
        """Walk once. False: a worker was lost or is stopping before the answer was whole, and
        another may do."""
        try:
            if self._decoding is not None and walk.work.media:
                start = time.monotonic()
                walk.offer(await self._decoding.offer(walk.work.media, walk.work.salt), start)
            await self._walk(walk, flow)
        except PASSING as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None  # a TaskGroup drops it for its errors
            if walk.finished:
                return True  # it was lost before it could say that this was all
            walk.losses += not isinstance(error, AT_NO_COST)
            walk.alone &= not isinstance(error, PrefixEvicted)
            walk.resumes &= not isinstance(error, NotResumed)
            if walk.losses > self._migrations or walk.unequal:
                raise
            return False
        finally:
            walk.take_back()
        return True

    async def _walk(self, walk: RequestRun, flow: Backpressure) -> None:
        steps = plan(walk.work, self._topology, await self._facts(walk))
        if not walk.asked:
            self._foresee(steps, walk.work)
        visits: list[WorkerCall] = []
        try:
            if len(steps) == 1 == len(steps[0]):  # one hop: there is nothing to hold together
                visits = [await self._visit(steps[0][0], Carried(), walk)]
                flow.attach(visits[0].call)
                await visits[0].stay()
                return
            async with QuietTaskGroup() as hops:
                await self._walk_steps(steps, walk, flow, hops, visits)
        finally:
            for visit in visits:
                visit.leave()

    def _foresee(self, steps: tuple[Step, ...], work: Work) -> None:
        """Refuse what a later hop could not end, before anybody works for it and the client has a
        part. Who is lost on the way may be back in time, and is missed in its turn only."""
        for step in steps[1:]:
            role = step[0].role
            if "P" in role.span or work.sampling.max_tokens != 1:  # one is made by prefill
                self._membership.need(role)

    async def _walk_steps(
        self,
        steps: tuple[Step, ...],
        walk: RequestRun,
        flow: Backpressure,
        hops: asyncio.TaskGroup,
        visits: list[WorkerCall],
    ) -> None:
        """Step after step; the first answers of one close the calls of those before."""
        carried = Carried()
        for step in steps:
            before = len(visits)
            for hop in step:
                visits.append(await self._visit(hop, carried, walk))
                last = hops.create_task(visits[-1].stay())
            flow.attach(visits[-1].call)
            answers = [await visit.first for visit in visits[before:]]
            for visit in visits[:before]:
                visit.leave()
            carried = carried.after(answers)
            if carried.ended:
                break
        await last  # here and not in the group's exit, which would count a loss as a cancel

    async def _visit(self, hop: Hop, carried: Carried, walk: RequestRun) -> WorkerCall:
        first, blocks, metas = walk.sent.media[hop.items[0]] if hop.items else None, 0.0, None
        if self._kv is not None and (hop.alone or "P" in hop.role.span):
            await self._name(walk, hop.role)
            peers = self._membership.ready(hop.role, walk.avoided)
            if hop.alone:
                peers = self._able(peers, walk)
                walk.take_back()  # nobody will read what was decoded
            peer, blocks = self._kv.choose(peers, walk.chains, first)
            if hop.alone:
                metas = walk.chains[self._kv.block_size(peer)].metas
            self._kv.sent(peer, walk.chains)
        else:
            peer = self._membership.choose(hop.role, first, walk.avoided)
        if walk.sent.generated and hop.role.span and not peer.record.resumes:  # it has just come
            raise NotResumed
        job = Job(
            work=_carrying(walk.sent, hop.items),
            items=hop.items,
            embeddings=carried.embeddings,
            handover=carried.handover,
            cached_media=metas,
            transport=self._membership.common_transport(),
        )
        return WorkerCall(walk, peer, job, blocks)

    async def _facts(self, walk: RequestRun) -> CacheFacts:
        """Of the worker that had best decode, where others prefill: how much of this prompt it
        lacks. One that holds the prompt and has much to do is not always the best."""
        role = self._topology.roles[-1]
        if self._kv is None or role.span != "D" or not walk.alone:
            return NO_FACTS
        if len(walk.digests) != len(walk.sent.media):
            walk.digests = await content_digests(walk.sent.media)
        await self._name(walk, role)
        peers = self._membership.ready(role, walk.avoided)
        before = self._membership.least_work(self._topology.roles[-2])
        left = self._kv.left_at_best(peers, walk.chains, before)
        return CacheFacts(left, self._kv.max_local_prefill)

    def _able(self, peers: Sequence[Peer], walk: RequestRun) -> list[Peer]:
        """Those that hold enough of the prompt to prefill the rest."""
        assert self._kv is not None
        able = self._kv.able(peers, walk.chains)
        if not able:
            raise PrefixEvicted("No worker that decodes holds this prompt any more. Try again.")
        self._kv.count_alone()
        return able

    async def _name(self, walk: RequestRun, role: Role) -> None:
        """Name the blocks of the prompt, and of what was made, as the workers of a role do, unless
        that is done."""
        assert self._kv is not None
        for size in {self._kv.block_size(peer) for peer in self._membership.ready(role)} - {0}:
            if size not in walk.chains or not walk.chains[size].known:
                learned, made = self._kv.learned, walk.sent.generated
                walk.chains[size] = await hash_prompt(walk.sent, learned, size, made, walk.digests)

    async def _expect(self, walk: RequestRun, kv: KvRouting) -> None:
        """Where no worker tells what it holds: it will be the prompt and what it has answered."""
        for peer in walk.hosts:
            if peer.ready and (size := kv.block_size(peer)):
                made = walk.made if "D" in peer.record.role else ()
                kv.sent(peer, {size: await hash_prompt(walk.sent, kv.learned, size, made)})

    @property
    def routing(self) -> dict[str, float]:
        """What routing by KV cache counts; nothing where it is off."""
        return {} if self._kv is None else self._kv.counters

    def missing(self) -> tuple[str, ...]:
        """Roles without a ready worker: none means that requests can be served."""
        return self._membership.missing()

    @property
    def standing(self) -> DiscoveryStatus:
        """Where workers are found, and whether that is away."""
        return self._membership.standing

    @property
    def unused(self) -> tuple[UnusedWorker, ...]:
        """Workers that are there and are not asked, with the reason."""
        return self._membership.unused

    async def cluster(self) -> list[WorkerReport]:
        """Every worker's account of itself; one that does not answer in time is left out."""
        reports: list[WorkerReport] = []

        def take(answer: WorkerAnswer) -> None:
            if isinstance(answer, WorkerReport):
                reports.append(answer)

        calls = []
        for peer in self._membership.peers:
            with contextlib.suppress(WorkerLost):  # gone a moment ago
                calls.append(peer.call(GetReport(), take))
        asked = asyncio.gather(*(call.done() for call in calls), return_exceptions=True)
        try:
            await asyncio.wait_for(asked, DESCRIBE_SECONDS)
        except TimeoutError:
            for call in calls:
                call.close()
        return sorted(reports, key=lambda report: report.id)


def _carrying(work: Work, items: tuple[int, ...]) -> Work:
    """The work with the bytes of these media items only."""
    if len(items) == len(work.media):
        return work
    media = tuple(
        item if i in items else msgspec.structs.replace(item, data=b"", prepared=None)
        for i, item in enumerate(work.media)
    )
    return msgspec.structs.replace(work, media=media)
