"""Whether an engine that has work still does something.

A port that answers says nothing of a device that hangs: those who wait would wait for ever, and
nobody would send their work elsewhere. So silence is counted while somebody waits. In the middle of
it a canary is sent, which tells one slow request from an engine that stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from triptych.engines.base import Emit, Encoder, Engine, Generation, Media, Prefilled
from triptych.media.base import Prepared
from triptych.messages import Delta
from triptych.recipe import Recipes

TICK = 1.0  # seconds


class Pulse:
    """Who waits for an answer, and how many came. Both parts of a worker share it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.answers = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.answers += 1


class HeardEngine:
    """An engine whose answers are counted."""

    def __init__(self, engine: Engine, pulse: Pulse) -> None:
        self._engine = engine
        self._pulse = pulse

    async def generate(self, generation: Generation, emit: Emit) -> None:
        pulse = self._pulse

        def answered(answer: Delta | Prefilled) -> None:
            pulse.answers += 1
            emit(answer)

        with pulse.call():
            await self._engine.generate(generation, answered)


class HeardEncoder:
    """An encoder whose answers are counted."""

    def __init__(self, encoder: Encoder, pulse: Pulse) -> None:
        self._encoder = encoder
        self._pulse = pulse

    @property
    def recipes(self) -> Recipes | None:
        return self._encoder.recipes

    async def encode(self, items: Sequence[Prepared]) -> list[Media]:
        with self._pulse.call():
            return await self._encoder.encode(items)


async def silence(
    pulse: Pulse,
    work: Callable[[], dict[str, float]],
    canary: Callable[[], Awaitable[None]],
    seconds: float,
) -> None:
    """Ends when somebody has waited so long and nothing came, for a canary neither.

    ``work`` counts what the engine does: a step of a long prompt answers nobody. The time is that
    of this loop's ticks, since a process that was stopped knows nothing of its engine.
    """
    silent, last, sent = 0.0, (pulse.answers, work()), None
    try:
        while silent < seconds:
            await asyncio.sleep(TICK)
            if not pulse.waiting or (pulse.answers, work()) != last:
                silent, last = 0.0, (pulse.answers, work())
                continue
            silent += TICK
            if silent >= seconds / 2 and (sent is None or sent.done()):
                sent = asyncio.ensure_future(canary())
    finally:
        if sent is not None:
            sent.cancel()  # and not waited for: it may hang too
