"""ROOM 5: one token after another, to the caller. Spans D and PD end here."""

from __future__ import annotations

import msgspec

from triptych.engines.base import Engine, PrefillOutput
from triptych.messages import Delta
from triptych.runtime.requests import Reply
from triptych.stages.visit import Visit, run


async def stream(visit: Visit, engine: Engine, reply: Reply) -> None:
    """Send what the engine emits."""
    first = True

    def emit(delta: Delta | PrefillOutput) -> None:
        nonlocal first
        assert isinstance(delta, Delta)
        if first:
            first = False
            delta = msgspec.structs.replace(delta, spent=visit.spent | (delta.spent or {}))
        reply.send(delta)

    await run(visit, engine, emit)
