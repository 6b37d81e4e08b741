"""ROOM 4: a prompt to its KV cache and first token, and both to whoever decodes."""

from __future__ import annotations

import msgspec

from triptych.engines.base import Engine, Prefilled
from triptych.messages import Delta, Handover
from triptych.runtime.requests import Reply
from triptych.stages.visit import Visit, run
from triptych.transfer.exchange import Exchange


async def hand_over(visit: Visit, engine: Engine, exchange: Exchange, reply: Reply) -> None:
    """Prefill, then offer the KV cache for as long as the caller keeps the call open."""
    prefilled = await _prefill(visit, engine)
    delta = msgspec.structs.replace(
        prefilled.delta, spent=visit.spent | (prefilled.delta.spent or {})
    )
    media = tuple(item.meta for item in visit.generation.media)
    if not prefilled.kv:
        reply.send(Handover(delta, media, None))
        return
    async with exchange.offer(prefilled.kv) as ticket:
        del prefilled
        reply.send(Handover(delta, media, ticket))
        await reply.hold()


async def _prefill(visit: Visit, engine: Engine) -> Prefilled:
    emitted: list[Delta | Prefilled] = []
    await run(visit, engine, emitted.append)
    [prefilled] = emitted
    assert isinstance(prefilled, Prefilled)
    return prefilled
