"""ROOM 4: a prompt to its KV cache and first token, and both to whoever decodes."""

from __future__ import annotations

import asyncio

import msgspec

from triptych.engines.base import Engine, PrefillOutput
from triptych.errors import EngineFailed
from triptych.messages import Delta, Handover
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.runtime.server import Reply
from triptych.stages.generate import StageInputs, run_engine
from triptych.transfer.client import TransferClient


async def prefill(
    visit: StageInputs, engine: Engine, transfers: TransferClient, reply: Reply, by: str = ""
) -> None:
    """Prefill, and offer the KV cache for as long as the caller keeps the call open.

    ``by``: the transport that its reader can take.

    An engine may go on after it has emitted: it does so for as long, and its failure is the call's.
    """
    emitted: list[PrefillOutput] = []
    ready = asyncio.Event()

    def emit(answer: Delta | PrefillOutput) -> None:
        assert isinstance(answer, PrefillOutput)
        assert not ready.is_set(), "prefill emits once"
        emitted.append(answer)
        ready.set()

    async def work() -> None:
        await run_engine(visit, engine, emit)
        if not ready.is_set():
            raise EngineFailed("prefill ended without a result.")

    async with QuietTaskGroup() as hop:
        hop.create_task(work())
        await ready.wait()
        # Popped, so that nothing here holds the arrays when the offer is over.
        await _offer(visit, emitted.pop(), transfers, reply, by)


async def _offer(
    visit: StageInputs, prefilled: PrefillOutput, transfers: TransferClient, reply: Reply, by: str
) -> None:
    delta = msgspec.structs.replace(
        prefilled.delta, timings=visit.spent | (prefilled.delta.timings or {})
    )
    media = tuple(item.meta for item in visit.generation.media)
    if not prefilled.kv:
        reply.send(Handover(delta, media, None))
        return
    async with transfers.offer(prefilled.kv, by=by) as ticket:
        del prefilled
        reply.send(Handover(delta, media, ticket))
        await reply.hold()
