"""ROOM 5: one token after another, to the caller. Spans D and PD end here."""

from __future__ import annotations

import msgspec

from triptych.engines.base import Engine, PrefillOutput
from triptych.messages import Delta
from triptych.runtime.server import Reply
from triptych.stages.generate import StageInputs, run_engine


async def decode(visit: StageInputs, engine: Engine, reply: Reply) -> None:
    """Send what the engine emits."""
    first = True

    def emit(delta: Delta | PrefillOutput) -> None:
        nonlocal first
        assert isinstance(delta, Delta)
        if first:
            first = False
            delta = msgspec.structs.replace(delta, timings=visit.spent | (delta.timings or {}))
        reply.send(delta)

    await run_engine(visit, engine, emit)
