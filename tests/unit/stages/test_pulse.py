"""An engine that hangs is told from one that is slow, or has nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from triptych.engines.base import Emit, Generation
from triptych.messages import Delta, Sampling, Work
from triptych.stages import pulse as pulse_module
from triptych.stages.pulse import HeardEngine, Pulse, silence

LIMIT = 0.05  # seconds of silence
GENERATION = Generation(Work("r", (1,), (), Sampling(seed=0), salt=""), "PD", ())
DELTA = Delta((1,))


class Engine:
    """Does ``behave`` for the first call, and answers every other at once, or hangs too."""

    def __init__(self, behave: Callable[[Emit], Awaitable[None]], hangs: bool) -> None:
        self.behave, self.hangs, self.calls = behave, hangs, 0

    async def generate(self, generation: Generation, emit: Emit) -> None:
        self.calls += 1
        if self.calls == 1:
            await self.behave(emit)
        elif self.hangs:
            await asyncio.Event().wait()
        emit(DELTA)


async def hang(emit: Emit) -> None:
    await asyncio.Event().wait()


async def drip(emit: Emit) -> None:
    while True:
        emit(DELTA)
        await asyncio.sleep(LIMIT / 5)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "TICK", LIMIT / 10)


async def watched(
    behave: Callable[[Emit], Awaitable[None]],
    hangs: bool = False,
    work: Callable[[], dict[str, float]] = lambda: {"steps": 1.0},
    seconds: float = 20 * LIMIT,
) -> tuple[bool, int]:
    """Whether it was found to hang within so long, and the canaries that were sent."""
    pulse = Pulse()
    inner = Engine(behave, hangs)
    engine = HeardEngine(inner, pulse)
    request = asyncio.create_task(engine.generate(GENERATION, lambda _: None))
    await asyncio.sleep(0)

    async def canary() -> None:
        await engine.generate(GENERATION, lambda _: None)

    watching = asyncio.create_task(silence(pulse, work, canary, LIMIT))
    await asyncio.wait([watching], timeout=seconds)
    found = watching.done()
    for task in (request, watching):
        task.cancel()
    await asyncio.gather(request, watching, return_exceptions=True)
    assert pulse.waiting == 0
    return found, inner.calls - 1


async def test_an_engine_that_answers_nobody_hangs() -> None:
    found, canaries = await watched(hang, hangs=True, seconds=10.0)
    assert found
    assert canaries == 1


async def test_one_request_that_is_slow_is_no_engine_that_hangs() -> None:
    """Fails without the canary."""
    found, canaries = await watched(hang)
    assert not found
    assert canaries > 1


async def test_an_engine_that_streams_is_not_asked() -> None:
    assert await watched(drip, hangs=True) == (False, 0)


async def test_an_engine_that_steps_is_not_asked() -> None:
    """As with a prompt of many steps, behind which a canary would wait. Fails without ``work``."""
    steps = iter(range(1_000_000))
    found = await watched(hang, hangs=True, work=lambda: {"steps": float(next(steps))})
    assert found == (False, 0)


async def test_an_engine_without_work_is_not_asked() -> None:
    async def answer(emit: Emit) -> None:
        emit(DELTA)

    assert await watched(answer, hangs=True) == (False, 0)
