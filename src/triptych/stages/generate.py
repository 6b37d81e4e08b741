"""What a hop brought along, made ready for the engine: media and KV cache, own or borrowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from triptych.engines.base import Emit, Engine, Generation, Media, PrefillOutput
from triptych.errors import TicketLost
from triptych.messages import Delta, Job, Ticket
from triptych.topology import Role
from triptych.transfer.base import Array, FetchedArrays
from triptych.transfer.client import TransferClient


@dataclass(frozen=True, slots=True)
class StageInputs:
    generation: Generation
    spent: dict[str, float]
    borrowed: list[FetchedArrays] = field(default_factory=list)

    def check(self) -> None:
        """Raise TicketLost if memory that we read was taken back meanwhile."""
        for fetched in self.borrowed:
            fetched.check()


@asynccontextmanager
async def open_inputs(
    job: Job,
    role: Role,
    encoded: Sequence[Media],
    spent: dict[str, float],
    transfers: TransferClient,
) -> AsyncIterator[StageInputs]:
    """Borrow what the job's tickets name, for the time of the scope."""
    start = time.monotonic()
    async with AsyncExitStack() as scope:
        borrowed: list[FetchedArrays] = []

        async def fetch(ticket: Ticket) -> FetchedArrays:
            borrowed.append(await scope.enter_async_context(transfers.borrow(ticket)))
            return borrowed[-1]

        media, first, span = tuple(encoded), None, role.span
        kv: tuple[Array, ...] = ()
        if job.handover is not None:
            media = tuple(Media(meta, ()) for meta in job.handover.media)
            first = job.handover.delta
            if job.handover.kv is not None:
                kv = (await fetch(job.handover.kv)).arrays
        elif job.cached_media is not None:
            media, span = tuple(Media(meta, ()) for meta in job.cached_media), "PD"
        elif job.embeddings:
            media = tuple([Media(e.meta, (await fetch(e.ticket)).arrays) for e in job.embeddings])
        if borrowed:
            spent = spent | {"transfer": time.monotonic() - start}
        yield StageInputs(Generation(job.work, span, media, kv, first), spent, borrowed)


async def run_engine(visit: StageInputs, engine: Engine, emit: Emit) -> None:
    """Let the engine work on what the hop brought along.

    Before its first result goes on, the tickets are checked once more. Where one is lost nothing
    is emitted, and the engine is cancelled, so that it keeps nothing that it read there.
    """
    task = asyncio.current_task()
    assert task is not None
    lost: TicketLost | None = None
    first = True

    def checked(answer: Delta | PrefillOutput) -> None:
        nonlocal lost, first
        if first:
            first = False
            try:
                visit.check()
            except TicketLost as error:  # an engine's callback is no place to raise
                lost = error.with_traceback(None)  # whose frames lead to the engine's, and on to us
                task.cancel()
        if lost is None:
            emit(answer)

    try:
        await engine.generate(visit.generation, checked)
        if lost is not None:  # the engine had ended: take the cancellation that is due
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if lost is None or task.uncancel():
            raise
    if lost is not None:
        try:
            raise lost
        finally:
            lost = None  # else the error and this frame would hold each other
