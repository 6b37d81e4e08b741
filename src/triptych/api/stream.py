"""The choices of a response while their tokens arrive: buffered, or sent as server-sent events.

Tokens arrive by a plain call on the event loop, and leave in that same call: no task wakes up for
them. ``responses`` says what a chunk looks like, ``completion`` runs the choices.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from triptych.api.responses import (
    ChoiceOutput,
    CompletionFormat,
    CompletionTokensDetails,
    PromptTokensDetails,
    ScoredToken,
    Usage,
    encode,
)
from triptych.http.exchange import HTTPExchange, StreamingResponse
from triptych.messages import Delta, FinishReason, MediaKind, PromptInfo, Work
from triptych.observe.metrics import Metrics

EVENT_STREAM = b"text/event-stream; charset=utf-8"
TEXT_MARK = "\x00"  # stands for the text in the template of a chunk


class TokenReader(Protocol):
    """Turns the tokens of a choice into text, and says where they end it."""

    @property
    def used(self) -> int:
        """Tokens of the answer, with the one that ended it."""

    @property
    def stopped(self) -> bool: ...

    @property
    def stop_string(self) -> str:
        """The one that ended the choice; empty if none did."""

    def push(self, ids: Sequence[int], last: bool = False) -> str: ...


class BufferedChoice:
    """One choice, kept until it is complete."""

    __slots__ = (
        "_ids",
        "_last_at",
        "_logprobs",
        "_metrics",
        "_reader",
        "_received",
        "_texts",
        "count",
        "finish",
        "index",
        "on_first_token",
        "prompt",
        "task",
        "work",
    )

    def __init__(
        self,
        index: int,
        work: Work,
        reader: TokenReader,
        return_ids: bool,
        metrics: Metrics,
        received: float,
    ) -> None:
        self.index = index
        self.work = work
        self.finish: FinishReason | None = None
        self.prompt: PromptInfo | None = None
        self.count = 0  # tokens of the choice
        self.task: Task[Any] | None = None  # runs the work; cancelled at a stop string
        self.on_first_token: Callable[[], None] | None = None
        self._reader = reader
        self._metrics = metrics
        self._received = received  # when the request arrived
        self._last_at = 0.0  # when the last token arrived
        self._texts: list[str] = []
        self._ids: list[int] | UnsetType = [] if return_ids else UNSET
        self._logprobs: list[ScoredToken] | None = None if work.sampling.logprobs is None else []

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the choice, and cancelled its task on purpose."""
        return self._reader.stopped

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning; None: it is not told from the content."""
        return None

    @property
    def interrupted(self) -> bool:
        """Whether the choice stopped in order to go on, by ``resume``."""
        return False

    def resume(self) -> None:
        """Prepare ``work`` for the rest of an interrupted choice."""

    def deliver(self, delta: Delta) -> None:
        if self.finish is None:
            text, ids = self._consume(delta)
            self._texts.append(text)
            if self._ids is not UNSET:
                self._ids += ids
            if self._logprobs is not None:
                self._logprobs += _scored_tokens(ids, delta)

    def _consume(self, delta: Delta) -> tuple[str, Sequence[int]]:
        """Update counts and metrics; return the new text and the tokens that belong to it."""
        now, ids, finish = monotonic(), delta.ids, delta.finish
        if self._last_at:
            self._metrics.between_tokens.add(now - self._last_at)
        else:
            self._metrics.first_token.add(now - self._received)
            self.prompt = delta.prompt
            if self.on_first_token is not None:
                self.on_first_token()
        self._last_at = now
        reader = self._reader
        text = reader.push(ids, finish is not None)
        if reader.stopped:
            ids = ids[: reader.used - self.count]
            self.finish = "stop"
            if finish is None and self.task is not None:
                self.task.cancel()
        elif finish is not None:
            self.finish = finish
        self.count += len(ids)
        return text, ids

    @property
    def prompt_ids(self) -> Sequence[int] | UnsetType:
        """The prompt's token ids, if the client asked for them."""
        return UNSET if self.prompt is None or self.prompt.ids is None else self.prompt.ids

    def output(self) -> ChoiceOutput:
        return ChoiceOutput(
            "".join(self._texts),
            self._ids,
            self._logprobs,
            0,
            self.prompt_ids,
            stop_string=self._reader.stop_string,
        )


class StreamedChoice(BufferedChoice):
    """One choice, sent to the client as its tokens arrive."""

    __slots__ = ("_events", "_offset", "_started", "_write_text")

    def __init__(
        self,
        index: int,
        work: Work,
        reader: TokenReader,
        return_ids: bool,
        metrics: Metrics,
        received: float,
        events: EventStream,
    ) -> None:
        super().__init__(index, work, reader, return_ids, metrics, received)
        self._events = events
        self._started = False
        self._offset = 0  # characters sent
        self._write_text: Callable[[bytes], None] | None = None  # writes a chunk with text only

    def deliver(self, delta: Delta) -> None:
        if self.finish is not None:
            return
        text, ids = self._consume(delta)
        write_text = self._write_text
        if write_text is not None and self.finish is None:
            if text:
                write_text(encode(text))
            return
        output = self._output(text, ids, delta)
        self._offset += len(text)
        chunks = self._encode_chunks(output)
        if not chunks:
            return  # no text yet: the next delta is still the first
        response, first = self._events.send(chunks), not self._started
        self._started = True
        if first and self._text_only:
            self._write_text = response.writer(*self._events.text_template(self.index))

    @property
    def _text_only(self) -> bool:
        """Whether all but the first and the last chunk have text and nothing else."""
        return self._ids is UNSET and self._logprobs is None and self._events.has_text_template

    def _output(self, text: str, ids: Sequence[int], delta: Delta) -> ChoiceOutput:
        return ChoiceOutput(
            text,
            UNSET if self._ids is UNSET else ids,
            None if self._logprobs is None else _scored_tokens(ids, delta),
            self._offset,
            UNSET if self._started else self.prompt_ids,
            stop_string=self._reader.stop_string,
        )

    def _encode_chunks(self, output: ChoiceOutput) -> bytes:
        """The chunks of one delta: of the role, and of its output with the finish reason."""
        format, choices = self._events.format, []
        if not self._started:
            choices.append(format.first_chunk_choice(self.index))
        if self.finish is not None or output.has_any:
            choices.append(format.chunk_choice(self.index, output, self.finish))
        chunks, prompt_ids = b"", output.prompt_ids
        for choice in choices:
            if choice is not None:
                chunks += self._events.encode_chunk([choice], prompt_ids)
                prompt_ids = UNSET  # in the first chunk only
        return chunks


class EventStream:
    """The server-sent events of one response, of all its choices."""

    __slots__ = ("_created", "_exchange", "_model", "_usage", "format", "usage_so_far")

    def __init__(
        self,
        exchange: HTTPExchange,
        format: CompletionFormat,
        model: str,
        created: int,
        include_usage: bool,
    ) -> None:
        self.usage_so_far: Callable[[], Usage] | None = None  # set: every chunk has it
        self._exchange = exchange
        self.format = format
        self._model = model
        self._created = created
        self._usage: UnsetType | None = None if include_usage else UNSET  # null until the end

    @property
    def has_text_template(self) -> bool:
        """Whether events with text only differ in nothing but their text."""
        return self.usage_so_far is None

    def encode_chunk(
        self, choices: list[Struct], prompt_ids: Sequence[int] | UnsetType = UNSET
    ) -> bytes:
        usage = self._usage if self.usage_so_far is None else self.usage_so_far()
        return self._encode(choices, usage, prompt_ids)

    def text_template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a chunk with text only."""
        choice = self.format.chunk_choice(index, ChoiceOutput(TEXT_MARK), None)
        before, after = self.encode_chunk([choice]).split(encode(TEXT_MARK), 1)
        return before, after

    def send(self, events: bytes) -> StreamingResponse:
        """Write events. The first decides the status: until then an error has its own."""
        response = self._exchange.stream
        if response is None:
            return self._start(events)
        response.write(events)
        return response

    def _start(self, events: bytes) -> StreamingResponse:
        return self._exchange.start(EVENT_STREAM, events)

    def end(self, usage: Usage | None = None, timing: bytes = b"") -> None:
        """Write the last events. ``timing`` is a comment: headers left before the tokens."""
        last = b"" if usage is None else self._encode([], usage, UNSET)
        self._end_with(b"data: [DONE]\n\n", timing, last)

    def _end_with(self, last: bytes, timing: bytes, before: bytes = b"") -> None:
        if timing:
            before += b": server-timing: %b\n\n" % timing
        response = self._exchange.stream or self._start(b": \n\n")
        response.end(before + last)

    def _encode(
        self,
        choices: list[Struct],
        usage: Usage | UnsetType | None,
        prompt_ids: Sequence[int] | UnsetType,
    ) -> bytes:
        chunk = self.format.chunk(
            id=self._exchange.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )
        return b"data: %b\n\n" % encode(chunk)


def encode_event(event: Struct) -> bytes:
    """A server-sent event that is named as its type."""
    name = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(name).encode(), encode(event))


def _scored_tokens(ids: Sequence[int], delta: Delta) -> list[ScoredToken]:
    return [ScoredToken(id, logprob) for id, logprob in zip(ids, delta.logprobs, strict=False)]


def total_usage(choices: Sequence[BufferedChoice], n: int) -> Usage:
    """Usage of all choices; a prompt counts once for its ``n`` choices."""
    prompt_tokens = completion_tokens = cached = 0
    for choice in choices:
        completion_tokens += choice.count
        if choice.index % n == 0:
            prompt = choice.prompt or PromptInfo(len(choice.work.prompt), 0)
            prompt_tokens += prompt.tokens
            cached += prompt.cached
    total = prompt_tokens + completion_tokens
    return Usage(
        prompt_tokens,
        completion_tokens,
        total,
        _prompt_details(choices[0], cached)
        if choices[0].work.media
        else PromptTokensDetails(cached),
        _completion_details(choices),
    )


def _prompt_details(choice: BufferedChoice, cached: int) -> PromptTokensDetails:
    """With the tokens of each kind of media. A chat with media is one prompt."""
    media = choice.work.media
    spans = () if choice.prompt is None else choice.prompt.media
    if len(spans) != len(media):  # the engine does not report them
        return PromptTokensDetails(cached)
    tokens: dict[MediaKind, int] = {}
    for item, span in zip(media, spans, strict=True):
        tokens[item.kind] = tokens.get(item.kind, 0) + span.length
    image, video, audio = (tokens.get(kind, UNSET) for kind in ("image", "video", "audio"))
    return PromptTokensDetails(cached, image, video, audio)


def _completion_details(
    choices: Sequence[BufferedChoice],
) -> CompletionTokensDetails | UnsetType:
    counts = [choice.reasoning_tokens for choice in choices]
    if counts[0] is None:
        return UNSET
    return CompletionTokensDetails(sum(count or 0 for count in counts))
