"""The pipeline: one request runs its plan, from worker to worker.

Plan, choose a worker, call it, pass on its tickets, stream. Tensors do not come through here.
A call stays open while its tickets are needed: the first answers of the next step close the calls
of the step before, and closing a call frees the worker's memory, whatever the reason for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from triptych.errors import Draining, PrefixGone, TicketLost, WorkerLost
from triptych.messages import (
    Embedding,
    EncodeResult,
    GetReport,
    Handover,
    Job,
    MediaMeta,
    Work,
    WorkerAnswer,
    WorkerReport,
)
from triptych.pipeline.decoding import FrontendDecoding
from triptych.pipeline.kv.media_layouts import content_digests
from triptych.pipeline.kv.prompt_blocks import hash_prompt
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership, Peer
from triptych.pipeline.plan import Hop, Plan, plan
from triptych.pipeline.request import Backpressure, Deliver, RequestRun, WorkerCall
from triptych.pipeline.unused_workers import UnusedWorker
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.runtime.discovery import DiscoveryStatus
from triptych.topology import Topology

log = logging.getLogger(__name__)
REPORT_SECONDS = 2.0


class CannotResume(Exception):
    """A worker that joined just now can't continue after tokens of another: start over."""


# Errors of a worker and not of the request, which is tried again. FREE_RETRIES lost no work and do
# not count against --migration-limit.
FREE_RETRIES = (PrefixGone, Draining, CannotResume)
RETRIES = (WorkerLost, TicketLost, *FREE_RETRIES)


class StepResult(Struct, frozen=True):
    """What the steps so far handed over to the next one."""

    embeddings: tuple[Embedding, ...] = ()
    handover: Handover | None = None

    @property
    def is_last(self) -> bool:
        """Whether the first token was also the last: there is nothing to decode."""
        return self.handover is not None and self.handover.kv is None

    def after(self, answers: Sequence[WorkerAnswer]) -> StepResult:
        match answers[0]:
            case EncodeResult():
                encoded = (a.embeddings for a in answers if isinstance(a, EncodeResult))
                return StepResult(tuple(e for embeddings in encoded for e in embeddings))
            case Handover() as handover:
                return StepResult((), handover)
        return self


class Pipeline:
    """Runs requests on the workers of a topology.

    ``decoding``: set where the frontend decodes media, and not the encoders. ``kv``: set where
    requests go by prefix cache. ``migrations``: how often a request may lose a worker and go on
    with another. One by default: a request that crashed two workers is not tried on a third.
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
        self.tensor_bytes = 0  # of tensors that came through here inside tickets

    async def run(
        self, work: Work, deliver: Deliver, backpressure: Backpressure | None = None
    ) -> dict[str, float]:
        """Deliver the tokens of ``work``; return the seconds spent by stage.

        When a worker is lost the request runs again. Sampling depends on the request alone, so it
        continues after the delivered tokens, or, with engines that cannot, starts over: then the
        repeated tokens are compared and left out.
        """
        run = RequestRun(work, deliver, self._kv)
        try:
            while not await self._attempt(run, backpressure or Backpressure()):
                run.retry(run.may_resume and self._membership.can_resume)
            if self._kv is not None and not self._kv.settings.events:
                await self._expect_cached(run, self._kv)
        finally:
            self.tensor_bytes += run.tensor_bytes
        return run.timings

    async def _attempt(self, run: RequestRun, backpressure: Backpressure) -> bool:
        """Run the plan once. False: a worker was lost or is stopping, and another may do."""
        try:
            if self._decoding is not None and run.work.media:
                start = time.monotonic()
                offer = await self._decoding.offer(run.work.media, run.work.salt)
                if offer is not None:
                    run.use_decoded(offer, start)
            await self._run_plan(run, backpressure)
        except RETRIES as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None  # a TaskGroup drops it for its errors
            if run.finished:
                return True  # the worker was lost before it could end the call
            run.losses += not isinstance(error, FREE_RETRIES)
            run.may_use_cache &= not isinstance(error, PrefixGone)
            run.may_resume &= not isinstance(error, CannotResume)
            if run.losses > self._migrations or run.diverged:
                raise
            log.info("request runs again: %s", error, extra={"request_id": run.work.id})
            return False
        finally:
            run.release_decoded()
        return True

    async def _run_plan(self, run: RequestRun, backpressure: Backpressure) -> None:
        from_cache = self._kv is not None and await self._has_prompt_cached(run, self._kv)
        steps = plan(run.work, self._topology, from_cache)
        if not run.called:
            self._check_roles(steps, run.work)
        calls: list[WorkerCall] = []
        try:
            if len(steps) == 1 == len(steps[0]):  # one call needs no task group
                calls = [await self._call(steps[0][0], StepResult(), run)]
                backpressure.attach(calls[0].call)
                await calls[0].wait()
                return
            async with QuietTaskGroup() as tasks:
                await self._run_steps(steps, run, backpressure, tasks, calls)
        finally:
            for call in calls:
                call.close()

    async def _run_steps(
        self,
        steps: Plan,
        run: RequestRun,
        backpressure: Backpressure,
        tasks: asyncio.TaskGroup,
        calls: list[WorkerCall],
    ) -> None:
        result = StepResult()
        for step in steps:
            before = len(calls)
            for hop in step:
                calls.append(await self._call(hop, result, run))
                last = tasks.create_task(calls[-1].wait())
            backpressure.attach(calls[-1].call)
            answers = [await call.first_answer for call in calls[before:]]
            for call in calls[:before]:
                call.close()
            result = result.after(answers)
            if result.is_last:
                break
        await last  # here and not in the group's exit, which would count a loss as a cancel

    def _check_roles(self, steps: Plan, work: Work) -> None:
        """Refuse a request whose later steps have no worker, before the first worker is called.

        A worker that is lost later may be back in time, so retries do not check.
        """
        for step in steps[1:]:
            role = step[0].role
            if "P" in role.phases or work.sampling.max_tokens != 1:  # prefill gives one token
                self._membership.require(role)

    async def _call(self, hop: Hop, result: StepResult, run: RequestRun) -> WorkerCall:
        """Choose a worker for a hop and call it with what the steps before handed over."""
        blocks, cached_media = 0.0, None
        if self._kv is not None and (hop.from_cache or "P" in hop.role.phases):
            peer, blocks, cached_media = await self._choose_by_cache(hop, run, self._kv)
        else:
            item = run.sent.media[hop.items[0]] if hop.items else None
            peer = self._membership.choose(hop.role, item, run.avoided)
        if run.sent.generated and hop.role.phases and not peer.record.resumes:  # it joined just now
            raise CannotResume
        job = Job(
            work=_with_media(run.sent, hop.items),
            items=hop.items,
            embeddings=result.embeddings,
            handover=result.handover,
            cached_media=cached_media,
            transport="" if "D" in hop.role else self._membership.common_transport(),
        )
        return WorkerCall(run, peer, job, blocks)

    async def _choose_by_cache(
        self, hop: Hop, run: RequestRun, kv: KvRouting
    ) -> tuple[Peer, float, tuple[MediaMeta, ...] | None]:
        """A worker that prefills, the blocks that it must compute, and (``from_cache``) what stands
        for the media in its prefix cache."""
        await kv.hash_prompt(
            run.sent, self._membership.ready(hop.role), run.blocks, run.media_digests
        )
        peers = self._membership.ready(hop.role, run.avoided)
        if hop.from_cache:
            peers = kv.able_to_prefill(peers, run.blocks)
            if not peers:
                raise PrefixGone("No worker that decodes holds this prompt any more. Try again.")
            kv.count_prefill_skipped()
            run.release_decoded()  # no encoder will read it
        item = run.sent.media[hop.items[0]] if hop.items else None
        peer, blocks = kv.choose(peers, run.blocks, item)
        kv.expect(peer, run.blocks)
        cached_media = run.blocks[kv.block_size(peer)].metas if hop.from_cache else None
        return peer, blocks, cached_media

    async def _has_prompt_cached(self, run: RequestRun, kv: KvRouting) -> bool:
        """Whether the best worker to decode can also prefill, from its prefix cache. One that has
        the prompt cached but is busy is not always the best."""
        role = self._topology.roles[-1]
        if role.phases != "D" or not run.may_use_cache:
            return False
        if run.sent.sampling.prompt_logprobs is not None:  # a cache has no logits of the prompt
            return False
        if len(run.media_digests) != len(run.sent.media):
            run.media_digests = await content_digests(run.sent.media)
        await kv.hash_prompt(run.sent, self._membership.ready(role), run.blocks, run.media_digests)
        peers = self._membership.ready(role, run.avoided)
        wait = self._membership.least_queued_blocks(self._topology.roles[-2])
        return kv.best_can_prefill(peers, run.blocks, wait)

    async def _expect_cached(self, run: RequestRun, kv: KvRouting) -> None:
        """Without cache events: expect the prompt and the answer where they were computed."""
        for peer in run.kv_holders:
            if peer.ready and (size := kv.block_size(peer)):
                generated = run.cached_tokens if "D" in peer.record.role else ()
                kv.expect(peer, {size: await hash_prompt(run.sent, kv.layouts, size, generated)})

    @property
    def routing(self) -> dict[str, float]:
        """Counters of kv routing; empty where it is off."""
        return {} if self._kv is None else self._kv.counters

    def missing(self) -> tuple[str, ...]:
        """Roles without a ready worker. None: requests can be served."""
        return self._membership.missing()

    @property
    def discovery_status(self) -> DiscoveryStatus:
        """Where workers are found, and whether that is away."""
        return self._membership.discovery_status

    @property
    def unused(self) -> tuple[UnusedWorker, ...]:
        """Workers in discovery that get no requests, with the reason."""
        return self._membership.unused

    async def cluster(self) -> list[WorkerReport]:
        """The reports of all workers that answer in time."""
        reports: list[WorkerReport] = []

        def take(answer: WorkerAnswer) -> None:
            if isinstance(answer, WorkerReport):
                reports.append(answer)

        calls = []
        for peer in self._membership.peers:
            with contextlib.suppress(WorkerLost):  # lost a moment ago
                calls.append(peer.call(GetReport(), take))
        ended = asyncio.gather(*(call.done() for call in calls), return_exceptions=True)
        try:
            await asyncio.wait_for(ended, REPORT_SECONDS)
        except TimeoutError:
            for call in calls:
                call.close()
        return sorted(reports, key=lambda report: report.id)


def _with_media(work: Work, items: tuple[int, ...]) -> Work:
    """The work with the bytes of these media items only."""
    if len(items) == len(work.media):
        return work
    media = tuple(
        item if i in items else msgspec.structs.replace(item, data=b"", prepared=None)
        for i, item in enumerate(work.media)
    )
    return msgspec.structs.replace(work, media=media)
