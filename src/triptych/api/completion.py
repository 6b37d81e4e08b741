"""The way of a completion: from prompts through the pipeline to the answer, whole or streamed.

One work for each choice; they run together and one that fails fails all. HTTP and the reading of
requests are behind it, tokens and workers before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from triptych.api import requests
from triptych.api.requests import ChatRequest, CompletionRequest
from triptych.api.responses import CompletionFormat, encode
from triptych.api.stream import BufferedChoice, EventStream, StreamedChoice, total_usage
from triptych.checkpoint import Model
from triptych.errors import ContextLengthExceeded, EngineFailed
from triptych.http.exchange import JSON, HTTPExchange, new_id
from triptych.messages import Delta, MediaItem, Sampling, Work, WorkerReport
from triptych.observe.metrics import Metrics
from triptych.pipeline.request import Backpressure
from triptych.pipeline.unused_workers import UnusedWorker
from triptych.prompt.detokenizer import Detokenizer
from triptych.prompt.processor import Prompt
from triptych.prompt.tokenizer import Tokenizer
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.runtime.discovery import DiscoveryStatus
from triptych.sources.items import Sources, load_items


class Pipeline(Protocol):
    """The corridor, as far as it is seen from here."""

    tensor_bytes: int  # that came through this process inside tickets

    async def run(
        self, work: Work, deliver: Callable[[Delta], None], flow: Backpressure | None = None
    ) -> dict[str, float]: ...

    def missing(self) -> tuple[str, ...]: ...

    @property
    def standing(self) -> DiscoveryStatus: ...

    @property
    def unused(self) -> tuple[UnusedWorker, ...]: ...

    @property
    def routing(self) -> dict[str, float]: ...

    async def cluster(self) -> list[WorkerReport]: ...


class CompletionRunner:
    """Runs the choices of completion requests for one model under one name."""

    def __init__(
        self,
        name: str,
        model: Model,
        tokenizer: Tokenizer,
        sources: Sources,
        pipeline: Pipeline,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._sources = sources
        self._pipeline = pipeline
        special = set(tokenizer.specials.values())  # those have no text that could show
        self._ends = tuple(id for id in model.end_ids if id not in special)

    async def complete(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        shape: CompletionFormat,
        prompts: Sequence[Prompt],
        begun: float,
    ) -> None:
        """From prompts to the answer."""
        id = exchange.id = new_id(shape.prefix)
        sampling = requests.to_sampling(request, self._model.vocabulary)
        self._check_length(prompts, sampling)
        salt = cache_scope(exchange.head.tenant, request.cache_salt)
        placed = prompts[0].media  # of a chat, which is one prompt: several are plain text
        if not placed:
            works = _works(id, request, prompts, (), sampling, salt)
            await self._answer(exchange, request, shape, works, begun, {})
            return
        start = time.monotonic()
        async with load_items(placed, self._sources, salt) as media:
            spent = {"fetch": time.monotonic() - start}
            works = _works(id, request, prompts, media, sampling, salt)
            await self._answer(exchange, request, shape, works, begun, spent)

    async def _answer(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        shape: CompletionFormat,
        works: Sequence[Work],
        begun: float,
        spent: dict[str, float],
    ) -> None:
        """Run the works and tell what they give, whole or as it comes. ``spent``: until here."""
        n = request.n or 1
        envelope: dict[str, Any] = {
            "id": exchange.id,
            "object": shape.chunk if request.stream else shape.whole,
            "created": int(time.time()),
            "model": self._name,
        }
        tell_ids, told = bool(request.return_token_ids), self.metrics
        choices: Sequence[BufferedChoice]
        if not request.stream:
            choices = [
                BufferedChoice(i, work, self._detokenizer(request), tell_ids, told, begun)
                for i, work in enumerate(works)
            ]
            spent |= await self._run(exchange, choices, [Backpressure() for _ in choices])
            answer = _whole(envelope, shape, choices, n, tell_ids)
            timing = b"server-timing: %b\r\n" % _timing(spent) if spent else b""
            exchange.send(200, encode(answer), JSON, timing)
        else:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            if with_usage:
                envelope["usage"] = None
            events = EventStream(exchange, shape, envelope)
            choices = [
                StreamedChoice(i, work, self._detokenizer(request), tell_ids, told, begun, events)
                for i, work in enumerate(works)
            ]
            flows = [Backpressure() for _ in choices]
            exchange.streams = len(flows)
            exchange.flow = flows[0] if len(flows) == 1 else _Together(flows)
            spent |= await self._run(exchange, choices, flows)
            if with_usage:
                events.end(total_usage(choices, n), _timing(spent))
            else:
                events.end()
        self.metrics.latency.add(time.monotonic() - begun)

    def _check_length(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Before anything is fetched; with the media's own tokens, an engine counts again."""
        for prompt in prompts:
            if len(prompt.ids) + (sampling.max_tokens or 1) > self._model.context:
                raise ContextLengthExceeded.of(
                    len(prompt.ids), sampling.max_tokens, self._model.context
                )

    def _detokenizer(self, request: ChatRequest | CompletionRequest) -> Detokenizer:
        ends = () if request.ignore_eos else self._ends
        return Detokenizer(
            self._tokenizer,
            requests.stop_strings(request),
            (*ends, *(request.stop_token_ids or ())),
        )

    async def _run(
        self,
        exchange: HTTPExchange,
        choices: Sequence[BufferedChoice],
        flows: Sequence[Backpressure],
    ) -> dict[str, float]:
        """Run all choices; one that fails fails them all."""
        if exchange.large:
            choices[0].heard = exchange.answered
        if len(choices) == 1:
            choices[0].task = exchange.task
            return await self._run_one(choices[0], flows[0])
        runs: list[asyncio.Task[dict[str, float]]] = []
        try:
            async with QuietTaskGroup() as group:
                for choice, flow in zip(choices, flows, strict=True):
                    choice.task = group.create_task(self._run_one(choice, flow))
                    runs.append(choice.task)
        except BaseException:
            runs.clear()  # else the error would hold them, and they it, with all their media
            raise
        spent: dict[str, float] = {}
        for run in runs:
            for stage, seconds in run.result().items():
                spent[stage] = max(seconds, spent.get(stage, 0.0))
        return spent

    async def _run_one(self, choice: BufferedChoice, flow: Backpressure) -> dict[str, float]:
        """One choice, in the task that ``choice.task`` is: a stop string cancels it."""
        task = choice.task
        spent: dict[str, float] = {}
        try:
            spent = await self._pipeline.run(choice.work, choice.deliver, flow)
            if choice.stopped and task is not None and task.cancelling():
                await asyncio.sleep(0)  # the run ended by itself; take the cancel that is due here
        except asyncio.CancelledError:
            if not choice.stopped or task is None or task.uncancel():
                raise
        finally:
            choice.task = None
            self._count(choice)
        if choice.finish is None:
            raise EngineFailed("a run ended without a finish")
        return spent

    def _count(self, choice: BufferedChoice) -> None:
        self.metrics.output_tokens += choice.count
        if choice.prompt is not None:
            self.metrics.prompt_tokens += choice.prompt.tokens
            self.metrics.cached_tokens += choice.prompt.cached


class _Together:
    """The flows of several choices, which share one reader."""

    def __init__(self, flows: Sequence[Backpressure]) -> None:
        self._flows = flows

    def pause(self) -> None:
        for flow in self._flows:
            flow.pause()

    def resume(self) -> None:
        for flow in self._flows:
            flow.resume()


def _works(
    id: str,
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    media: tuple[MediaItem, ...],
    sampling: Sampling,
    salt: str,
) -> list[Work]:
    """A work for each choice; those of one prompt differ in their seed."""
    n = request.n or 1
    samplings = [sampling] + [
        msgspec.structs.replace(sampling, seed=requests.derive_seed(sampling.seed, i))
        for i in range(1, n)
    ]
    single = len(prompts) * n == 1
    return [
        Work(
            id if single else f"{id}-{p * n + i}",
            prompt.ids,
            media,
            samplings[i],
            salt,
            bool(request.return_token_ids),
        )
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


def cache_scope(tenant: str, salt: str | None) -> str:
    """What a cache entry is kept for: never shared between keys, nor between a key's salts."""
    return f"{tenant}\n{salt or ''}" if tenant or salt else ""


def _whole(
    envelope: dict[str, Any],
    shape: CompletionFormat,
    choices: Sequence[BufferedChoice],
    n: int,
    tell_ids: bool,
) -> dict[str, Any]:
    pieces = [choice.piece() for choice in choices]
    answer = envelope | {
        "choices": [
            shape.choice(choice.index, piece, choice.finish)
            for choice, piece in zip(choices, pieces, strict=True)
        ],
        "usage": total_usage(choices, n),
    }
    if tell_ids and pieces[0].prompt_ids is not None:
        answer["prompt_token_ids"] = list(pieces[0].prompt_ids)
    return answer


def _timing(spent: dict[str, float]) -> bytes:
    stages = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in spent.items()]
    return ", ".join(stages).encode()
