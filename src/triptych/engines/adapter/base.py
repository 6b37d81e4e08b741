"""What the adapters of third-party engines share: one request, on our side of the engine.

An adapter lays out the prompt (``lay_out``), translates the sampling settings by its own table
(``sampling_options``), submits the request to its engine and turns the engine's outputs into deltas
(``RequestStream``). ``engine_boundary`` translates the engine's exceptions into ours. An engine
that moves its KV cache itself sends its peer a note (``write_note``). Imports no engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct
from safetensors import safe_open

from triptych.checkpoint import Model
from triptych.engines.base import Allocate, Emit, Generation
from triptych.engines.checks import check_work
from triptych.errors import EngineFailed, TicketLost, TriptychError, UnsupportedParameter
from triptych.messages import (
    Delta,
    FinishReason,
    Grammar,
    ParameterCounts,
    PromptInfo,
    PromptLogprob,
    Sampling,
    TokenLogprob,
)
from triptych.models.family import Family
from triptych.models.layouts import Layout, locate_media
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import Array

log = logging.getLogger(__name__)
T = TypeVar("T")

LONG_PROMPT = 4096  # tokens: from here on a prompt is prepared in a thread
# Every engine uses OpenAI's words for the two ends of an answer. Other reasons are errors.
FINISH_REASONS: dict[str | None, FinishReason] = {
    reason: reason for reason in get_args(FinishReason)
}


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """The sampling settings of one request, and what an engine needs to apply them."""

    sampling: Sampling
    model: Model
    max_tokens: int  # to generate, within the context
    prefills: bool = True  # False: phase D, to which the prompt comes as a KV cache

    @property
    def min_tokens(self) -> int:
        """Engines refuse more than they may generate, and prefill alone generates one token."""
        return min(self.sampling.min_tokens, self.max_tokens)

    @property
    def stop_ids(self) -> list[int]:
        """All tokens that end the stream, the model's end tokens first. After an end token that a
        grammar permits nothing is left to generate."""
        ignored = self.sampling.ignore_eos and self.sampling.grammar is None
        ends = () if ignored else self.model.end_ids
        return list(dict.fromkeys((*ends, *self.sampling.stop_token_ids)))


def choices_as_ebnf(grammar: Grammar) -> str:
    """A grammar of kind choice for engines that take none."""
    strings = msgspec.json.decode(grammar.text, type=list[str])
    quoted = [msgspec.json.encode(string).decode() for string in strings]
    return f"root ::= {' | '.join(quoted)}"


# For every field of Sampling, how the engine takes it: the option that gets the same value, or a
# function that returns options, or raises UnsupportedParameter or InvalidValue. A test holds that
# every adapter's table has every field.
SamplingTable = Mapping[str, str | Callable[[SamplingRequest], Mapping[str, Any]]]


def refuse_unless_unset(field: str, engine: str) -> Callable[[SamplingRequest], Mapping[str, Any]]:
    """A rule for a field that the engine has no option for: only its default is taken."""
    default = getattr(Sampling(0), field)

    def rule(request: SamplingRequest) -> Mapping[str, Any]:
        if getattr(request.sampling, field) != default:
            raise UnsupportedParameter(
                f"This server's engine, {engine}, does not support {field}. Leave it out.",
                param=field,
            )
        return {}

    return rule


def sampling_options(table: SamplingTable, request: SamplingRequest) -> dict[str, Any]:
    """The engine's options for a request."""
    options: dict[str, Any] = {}
    for field, rule in table.items():
        if isinstance(rule, str):
            options[rule] = getattr(request.sampling, field)
        else:
            options |= rule(request)
    return options


async def lay_out(generation: Generation, family: Family, vocabulary: int) -> Layout:
    """Check a request and expand its prompt, as for every engine; a long prompt in a thread."""
    check_work(generation, vocabulary)
    work, metas = generation.work, [item.meta for item in generation.media]
    at = [item.at for item in work.media]
    expand = functools.partial(family.layout, work.prompt, at, metas)
    length = len(work.prompt) + sum(meta.tokens for meta in metas)
    return expand() if length < LONG_PROMPT else await in_thread(expand)


class RequestTimer:
    """Measures the stages of one request, for an engine that does not report them.

    The time before the first token is prefill, or at phase D the import of the KV cache; the time
    that the request waits in the engine's own queue is part of it.
    """

    def __init__(self, phases: str) -> None:
        self._before = "import" if phases == "D" else "prefill"
        self._started = time.perf_counter()
        self._first = 0.0

    def elapsed(self, *, ended: bool) -> dict[str, float] | None:
        """The seconds of each stage that ends with the current output. None: no stage ends."""
        now, spent = time.perf_counter(), {}
        if not self._first:
            self._first = now
            spent[self._before] = now - self._started
        if ended:
            spent["decode"] = now - self._first
        return spent or None


class RequestStream:
    """One request in the engine: makes deltas of its outputs.

    The first delta carries the prompt information and the last one the finish reason. Adds to
    ``counters``, where the adapter counts tokens itself.
    """

    def __init__(
        self, generation: Generation, layout: Layout, counters: Counter[str] | None = None
    ) -> None:
        self.begun = False  # the engine has returned something
        self.generated = 0  # tokens
        self.request_id = generation.work.id
        self.sampling = generation.work.sampling
        self.phases = generation.phases
        self.length = len(layout.ids)  # tokens of the prompt
        self._generation = generation
        self._layout = layout
        self._counters = Counter() if counters is None else counters
        self._timer = RequestTimer(generation.phases)

    def delta(
        self,
        ids: Sequence[int],
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        cached: int = 0,
        prompt_logprobs: tuple[PromptLogprob, ...] = (),
    ) -> Delta | None:
        """The next delta; None if the output has neither tokens nor a finish.

        ``cached``: how many tokens of the prompt the engine found in its prefix cache.
        """
        if not ids and finish is None:
            return None
        info = None if self.begun else self._begin(cached, prompt_logprobs)
        self.generated += len(ids)
        self._counters["generated_tokens"] += len(ids)
        decoded = finish is not None and self.phases != "P"
        spent = self._timer.elapsed(ended=decoded)
        return Delta(tuple(ids), finish, logprobs, info, spent)

    def prefill_delta(self, cached: int, prompt_logprobs: tuple[PromptLogprob, ...] = ()) -> Delta:
        """The delta of phase P without a token: D generates the first token again."""
        info = self._begin(cached, prompt_logprobs)
        return Delta((), None, (), info, self._timer.elapsed(ended=False))

    def _begin(self, cached: int, logprobs: tuple[PromptLogprob, ...]) -> PromptInfo:
        self.begun = True
        work, first = self._generation.work, self._generation.first
        self._counters["prompt_tokens"] += self.length
        if first is not None and first.prompt is not None:  # prefill ran in another worker
            return first.prompt
        self._counters["cached_tokens"] += cached
        ids = self._layout.ids if work.return_prompt_ids else None
        metas = [item.meta for item in self._generation.media]
        places = locate_media(self._layout, work, metas)
        return PromptInfo(self.length, cached, ids, places, logprobs)


async def emit_inputs_copied(emit: Emit) -> None:
    """Emit an empty delta: the adapter has copied the borrowed embeddings and the engine has not
    seen them yet. A caller that finds them stale cancels this task here."""
    emit(Delta(()))
    await asyncio.sleep(0)


def cancelled_in_emit() -> bool:
    """Whether the caller cancelled this task while it emitted: the borrowed inputs were stale."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def engine_boundary(
    request_id: str, translate: Callable[[Exception], TriptychError]
) -> Iterator[None]:
    """Raise ``translate(error)`` in place of whatever a third-party engine raises inside.

    ``request_id``: for the log; empty: the caller logs the error.
    """
    try:
        yield
    except TriptychError:
        raise
    except Exception as error:  # a third-party engine's exceptions have no common base
        translated = translate(error)
        if request_id and isinstance(translated, EngineFailed | TicketLost):
            log.exception("the engine failed on a request", extra={"request_id": request_id})
        raise translated from error


async def in_thread(function: Callable[[], T], threads: Executor | None = None) -> T:
    """The result of a function that runs in a thread.

    When the caller is cancelled it still waits for the function, which may read borrowed memory.
    """
    running = asyncio.get_running_loop().run_in_executor(threads, function)
    try:
        return await asyncio.shield(running)
    finally:
        await wait_until_done(running)


def write_note(allocate: Allocate, note: dict[str, Any] | Struct) -> Array:
    """A note for the same engine in another worker, as one array of JSON: tickets carry it like a
    tensor."""
    text = msgspec.json.encode(note)
    array = allocate("uint8", (len(text),))
    array.buffer[:] = text
    return array


def read_note(arrays: Sequence[Array], type: type[T]) -> T:
    """The note in what prefill handed over. It may come from another host: ``type`` checks it."""
    if len(arrays) != 1:
        raise TicketLost(f"prefill must hand over one note, and handed over {len(arrays)} arrays.")
    try:
        return msgspec.json.decode(bytes(arrays[0].buffer), type=type)
    except msgspec.DecodeError as error:
        raise TicketLost(f"prefill handed over an invalid note: {error}") from None


def checkpoint_sizes(family: Family, model: Model) -> ParameterCounts:
    """Parameters of a checkpoint's encoder and language model, from the headers of its files.

    For engines that do not report them: a loaded tensor may be packed or spread over processes.
    """
    counts = {"encoder": 0, "language": 0}
    for file in sorted(model.folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if (target := family.weight_name(name)) is not None:
                    counts[target[0]] += math.prod(tensors.get_slice(name).get_shape())
    return ParameterCounts(**counts)
