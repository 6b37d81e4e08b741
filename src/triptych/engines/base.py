"""Two verbs make an engine: ``Encoder.encode`` and ``Engine.generate``.

An engine is named in ENGINES and imported only when chosen, in an environment of its own where it
brings one. It never sees the request plane, tickets or other workers: it takes arrays and gives
arrays and tokens.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.config import Config
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, KvEvent, MediaMeta, ParameterCounts, Work
from triptych.recipe import Recipes
from triptych.topology import Role
from triptych.transfer.base import Array

Allocate = Callable[
    [str, tuple[int, ...]], Array
]  # Transfer.empty: memory that leaves without a copy


class AllocateOnGpu(Protocol):
    """Empty, and of a GPU's memory where that is named and has some."""

    def __call__(
        self, dtype: str, shape: tuple[int, ...], /, *, gpu: int | None = None
    ) -> Array: ...


ReportProgress = Callable[[str, float], None]  # what is being done, and how much of it (0 to 1)


@dataclass(frozen=True, slots=True)
class Media:
    """A media item as an engine takes it.

    ``arrays`` is its embedding; or, not ``encoded``, what the engine's own tower takes, where
    encoder and engine are of one kind and in one process. It is empty where only identity and grid
    matter (decode), and where the engine fetches the embedding itself.
    """

    meta: MediaMeta
    arrays: tuple[Array, ...]
    encoded: bool = True


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What span P gives: the first token, and the KV cache unless that token was the last.

    An engine that moves its KV cache itself gives a note (``foreign.notes``) that its own kind
    reads at D. It may give it before there is a first token: ``delta`` is empty then, and D emits
    that too.
    """

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


Emit = Callable[[Delta | PrefillOutput], None]


@dataclass(frozen=True, slots=True)
class EngineReport:
    parameters: ParameterCounts = field(default_factory=ParameterCounts)
    queued: int = 0
    running: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # free now, or kept only for re-use
    counters: dict[str, float] = field(default_factory=dict)


class EncoderStats(Protocol):
    """An encoder that can say what it has to do."""

    @property
    def queued(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def counters(self) -> dict[str, float]: ...


def with_encoder_stats(engine: EngineReport, encoder: EncoderStats | None) -> EngineReport:
    """One report of a worker that may hold both."""
    if encoder is None:
        return engine
    return replace(
        engine,
        queued=engine.queued + encoder.queued,
        running=engine.running + encoder.running,
        counters=engine.counters | encoder.counters,
    )


OnKvEvents = Callable[[Sequence[KvEvent]], None]


@dataclass(frozen=True, slots=True)
class PrefixCacheInfo:
    """A prefix cache that tells what it holds.

    ``listen`` takes the one who is told what is stored and removed from then on, and to miss
    nothing it is called before the first ``generate``. He is called on the event loop, once for all
    of a step, and must not raise.
    """

    block_size: int  # tokens
    blocks: int  # that it can hold at most
    listen: Callable[[OnKvEvents], None]
    # The engine can prefill media from this cache alone, see ``Engine.generate``.
    can_prefill_from_cache: bool = False


class Encoder(Protocol):
    @property
    def recipes(self) -> Recipes | None:
        """How it wants its media prepared. None: it takes files as they are."""

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        """Prepared media to embeddings, batched with whatever else is waiting.

        None of them is ``encoded``: an embedding that a client brought does not come here.
        The arrays of the items may not be changed or given back before the call ends. Those of the
        result are memory that a transport hands over without a copy, and never change again: what
        a GPU has to write there is written.
        """


class Engine(Protocol):
    async def generate(self, generation: Generation, emit: Emit) -> None:
        """Emit deltas on the event loop until the stream ends.

        Span P emits one Prefilled, and may go on until whoever decodes has all of it. Span D emits
        what follows ``generation.first``; from its first delta on it no longer needs
        ``generation.kv``. Spans with P no longer need ``media`` after the first delta. Cancelling
        the call frees everything that it held. A caller that finds borrowed arrays stale cancels
        its task within the first ``emit``: nothing made of them may be kept. A GPU has then read
        what it reads of them, and has written what a Prefilled holds.

        Every engine answers span PD without media, whatever its role: it shows that it works. One
        that ``can_prefill_from_cache`` also answers it with media that have no arrays, if all
        that stands for them is in its prefix cache, and else raises PrefixEvicted before emitting
        anything. One that ``resumes`` takes ``Work.generated`` for what it has generated already:
        spans with P compute it with the prompt and emit the token that follows, as if it had never
        stopped. There is one: an answer that was delivered whole is not asked for again.
        What is the fault of a place raises WorkerLost or TicketLost and is tried elsewhere; what
        is the request's own raises a RequestError; all else is EngineFailed.
        """


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What one worker has loaded: only the parts of its role are there."""

    encoder: Encoder | None
    engine: Engine | None
    report: Callable[[], EngineReport]
    close: Callable[[], None]
    died: asyncio.Event | None = None  # set when the engine can't go on: the worker then ends
    cache: PrefixCacheInfo | None = None  # None: it keeps no prefixes, or does not tell which
    resumes: bool = False  # the engine goes on after ``Work.generated``, see ``Engine.generate``
    gpu: int | None = None  # it takes arrays in memory of this GPU too, by CUDA's count
    gpu_lent: int = 0  # bytes of it that may be lent to other workers; 0: as the transport decides
    device: str = ""  # cpu or cuda; empty: none


LoadEngine = Callable[[Config, Role, AllocateOnGpu, ReportProgress], LoadedEngine]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What is known of an engine before it is imported."""

    module: str  # has ``load``
    package: str = ""  # that it is made of, to be found in its own environment; none: ours
    setup: str = ""  # how to come by that environment


ENGINES = {
    "torch": EngineKind("triptych.engines.torch.load"),
    "fake": EngineKind("triptych.engines.fake"),
    "vllm": EngineKind(
        "triptych.engines.vllm.load", "vllm", "`make setup-vllm` builds one for a CPU"
    ),
    "sglang": EngineKind(
        "triptych.engines.sglang.load",
        "sglang",
        "`make setup-sglang` builds one for a CPU",
    ),
    "trtllm": EngineKind(
        "triptych.engines.trtllm.load",
        "tensorrt_llm",
        "install it as its makers tell (this adapter was never run against TensorRT-LLM)",
    ),
}


def find_engine(name: str) -> LoadEngine:
    """The ``load`` function of an engine by its name in ENGINES."""
    load: LoadEngine = importlib.import_module(ENGINES[name].module).load
    return load
