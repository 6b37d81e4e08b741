"""Whether a worker's encoder and engine work: canaries at the start, and a watch for hangs.

A canary is a small request of our own. One goes through encoder and engine before a worker becomes
ready. Later, a part that has work and neither answers nor steps for a while gets one more: that
tells one slow request from a part that hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from triptych.checkpoint import KINDS
from triptych.engines.base import (
    Emit,
    Encoder,
    Engine,
    Generation,
    LoadedEngine,
    Media,
    PrefillOutput,
)
from triptych.errors import ContextLengthExceeded, MediaError, StartError
from triptych.media.base import PreparedMedia
from triptych.media.samples import canary_file
from triptych.messages import Delta, MediaItem, Sampling, Work
from triptych.recipe import Recipes
from triptych.stages.encode import EncodeStage

log = logging.getLogger(__name__)
TICK = 1.0  # seconds
SALT = "canary"  # keeps canaries out of the caches of requests
_numbers = itertools.count()


class EngineHealth:
    """Of an encoder or an engine: how many calls wait for it, and how many answers it gave."""

    def __init__(self) -> None:
        self.waiting = 0
        self.answers = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self.waiting += 1
        answered = True
        try:
            yield
        except asyncio.CancelledError:  # a caller that gave up has no answer
            answered = False
            raise
        finally:
            self.waiting -= 1
            self.answers += answered


class MonitoredEngine:
    """An engine that counts its calls and answers in ``health``."""

    def __init__(self, engine: Engine, health: EngineHealth) -> None:
        self._engine = engine
        self._health = health

    async def generate(self, generation: Generation, emit: Emit) -> None:
        health = self._health

        def count_and_emit(answer: Delta | PrefillOutput) -> None:
            health.answers += 1
            emit(answer)

        with health.call():
            await self._engine.generate(generation, count_and_emit)


class MonitoredEncoder:
    """An encoder that counts its calls and answers in ``health``."""

    def __init__(self, encoder: Encoder, health: EngineHealth) -> None:
        self._encoder = encoder
        self._health = health

    @property
    def recipes(self) -> Recipes | None:
        return self._encoder.recipes

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        with self._health.call():
            return await self._encoder.encode(items)


def monitor(
    loaded: LoadedEngine, encoder_health: EngineHealth, engine_health: EngineHealth
) -> LoadedEngine:
    """The same encoder and engine, with their answers counted."""
    engine, encoder = loaded.engine, loaded.encoder
    return replace(
        loaded,
        engine=None if engine is None else MonitoredEngine(engine, engine_health),
        encoder=None if encoder is None else MonitoredEncoder(encoder, encoder_health),
    )


async def watch_for_hang(
    loaded: LoadedEngine,
    encoding: EncodeStage | None,
    encoder_health: EngineHealth,
    engine_health: EngineHealth,
    seconds: float,
    hung: asyncio.Event,
) -> None:
    """Set ``hung`` when encoder or engine hangs for so long. 0 seconds: do not watch."""
    if not seconds:
        return

    def steps() -> float:
        return loaded.report().counters.get("steps", 0.0)

    watches = []
    if encoding is not None:
        canary = partial(encode_canary, encoding)
        watches.append(wait_for_hang(encoder_health, lambda: 0.0, canary, seconds))
    if loaded.engine is not None:
        canary = partial(generate_canary, loaded.engine)
        watches.append(wait_for_hang(engine_health, steps, canary, seconds))
    tasks = [asyncio.ensure_future(watch) for watch in watches]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        hung.set()
    finally:
        for task in tasks:
            task.cancel()


async def wait_for_hang(
    health: EngineHealth,
    steps: Callable[[], float],
    canary: Callable[[], Awaitable[None]],
    seconds: float,
) -> None:
    """Return when calls have waited for so long and no answer came, for a canary neither.

    ``steps`` counts progress without answers, as of a long prompt. The time is counted in ticks of
    this loop: while the process is stopped, silence of the engine means nothing.
    """
    silent, last, sent = 0.0, (health.answers, steps()), None
    try:
        while silent < seconds:
            await asyncio.sleep(TICK)
            if not health.waiting or (health.answers, steps()) != last:
                silent, last = 0.0, (health.answers, steps())
                continue
            silent += TICK
            if silent >= seconds / 2 and (sent is None or sent.done()):
                sent = asyncio.ensure_future(_run_canary(canary))
    finally:
        if sent is not None:
            sent.cancel()  # without waiting: it may hang too


async def _run_canary(canary: Callable[[], Awaitable[None]]) -> None:
    """A canary that fails is an answer too; requests will show what is wrong."""
    try:
        await canary()
    except Exception as error:  # noqa: BLE001 (whatever an engine may raise)
        log.warning("the engine is silent, and a canary through it failed: %s", error)


async def check_start(engine: Engine | None, encoding: EncodeStage | None) -> None:
    """Send one media item through decoder and encoder, and one token through the engine."""
    if encoding is not None:
        try:
            await encode_canary(encoding)
        except MediaError as error:
            raise StartError(
                f"a small test item could not be decoded: {error.message} `triptych doctor` tries "
                "the same; are --limits-... too low?"
            ) from error
        except ContextLengthExceeded as error:
            raise StartError(
                f"a small test item does not fit: {error.message} Raise --max-model-len."
            ) from error
    if engine is not None:
        await generate_canary(engine)


async def encode_canary(encoding: EncodeStage) -> None:
    if (item := _canary_item(encoding)) is not None:
        await encoding.encode_alone(item, f"{SALT} {next(_numbers)}")  # a new salt: never cached


async def generate_canary(engine: Engine) -> None:
    # With logprobs: engines may compile their code for them at the first request that wants any.
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=1)
    work = Work("canary", (1, 2, 3), (), sampling, salt=SALT)
    await engine.generate(Generation(work, "PD", ()), lambda _: None)


def _canary_item(encoding: EncodeStage) -> MediaItem | None:
    """A small file of the first kind that the model takes."""
    kind = next((kind for kind in KINDS if encoding.takes(kind)), None)
    return None if kind is None else MediaItem(kind, 0, canary_file(kind))
