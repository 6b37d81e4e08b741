"""An engine that hangs differs from one that is slow or idle."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

import pytest

from triptych.engines.base import Emit, Generation, Media
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, Sampling, Work
from triptych.stages import health
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeStage
from triptych.stages.health import EngineHealth, MonitoredEngine, wait_for_hang
from triptych.transfer.client import TransferClient

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
    monkeypatch.setattr(health, "TICK", LIMIT / 10)


async def watched(
    behave: Callable[[Emit], Awaitable[None]],
    hangs: bool = False,
    steps: Callable[[], float] = lambda: 1.0,
    seconds: float = 20 * LIMIT,
) -> tuple[bool, int]:
    """Whether it was found to hang within so long, and the canaries that were sent."""
    counts = EngineHealth()
    inner = Engine(behave, hangs)
    engine = MonitoredEngine(inner, counts)
    request = asyncio.create_task(engine.generate(GENERATION, lambda _: None))
    await asyncio.sleep(0)

    async def probe() -> None:
        await engine.generate(GENERATION, lambda _: None)

    watching = asyncio.create_task(wait_for_hang(counts, steps, probe, LIMIT))
    await asyncio.wait([watching], timeout=seconds)
    found = watching.done()
    for task in (request, watching):
        task.cancel()
    await asyncio.gather(request, watching, return_exceptions=True)
    assert counts.waiting == 0
    return found, inner.calls - 1


async def test_an_engine_that_answers_no_request_hangs() -> None:
    found, canaries = await watched(hang, hangs=True, seconds=10.0)
    assert found
    assert canaries == 1


async def test_one_slow_request_is_not_a_hanging_engine() -> None:
    """Fails without the canary."""
    found, canaries = await watched(hang)
    assert not found
    assert canaries > 1


async def test_an_engine_that_streams_is_not_asked() -> None:
    assert await watched(drip, hangs=True) == (False, 0)


async def test_an_engine_that_steps_is_not_asked() -> None:
    """As with a prompt of many steps, behind which a canary would wait. Fails without ``steps``."""
    count = itertools.count()
    assert await watched(hang, hangs=True, steps=lambda: float(next(count))) == (False, 0)


async def test_an_engine_without_work_is_not_asked() -> None:
    async def answer(emit: Emit) -> None:
        emit(DELTA)

    assert await watched(answer, hangs=True) == (False, 0)


async def test_a_cancelled_call_has_no_answer() -> None:
    """Else clients that come and go would hide a hang for ever."""
    counts = EngineHealth()
    engine = MonitoredEngine(Engine(hang, hangs=True), counts)

    async def come_and_go() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT / 5):
                    await engine.generate(GENERATION, lambda _: None)

    async def probe() -> None:
        await engine.generate(GENERATION, lambda _: None)

    waits = asyncio.create_task(engine.generate(GENERATION, lambda _: None))
    others = asyncio.create_task(come_and_go())
    await asyncio.sleep(0)
    await asyncio.wait_for(wait_for_hang(counts, lambda: 0.0, probe, LIMIT), 10)
    for task in (waits, others):
        task.cancel()
    await asyncio.gather(waits, others, return_exceptions=True)


async def test_the_encoders_canary_goes_through_the_encoder_each_time() -> None:
    """What was encoded at the start is cached: it would not reach a hang. Fails with one salt."""
    transfers, seen = TransferClient("inline", "E-0", 1), list[PreparedMedia]()

    class Encoder:
        recipes = None

        async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
            seen.extend(items)
            return [Media(item.meta, ()) for item in items]

    stage = EncodeStage(Encoder(), None, EmbeddingCache(1 << 20, 1 << 20, 10), transfers)
    for _ in range(3):
        await health.encode_canary(stage)
    assert len(seen) == 3
