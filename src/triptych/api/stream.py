"""The choices of an answer while their tokens come: collected whole, or sent as events.

Tokens arrive by a plain call on the event loop and leave in that same call: no task wakes up for
them. What a chunk looks like is the shape's; when a run is over, the app's.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from triptych.api.responses import (
    TEMPLATE_DELTA,
    ChoiceDelta,
    CompletionFormat,
    ScoredToken,
    chunk_template,
    encode,
    sse_event,
    sum_usage,
)
from triptych.http.exchange import HTTPExchange, StreamingResponse
from triptych.messages import Delta, FinishReason, PromptInfo, Work
from triptych.observe.metrics import Metrics
from triptych.prompt.detokenizer import Detokenizer

EVENTS = b"text/event-stream; charset=utf-8"


class BufferedChoice:
    """One stream of tokens, kept until it is asked for."""

    __slots__ = (
        "_begun",
        "_detokenizer",
        "_ids",
        "_last",
        "_metrics",
        "_scored",
        "_texts",
        "count",
        "finish",
        "heard",
        "index",
        "prompt",
        "task",
        "work",
    )

    def __init__(
        self,
        index: int,
        work: Work,
        detokenizer: Detokenizer,
        tell_ids: bool,
        metrics: Metrics,
        begun: float,
    ) -> None:
        self._begun = begun
        self.index = index
        self.work = work
        self.finish: FinishReason | None = None
        self.prompt: PromptInfo | None = None
        self.count = 0  # tokens of the answer
        self.task: Task[Any] | None = None  # runs the work; cancelled at a stop string
        self.heard: Callable[[], None] | None = None  # told of the first token
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._last = 0.0
        self._texts: list[str] = []
        self._ids: list[int] | None = [] if tell_ids else None
        self._scored: list[ScoredToken] | None = None if work.sampling.logprobs is None else []

    @property
    def stopped(self) -> bool:
        """A stop string was found, so the run was cancelled on purpose."""
        return self._detokenizer.stopped

    def deliver(self, delta: Delta) -> None:
        if self.finish is None:
            text, ids = self._take(delta)
            self._texts.append(text)
            if self._ids is not None:
                self._ids += ids
            if self._scored is not None:
                self._scored += _scored(ids, delta)

    def _take(self, delta: Delta) -> tuple[str, Sequence[int]]:
        """New text and the tokens that belong to the answer; notes how the stream stands."""
        now, ids, finish = monotonic(), delta.ids, delta.finish
        if self._last:
            self._metrics.between_tokens.add(now - self._last)
        else:
            self._metrics.first_token.add(now - self._begun)
            self.prompt = delta.prompt
            if self.heard is not None:
                self.heard()
        self._last = now
        detokenizer = self._detokenizer
        text = detokenizer.push(ids, finish is not None)
        if detokenizer.stopped:
            ids = ids[: detokenizer.used - self.count]
            self.finish = "stop"
            if finish is None and self.task is not None:
                self.task.cancel()
        elif finish is not None:
            self.finish = finish
        self.count += len(ids)
        return text, ids

    def piece(self) -> ChoiceDelta:
        """All of it."""
        told = self.prompt.ids if self.prompt is not None else None
        return ChoiceDelta("".join(self._texts), self._ids, self._scored, 0, told)


class StreamedChoice(BufferedChoice):
    """One stream of tokens, sent on as it comes."""

    __slots__ = ("_events", "_length", "_opened", "_say")

    def __init__(
        self,
        index: int,
        work: Work,
        detokenizer: Detokenizer,
        tell_ids: bool,
        metrics: Metrics,
        begun: float,
        events: EventStream,
    ) -> None:
        super().__init__(index, work, detokenizer, tell_ids, metrics, begun)
        self._events = events
        self._opened = False
        self._length = 0  # characters sent
        self._say: Callable[[bytes], None] | None = None  # the quick way, once it is open

    def deliver(self, delta: Delta) -> None:
        if self.finish is not None:
            return
        text, ids = self._take(delta)
        say = self._say
        if say is not None and self.finish is None:
            if text:
                say(encode(text))
            return
        first = not self._opened
        piece = ChoiceDelta(
            text,
            None if self._ids is None else ids,
            None if self._scored is None else _scored(ids, delta),
            self._length,
            self.prompt.ids if first and self.prompt is not None else None,
        )
        self._length += len(text)
        chunks = self._chunks(piece, first)
        if not chunks:
            return  # nothing to see yet: the next delta is still the first
        answer, self._opened = self._events.send(chunks), True
        if first and self._ids is None and self._scored is None:
            place = self._events.shape.delta(self.index, TEMPLATE_DELTA, None)
            self._say = answer.writer(*chunk_template(self._events.envelope, place))

    def _chunks(self, piece: ChoiceDelta, first: bool) -> bytes:
        """Where a chunk has more to say than its text."""
        events, shape, index = self._events, self._events.shape, self.index
        chunks = []
        opening = shape.opening(index) if first else None
        told = {} if piece.prompt_ids is None else {"prompt_token_ids": list(piece.prompt_ids)}
        if opening is not None:
            chunks.append(sse_event({**events.envelope, "choices": [opening], **told}))
            told = {}
        if piece.text or piece.ids or piece.scored:
            choice = shape.delta(index, piece, None)
            chunks.append(sse_event({**events.envelope, "choices": [choice], **told}))
            told = {}
        if self.finish is not None:
            choice = shape.delta(index, ChoiceDelta(""), self.finish)
            chunks.append(sse_event({**events.envelope, "choices": [choice], **told}))
        return b"".join(chunks)


class EventStream:
    """The server-sent events of one answer, whichever choice they belong to."""

    __slots__ = ("_exchange", "envelope", "shape")

    def __init__(
        self, exchange: HTTPExchange, shape: CompletionFormat, envelope: dict[str, Any]
    ) -> None:
        self._exchange = exchange
        self.shape = shape
        self.envelope = envelope

    def send(self, piece: bytes) -> StreamingResponse:
        """With the first the status is decided: until then an error still has one of its own."""
        answer = self._exchange.stream
        if answer is None:
            return self._exchange.start(EVENTS, piece)
        answer.write(piece)
        return answer

    def end(self, told: dict[str, Any] | None = None, timing: bytes = b"") -> None:
        """``timing`` goes as a comment: a header would have had to come before the tokens."""
        last = b"" if told is None else sse_event({**self.envelope, "choices": [], "usage": told})
        if timing:
            last += b": server-timing: %b\n\n" % timing
        answer = self._exchange.stream or self._exchange.start(EVENTS, b": \n\n")
        answer.end(last + b"data: [DONE]\n\n")


def _scored(ids: Sequence[int], delta: Delta) -> list[ScoredToken]:
    return [ScoredToken(id, logprob) for id, logprob in zip(ids, delta.logprobs, strict=False)]


def total_usage(choices: Sequence[BufferedChoice], n: int) -> dict[str, Any]:
    """Usage of all choices; a prompt counts once for its ``n`` choices."""
    prompts = [c.prompt or PromptInfo(len(c.work.prompt), 0) for c in choices[::n]]
    return sum_usage(prompts, sum(choice.count for choice in choices))
