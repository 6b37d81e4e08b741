"""Prefill and decode: fetch what a job's tickets name, run the engine, hand over or stream.

A job brings media and KV cache along: its own, or borrowed from other workers by ticket. A role
that ends with prefill offers the KV cache to the next worker; all others stream tokens to the
caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from triptych.engines.base import Emit, Engine, Generation, Media, PrefillOutput
from triptych.errors import EngineFailed, TicketLost
from triptych.messages import Delta, Handover, Job, Ticket
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.runtime.server import Reply
from triptych.topology import Role
from triptych.transfer.base import Array, FetchedArrays
from triptych.transfer.client import TransferClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What the engine gets for one job. ``timings``: seconds by stage until here."""

    generation: Generation
    timings: dict[str, float]
    borrowed: list[FetchedArrays] = field(default_factory=list)

    def check(self) -> None:
        """Raise TicketLost if the owner of borrowed memory has released it meanwhile."""
        for fetched in self.borrowed:
            fetched.check()


@asynccontextmanager
async def open_inputs(
    job: Job,
    role: Role,
    encoded: Sequence[Media],
    timings: dict[str, float],
    transfers: TransferClient,
) -> AsyncIterator[StageInputs]:
    """Borrow what the job's tickets name, for the time of the scope."""
    start = time.monotonic()
    async with AsyncExitStack() as scope:
        borrowed: list[FetchedArrays] = []

        async def fetch(ticket: Ticket) -> FetchedArrays:
            borrowed.append(await scope.enter_async_context(transfers.borrow(ticket)))
            return borrowed[-1]

        media, first, phases = tuple(encoded), None, role.phases
        kv: tuple[Array, ...] = ()
        if job.handover is not None:
            media = tuple(Media(meta, ()) for meta in job.handover.media)
            first = job.handover.delta
            if job.handover.kv is not None:
                kv = (await fetch(job.handover.kv)).arrays
        elif job.cached_media is not None:
            media, phases = tuple(Media(meta, ()) for meta in job.cached_media), "PD"
        elif job.embeddings:
            media = tuple([Media(e.meta, (await fetch(e.ticket)).arrays) for e in job.embeddings])
        if borrowed:
            timings = timings | {"transfer": time.monotonic() - start}
        yield StageInputs(Generation(job.work, phases, media, kv, first), timings, borrowed)


async def run_prefill(
    inputs: StageInputs,
    engine: Engine,
    transfers: TransferClient,
    reply: Reply,
    transport: str = "",
) -> None:
    """Prefill, and offer first token and KV cache while the caller keeps the call open.

    ``transport``: one that the reader of the KV cache can use. An engine may continue after it has
    emitted: it does so for as long, and if it fails the call fails.
    """
    emitted: list[PrefillOutput] = []
    ready = asyncio.Event()

    def emit(answer: Delta | PrefillOutput) -> None:
        assert isinstance(answer, PrefillOutput)
        assert not ready.is_set(), "prefill emits once"
        emitted.append(answer)
        ready.set()

    async def prefill() -> None:
        await run_engine(inputs, engine, emit)
        if not ready.is_set():
            raise EngineFailed("prefill ended without a result.")

    async with QuietTaskGroup() as tasks:
        tasks.create_task(prefill())
        await ready.wait()
        # Popped, so that nothing here holds the arrays when the offer is over.
        await _offer_kv(inputs, emitted.pop(), transfers, reply, transport)


async def _offer_kv(
    inputs: StageInputs,
    output: PrefillOutput,
    transfers: TransferClient,
    reply: Reply,
    transport: str,
) -> None:
    delta = _with_timings(output.delta, inputs)
    media = tuple(item.meta for item in inputs.generation.media)
    if not output.kv:
        reply.send(Handover(delta, media, None))
        return
    async with transfers.offer(output.kv, by=transport) as ticket:
        del output
        reply.send(Handover(delta, media, ticket))
        await reply.wait_until_closed()


async def run_decode(inputs: StageInputs, engine: Engine, reply: Reply) -> None:
    """Stream what the engine emits, for phases D and PD."""
    first = True

    def emit(delta: Delta | PrefillOutput) -> None:
        nonlocal first
        assert isinstance(delta, Delta)
        if first:
            first = False
            delta = _with_timings(delta, inputs)
        reply.send(delta)

    await run_engine(inputs, engine, emit)


async def run_engine(inputs: StageInputs, engine: Engine, emit: Emit) -> None:
    """Run the engine on the inputs, and check their tickets once more before its first result.

    Where a ticket is lost nothing is emitted, and the engine is cancelled: so it keeps nothing that
    it computed from memory that was not valid any more.
    """
    task = asyncio.current_task()
    assert task is not None
    lost: TicketLost | None = None
    first = True

    def check_and_emit(answer: Delta | PrefillOutput) -> None:
        nonlocal lost, first
        if first:
            first = False
            try:
                inputs.check()
            except TicketLost as error:  # raised below: this runs inside the engine
                lost = error.with_traceback(None)  # its frames would keep the engine's alive
                task.cancel()
        if lost is None:
            emit(answer)

    try:
        await engine.generate(inputs.generation, check_and_emit)
        if lost is not None:  # the engine had ended: receive the cancellation here
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if lost is None or task.uncancel():
            raise
    if lost is not None:
        work = inputs.generation.work
        log.info("borrowed memory was released: %s", str(lost), extra={"request_id": work.id})
        try:
            raise lost
        finally:
            lost = None  # breaks a reference cycle between the error and this frame


def _with_timings(delta: Delta, inputs: StageInputs) -> Delta:
    return msgspec.structs.replace(delta, timings=inputs.timings | (delta.timings or {}))
