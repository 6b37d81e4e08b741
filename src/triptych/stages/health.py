"""Whether an engine that has work still does something.

A port that answers says nothing of a device that hangs: those who wait would wait for ever, and
nobody would send their work elsewhere. So silence is counted while somebody waits. In the middle of
it a canary is sent, which tells one slow request from an engine that stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from triptych.engines.base import Emit, Encoder, Engine, Generation, Media, PrefillOutput
from triptych.media.base import PreparedMedia
from triptych.messages import Delta
from triptych.recipe import Recipes

log = logging.getLogger(__name__)
TICK = 1.0  # seconds


class EngineHealth:
    """Of one part: who waits for its answer, and how many answers came."""

    def __init__(self) -> None:
        self.waiting = 0
        self.answers = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self.waiting += 1
        answered = True
        try:
            yield
        except asyncio.CancelledError:  # whoever gave up has not been answered
            answered = False
            raise
        finally:
            self.waiting -= 1
            self.answers += answered


class MonitoredEngine:
    """An engine whose answers are counted."""

    def __init__(self, engine: Engine, pulse: EngineHealth) -> None:
        self._engine = engine
        self._pulse = pulse

    async def generate(self, generation: Generation, emit: Emit) -> None:
        pulse = self._pulse

        def answered(answer: Delta | PrefillOutput) -> None:
            pulse.answers += 1
            emit(answer)

        with pulse.call():
            await self._engine.generate(generation, answered)


class MonitoredEncoder:
    """An encoder whose answers are counted."""

    def __init__(self, encoder: Encoder, pulse: EngineHealth) -> None:
        self._encoder = encoder
        self._pulse = pulse

    @property
    def recipes(self) -> Recipes | None:
        return self._encoder.recipes

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        with self._pulse.call():
            return await self._encoder.encode(items)


async def wait_for_hang(
    pulse: EngineHealth,
    steps: Callable[[], float],
    canary: Callable[[], Awaitable[None]],
    seconds: float,
) -> None:
    """Ends when somebody has waited so long and nothing came, for a canary neither.

    ``steps`` counts what is done besides: a step of a long prompt answers nobody. The time is that
    of this loop's ticks, since a process that was stopped knows nothing of its engine.
    """
    silent, last, sent = 0.0, (pulse.answers, steps()), None
    try:
        while silent < seconds:
            await asyncio.sleep(TICK)
            if not pulse.waiting or (pulse.answers, steps()) != last:
                silent, last = 0.0, (pulse.answers, steps())
                continue
            silent += TICK
            if silent >= seconds / 2 and (sent is None or sent.done()):
                sent = asyncio.ensure_future(_quietly(canary))
    finally:
        if sent is not None:
            sent.cancel()  # and not waited for: it may hang too


async def _quietly(canary: Callable[[], Awaitable[None]]) -> None:
    """What fails has answered; requests will say how."""
    try:
        await canary()
    except Exception as error:  # noqa: BLE001 (whatever an engine may raise)
        log.warning("a canary through an engine that was silent failed: %s", error)
