"""Runs completions: from prompts through the pipeline to the response, whole or streamed.

Each choice is one Work. The choices of a request run together; if one fails, all fail. ``handlers``
reads requests, ``pipeline`` finds workers and calls them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import msgspec

from triptych.api import requests
from triptych.api.anthropic_responses import MessageEvents, MessagesFormat
from triptych.api.echo import EchoFormat
from triptych.api.replies import (
    ParsedChoice,
    ParsedStreamedChoice,
    ReplyParsing,
    apply_grammar,
)
from triptych.api.request_record import record_of
from triptych.api.requests import ChatRequest, CompletionRequest
from triptych.api.response_objects import ResponseEvents, ResponsesFormat
from triptych.api.responses import CompletionFormat, TextFormat, Usage, response_body
from triptych.api.stream import (
    BufferedChoice,
    EventStream,
    StreamedChoice,
    TokenReader,
    total_usage,
)
from triptych.api.structured import grammar_parameter
from triptych.checkpoint import Model
from triptych.errors import ContextLengthExceeded, EngineFailed, InvalidSchema, InvalidValue
from triptych.http.exchange import HTTPExchange, new_id
from triptych.messages import MediaItem, PromptInfo, Sampling, Work
from triptych.observe.metrics import Metrics
from triptych.pipeline.request import Backpressure
from triptych.pipeline.run import Pipeline
from triptych.prompt.detokenizer import Detokenizer
from triptych.prompt.processor import Prompt
from triptych.prompt.tokenizer import Tokenizer
from triptych.runtime.concurrency import QuietTaskGroup
from triptych.sources.loader import MediaLoader, load_items

STREAMS: dict[type, type[EventStream]] = {  # of formats with events of their own
    MessagesFormat: MessageEvents,
    ResponsesFormat: ResponseEvents,
}


class CompletionRunner:
    """Runs the choices of completion requests for one model."""

    def __init__(
        self,
        name: str,
        model: Model,
        tokenizer: Tokenizer,
        sources: MediaLoader,
        pipeline: Pipeline,
        metrics: Metrics,
        grammar_bytes: int,
    ) -> None:
        self.metrics = metrics
        self._grammar_bytes = grammar_bytes
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._sources = sources
        self._pipeline = pipeline
        special = set(tokenizer.specials.values())  # these have no text that a client could see
        self._end_ids = tuple(id for id in model.end_ids if id not in special)
        self._special_tokens = tuple(tokenizer.specials)

    async def complete(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        format: CompletionFormat,
        prompts: Sequence[Prompt],
        parsing: ReplyParsing | None = None,
    ) -> None:
        """Run all choices of all prompts and send the response. ``parsing``: of their output."""
        try:
            await self._complete(exchange, request, format, prompts, parsing)
        except InvalidSchema as error:
            error.param = error.param or grammar_parameter(request) or "tools"
            raise

    async def _complete(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        format: CompletionFormat,
        prompts: Sequence[Prompt],
        parsing: ReplyParsing | None,
    ) -> None:
        exchange.id = new_id(format.id_prefix)
        longest = len(prompts[0].ids)
        if len(prompts) > 1:
            longest = max(len(prompt.ids) for prompt in prompts)
        sampling = requests.to_sampling(
            request,
            self._model.vocabulary,
            self._model.context - longest,
            self._grammar_bytes,
            await self._bad_words(request.bad_words) if request.bad_words else (),
        )
        if parsing is not None:
            parsing, sampling = apply_grammar(parsing, sampling, request, self._grammar_bytes)
        if sampling.grammar is not None and sampling.allowed_token_ids:
            raise InvalidValue(
                "Structured output chooses the tokens itself; leave out allowed_token_ids.",
                param="allowed_token_ids",
            )
        self._check_length(prompts, sampling)
        if (top := sampling.prompt_logprobs) is not None:
            requests.check_prompt_logprobs(request, top, sum(len(p.ids) for p in prompts))
        salt = cache_scope(exchange.head.tenant, request.cache_salt)
        respond = self._stream if request.stream else self._send_whole
        sources = prompts[0].media  # a chat is one prompt; several prompts are text only
        seconds: dict[str, float] = {}  # by stage
        if (record := record_of(exchange)) is not None:
            record.seconds, record.n = seconds, request.n or 1
            if sources:
                record.check_media()
        if not sources:
            works = _works(exchange.id, request, prompts, (), sampling, salt)
            await respond(exchange, request, format, works, seconds, parsing)
        else:
            start = time.monotonic()
            async with load_items(sources, self._sources, salt) as media:
                seconds["fetch"] = time.monotonic() - start
                if record is not None:
                    record.count_media(sum(len(item.data) for item in media))
                works = _works(exchange.id, request, prompts, media, sampling, salt)
                await respond(exchange, request, format, works, seconds, parsing)
        self.metrics.latency.add(time.monotonic() - exchange.received)

    async def _send_whole(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        format: CompletionFormat,
        works: Sequence[Work],
        seconds: dict[str, float],
        parsing: ReplyParsing | None,
    ) -> None:
        return_ids, received = bool(request.return_token_ids), exchange.received
        kind = BufferedChoice if parsing is None else ParsedChoice
        choices: list[BufferedChoice] = []
        if isinstance(request, CompletionRequest) and request.echo:
            format = await self._echo(request, works, choices)
        choices += [
            kind(
                i,
                work,
                self._reader(request, work, parsing),
                return_ids,
                self.metrics,
                received,
            )
            for i, work in enumerate(works)
        ]
        seconds |= await self._run(exchange, choices, [Backpressure() for _ in choices])
        response = format.completion(
            id=exchange.id,
            created=int(time.time()),
            model=self._name,
            choices=[
                format.choice(choice.index, choice.output(), choice.finish)
                for choice in choices
                if choice.finish is not None  # _run_one guarantees that all have finished
            ],
            usage=_usage(choices, request),
            prompt_token_ids=choices[0].prompt_ids,
        )
        if (top := request.prompt_logprobs) is not None:
            prompts = [_scored_prompt(choices, i, request.n or 1) for i in range(len(choices))]
            if works[0].media and prompts[0] is not None:  # only now its tokens are known
                requests.check_prompt_logprobs(request, top, prompts[0].tokens)
            # They can be many: the event loop goes on meanwhile.
            response = await asyncio.to_thread(format.with_prompt_logprobs, response, prompts)
        timing = b"server-timing: %b\r\n" % _timing(seconds) if seconds else b""
        exchange.send(200, *response_body(response), timing)

    async def _stream(
        self,
        exchange: HTTPExchange,
        request: ChatRequest | CompletionRequest,
        format: CompletionFormat,
        works: Sequence[Work],
        seconds: dict[str, float],
        parsing: ReplyParsing | None,
    ) -> None:
        return_ids, received = bool(request.return_token_ids), exchange.received
        options = request.stream_options
        include_usage = bool(options and options.include_usage)
        kind = StreamedChoice if parsing is None else ParsedStreamedChoice
        choices: list[StreamedChoice] = []
        if isinstance(request, CompletionRequest) and request.echo:
            format = await self._echo(request, works, choices)
        stream = STREAMS.get(type(format), EventStream)
        events = stream(exchange, format, self._name, int(time.time()), include_usage)
        choices += [
            kind(
                i,
                work,
                self._reader(request, work, parsing),
                return_ids,
                self.metrics,
                received,
                events,
            )
            for i, work in enumerate(works)
        ]
        if options and options.continuous_usage_stats:
            events.usage_so_far = functools.partial(_usage, choices, request)
        flows = [Backpressure() for _ in choices]
        exchange.streams = len(flows)
        exchange.flow = flows[0] if len(flows) == 1 else _FlowGroup(flows)
        seconds |= await self._run(exchange, choices, flows)
        if include_usage:
            events.end(_usage(choices, request), _timing(seconds))
        else:
            events.end()

    def _check_length(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Refuse a prompt that is too long. Engines check again, with the tokens of the media."""
        for prompt in prompts:
            if len(prompt.ids) + (sampling.max_tokens or 1) > self._model.context:
                raise ContextLengthExceeded.of(
                    len(prompt.ids),
                    sampling.max_tokens,
                    self._model.context,
                    without_media=bool(prompt.media),
                )

    def _reader(
        self, request: ChatRequest | CompletionRequest, work: Work, parsing: ReplyParsing | None
    ) -> TokenReader:
        if parsing is None:
            return self._detokenizer(request)
        detokenizer = self._detokenizer(request, parsing.kept)
        return parsing.reader(detokenizer, self._tokenizer, work.prompt, self._model.context)

    def _detokenizer(
        self, request: ChatRequest | CompletionRequest, kept: tuple[str, ...] = ()
    ) -> Detokenizer:
        end_ids = self._end_ids
        if request.skip_special_tokens is False:
            kept, end_ids = self._special_tokens, self._model.end_ids
        return Detokenizer(
            self._tokenizer,
            requests.stop_strings(request),
            (*(() if request.ignore_eos else end_ids), *(request.stop_token_ids or ())),
            kept,
            min_tokens=request.min_tokens or 0,
            include_stop=bool(request.include_stop_str_in_output),
        )

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        tokenizer, characters = self._tokenizer, 2 * sum(map(len, words))  # each is encoded twice
        return await tokenizer.run(characters, requests.find_bad_words, words, tokenizer)

    async def _echo(
        self,
        request: CompletionRequest,
        works: Sequence[Work],
        choices: Sequence[BufferedChoice],
    ) -> EchoFormat:
        """The format that begins each choice with its prompt, in the client's own words."""
        n, skip_special = request.n or 1, request.skip_special_tokens is not False
        texts = [
            given if isinstance(given, str) else await self._tokenizer.decode(given, skip_special)
            for given in requests.to_prompts(request)
        ]
        return EchoFormat(
            TextFormat(self._tokenizer.token_bytes),
            [text for text in texts for _ in range(n)],
            [work.prompt for work in works],
            lambda index: _scored_prompt(choices, index, 1 if request.stream else n),
            shows_output=request.max_tokens != 0,
        )

    async def _run(
        self,
        exchange: HTTPExchange,
        choices: Sequence[BufferedChoice],
        flows: Sequence[Backpressure],
    ) -> dict[str, float]:
        """Run all choices; return the most seconds that each stage took."""
        if exchange.large:
            choices[0].on_first_token = exchange.response_started
        if (record := record_of(exchange)) is not None:
            record.run(choices)
        if len(choices) == 1:
            choices[0].task = exchange.task
            return await self._run_one(choices[0], flows[0])
        runs: list[asyncio.Task[dict[str, float]]] = []
        try:
            async with QuietTaskGroup() as group:
                for choice, flow in zip(choices, flows, strict=True):
                    choice.task = group.create_task(self._run_one(choice, flow))
                    runs.append(choice.task)
            results = [run.result() for run in runs]
        finally:
            runs.clear()  # an error refers to this frame: with its task that would be a cycle
        longest: dict[str, float] = {}
        for result in results:
            for stage, seconds in result.items():
                longest[stage] = max(seconds, longest.get(stage, 0.0))
        return longest

    async def _run_one(self, choice: BufferedChoice, flow: Backpressure) -> dict[str, float]:
        """Run one choice in the task ``choice.task``, which a stop string cancels."""
        try:
            seconds = await self._run_work(choice, flow)
            while choice.interrupted:
                choice.resume()
                if choice.finish is None:
                    seconds |= await self._run_work(choice, flow)
        finally:
            choice.task = None
            self._count(choice)
        if choice.finish is None:
            raise EngineFailed("a run ended without a finish reason")
        return seconds

    async def _run_work(self, choice: BufferedChoice, flow: Backpressure) -> dict[str, float]:
        task = choice.task
        try:
            seconds = await self._pipeline.run(choice.work, choice.deliver, flow)
            if choice.stopped and task is not None and task.cancelling():
                await asyncio.sleep(0)  # the run ended by itself: receive the pending cancel
        except asyncio.CancelledError:
            if not choice.stopped or task is None or task.uncancel():
                raise
            return {}
        return seconds

    def _count(self, choice: BufferedChoice) -> None:
        self.metrics.output_tokens += choice.count
        if choice.prompt is not None:
            self.metrics.prompt_tokens += choice.prompt.tokens
            self.metrics.cached_tokens += choice.prompt.cached


class _FlowGroup:
    """The flows of several choices, whose tokens one client reads."""

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
    """A Work for each choice; the choices of one prompt differ in their seed.

    The first of them also asks for the log-probabilities of the prompt. In a stream all do: any
    choice may begin before the first.
    """
    n, return_ids = request.n or 1, bool(request.return_token_ids)
    if len(prompts) * n == 1:
        return [Work(id, prompts[0].ids, media, sampling, salt, return_ids)]
    scores = sampling.prompt_logprobs if request.stream else None
    samplings = [sampling] + [
        msgspec.structs.replace(
            sampling, seed=requests.derive_seed(sampling.seed, i), prompt_logprobs=scores
        )
        for i in range(1, n)
    ]
    return [
        Work(f"{id}-{p * n + i}", prompt.ids, media, samplings[i], salt, return_ids)
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


def _scored_prompt(choices: Sequence[BufferedChoice], index: int, n: int) -> PromptInfo | None:
    """The prompt of a choice with its log-probabilities, which the first of ``n`` has."""
    return choices[index - index % n].prompt


def _usage(choices: Sequence[BufferedChoice], request: ChatRequest | CompletionRequest) -> Usage:
    usage = total_usage(choices, request.n or 1)
    if request.max_tokens != 0:
        return usage
    # Only the echo of the prompt was asked for.
    return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)


def cache_scope(tenant: str, salt: str | None) -> str:
    """The scope of cache entries: tenants never share them, nor do salts of one tenant."""
    return f"{tenant}\n{salt or ''}" if tenant or salt else ""


def _timing(seconds: dict[str, float]) -> bytes:
    """The value of a Server-Timing header."""
    return b", ".join([b"%b;dur=%.3f" % (stage.encode(), s * 1e3) for stage, s in seconds.items()])
