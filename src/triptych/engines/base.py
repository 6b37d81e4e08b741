"""Two verbs make an engine: ``Encoder.encode`` and ``Engine.generate``.

An engine is named in ENGINES and imported only when chosen. It never sees the request plane,
tickets or other workers: it takes arrays and gives arrays and tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.config import Config
from triptych.media.base import Prepared
from triptych.messages import Delta, MediaMeta, PartReport, Work
from triptych.recipe import Recipes
from triptych.topology import Role
from triptych.transfer.base import Array

Empty = Callable[[str, tuple[int, ...]], Array]  # Transfer.empty: memory that leaves without a copy
Progress = Callable[[str, float], None]  # what is being done, and how much of it (0 to 1)


@dataclass(frozen=True, slots=True)
class Media:
    """An encoded media item. ``arrays`` is empty where only identity and grid matter (decode)."""

    meta: MediaMeta
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What span P gives: the first token, and the KV cache unless that token was the last."""

    delta: Delta
    kv: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine is asked to generate."""

    work: Work
    span: str  # "P", "D" or "PD"
    media: tuple[Media, ...]  # one for each of work.media, in order
    kv: tuple[Array, ...] = ()  # span D: the KV cache that prefill handed over
    first: Delta | None = None  # span D: what prefill has emitted already


Emit = Callable[[Delta | Prefilled], None]


@dataclass(frozen=True, slots=True)
class EngineReport:
    parameters: PartReport = field(default_factory=PartReport)
    queued: int = 0
    running: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # free now, or kept only for re-use
    counters: dict[str, float] = field(default_factory=dict)


class Counting(Protocol):
    """An encoder that can say what it has to do."""

    @property
    def queued(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def counters(self) -> dict[str, float]: ...


def together(engine: EngineReport, encoder: Counting | None) -> EngineReport:
    """One report of a worker that may hold both."""
    if encoder is None:
        return engine
    return replace(
        engine,
        queued=engine.queued + encoder.queued,
        running=engine.running + encoder.running,
        counters=engine.counters | encoder.counters,
    )


class Encoder(Protocol):
    @property
    def recipes(self) -> Recipes | None:
        """How it wants its media prepared. None: it takes files as they are."""

    async def encode(self, items: Sequence[Prepared]) -> list[Media]:
        """Prepared media to embeddings, batched with whatever else is waiting.

        None of them is ``encoded``: an embedding that a client brought does not come here.
        The arrays of the items may not be changed or given back before the call ends. Those of the
        result are memory that a transport hands over without a copy, and never change again.
        """


class Engine(Protocol):
    async def generate(self, generation: Generation, emit: Emit) -> None:
        """Emit deltas on the event loop until the stream ends.

        Span P emits one Prefilled. Span D emits what follows ``generation.first``; from its first
        delta on it no longer needs ``generation.kv``. Spans with P no longer need ``media`` after
        the first. Cancelling the call frees everything that it held. A caller that finds borrowed
        arrays stale cancels its task within the first ``emit``: nothing made of them may be kept.
        """


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one worker has loaded: only the parts of its role are there."""

    encoder: Encoder | None
    engine: Engine | None
    report: Callable[[], EngineReport]
    close: Callable[[], None]


Load = Callable[[Config, Role, Empty, Progress], Loaded]

ENGINES = {
    "torch": "triptych.engines.torch.load",
    "fake": "triptych.engines.fake",
}


def find(name: str) -> Load:
    """The ``load`` function of an engine by its name in ENGINES."""
    load: Load = importlib.import_module(ENGINES[name]).load
    return load
