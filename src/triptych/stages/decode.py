"""ROOM 5: one token after another, to the caller. Spans D and PD end here."""

from __future__ import annotations

import asyncio

import msgspec

from triptych.engines.base import Engine, Prefilled
from triptych.errors import TicketLost
from triptych.messages import Delta
from triptych.runtime.requests import Reply
from triptych.stages.visit import Visit


async def stream(visit: Visit, engine: Engine, reply: Reply) -> None:
    """Send what the engine emits. Before the first token the tickets are checked once more."""
    task = asyncio.current_task()
    assert task is not None
    lost: TicketLost | None = None
    first = True

    def emit(delta: Delta | Prefilled) -> None:
        nonlocal lost, first
        assert isinstance(delta, Delta)
        if first:
            first = False
            try:
                visit.check()
            except TicketLost as error:  # an engine's callback is no place to raise
                lost = error
                task.cancel()
            delta = msgspec.structs.replace(delta, spent=visit.spent | (delta.spent or {}))
        if lost is None:
            reply.send(delta)

    try:
        await engine.generate(visit.generation, emit)
    except asyncio.CancelledError:
        if lost is None or task.uncancel():
            raise
    if lost is not None:
        raise lost
