"""The interface of an engine: ``Encoder.encode`` and ``Engine.generate``.

ENGINES names every engine. A worker imports only the one it uses, in that engine's own Python
environment if it has one. An engine never sees the request plane, tickets or other workers: it
takes arrays and returns arrays and tokens.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, KvEvent, MediaMeta, ParameterCounts, Work
from triptych.recipe import Recipes
from triptych.topology import Role
from triptych.transfer.base import Array

Allocate = Callable[[str, tuple[int, ...]], Array]  # memory that a transport sends without a copy


class AllocateOnGpu(Protocol):
    """``Allocate`` that can also take memory of a GPU, if the transport has some there."""

    def __call__(
        self, dtype: str, shape: tuple[int, ...], /, *, gpu: int | None = None
    ) -> Array: ...


ReportProgress = Callable[[str, float], None]  # the current step, and how much is done (0 to 1)


def copy_arrays(arrays: Iterable[Array], allocate: Allocate) -> tuple[Array, ...]:
    """Copies in memory that a transport sends without another copy."""
    copies = []
    for array in arrays:
        copy = allocate(array.dtype, array.shape)
        copy.buffer[:] = array.buffer
        copies.append(copy)
    return tuple(copies)


@dataclass(frozen=True, slots=True)
class Media:
    """A media item as an engine takes it.

    ``arrays``: its embedding; or, if not ``encoded``, the input of the engine's own tower (encoder
    and engine are then of one kind and in one process). Empty where only identity and grid matter
    (decode), and where the engine fetches the embedding itself.
    """

    meta: MediaMeta
    arrays: tuple[Array, ...]
    encoded: bool = True


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """The output of phase P: the first token, and the KV cache unless that token was the last.

    An engine that moves its KV cache itself returns a note (``adapter.base.write_note``) that the
    same engine reads at D. It may do so before the first token: ``delta`` is then empty, and D
    emits the first token.
    """

    delta: Delta
    kv: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request to generate, as an engine takes it."""

    work: Work
    phases: str  # "P", "D" or "PD"
    media: tuple[Media, ...]  # one for each of work.media, in order
    kv: tuple[Array, ...] = ()  # phase D: what prefill handed over
    first: Delta | None = None  # phase D: what prefill has emitted


Emit = Callable[[Delta | PrefillOutput], None]


@dataclass(frozen=True, slots=True)
class EngineReport:
    parameters: ParameterCounts = field(default_factory=ParameterCounts)
    queued: int = 0
    running: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # unused, or cached without a user
    counters: dict[str, float] = field(default_factory=dict)


class EncoderStats(Protocol):
    """The load and the counters of an encoder."""

    @property
    def queued(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def counters(self) -> dict[str, float]: ...


def with_encoder_stats(engine: EngineReport, encoder: EncoderStats | None) -> EngineReport:
    """One report of a worker that may have an engine and an encoder."""
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
    """A prefix cache that reports its contents.

    ``listen`` takes a function that receives the KV events from then on; call it before the first
    ``generate`` to miss none. The engine calls the function on the event loop, once per step; it
    must not raise.
    """

    block_size: int  # tokens
    blocks: int  # its capacity
    listen: Callable[[OnKvEvents], None]
    # The engine can prefill media from this cache alone, see ``Engine.generate``.
    can_prefill_from_cache: bool = False


class Encoder(Protocol):
    @property
    def recipes(self) -> Recipes | None:
        """How the decode pool prepares its media. None: it takes files as they are."""

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        """Prepared media to embeddings, batched with the items of other calls.

        No item is ``encoded``: embeddings that a client sends do not come here. The caller keeps
        the items' arrays unchanged until the call ends. A transport sends the result's arrays
        without a copy, so they never change again: a GPU has finished writing them.
        """


class Engine(Protocol):
    async def generate(self, generation: Generation, emit: Emit) -> None:
        """Emit deltas on the event loop until the stream ends.

        Phase P emits one PrefillOutput, and may go on until the decode worker has read it. Phase D
        emits the tokens after ``generation.first``; from its first delta on it no longer needs
        ``generation.kv``. Phases with P no longer need ``media`` after the first delta. Cancelling
        the call frees everything it uses. A caller that finds borrowed arrays stale cancels this
        task within the first ``emit``: the engine must then drop everything computed from them.
        By then a GPU has finished reading them and writing the arrays of a PrefillOutput.

        Every engine answers phases PD without media, whatever its role: the health check uses it.
        An engine that ``can_prefill_from_cache`` also answers it with media without arrays, if all
        their blocks are in its prefix cache, and else raises PrefixGone before it emits. An
        engine that ``resumes`` takes ``Work.generated`` as its own tokens: phases with P compute
        them with the prompt and emit the tokens after them, with the same seed and penalties.
        At least one token is left: a complete answer is not requested again.

        WorkerLost and TicketLost are faults of a worker, and the pipeline tries another one. A
        RequestError is the request's own fault. Everything else is EngineFailed.
        """


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What a worker has loaded: the parts of its role."""

    encoder: Encoder | None
    engine: Engine | None
    report: Callable[[], EngineReport]
    close: Callable[[], None]
    died: asyncio.Event | None = None  # set when the engine can't go on: the worker then ends
    cache: PrefixCacheInfo | None = None  # None: it has none, or does not report it
    resumes: bool = False  # the engine goes on after ``Work.generated``, see ``Engine.generate``
    gpu: int | None = None  # index of a GPU whose memory its arrays may use, by CUDA's count
    gpu_lent: int = 0  # bytes of it for arrays sent to other workers; 0: the transport decides
    device: str = ""  # cpu or cuda; empty: none


LoadEngine = Callable[[Config, Role, AllocateOnGpu, ReportProgress], LoadedEngine]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What is known of an engine before it is imported."""

    module: str  # has ``load``
    package: str = ""  # the third-party package that its own environment has; empty: none
    setup: str = ""  # how to build that environment


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
        "install it as NVIDIA documents it (this adapter was never run against TensorRT-LLM)",
    ),
}


def engine_kind(name: str) -> EngineKind:
    """The engine of this name; InvalidConfig if there is none."""
    if name not in ENGINES:
        raise InvalidConfig(f"engine '{name}' is unknown; there are {', '.join(sorted(ENGINES))}")
    return ENGINES[name]


def find_engine(name: str) -> LoadEngine:
    """The ``load`` function of an engine by its name in ENGINES."""
    load: LoadEngine = importlib.import_module(ENGINES[name].module).load
    return load
