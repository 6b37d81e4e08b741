"""Replies in parts: content, reasoning and tool calls, parsed while their tokens arrive.

``ReplyFormats`` knows how the served model writes them, ``ReplyParsing`` what one request asks for,
and ``ReplyReader`` takes one choice apart. A request that needs none of this gets plain
detokenizers. How each format looks is in ``parsers``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from triptych.api.requests import ChatRequest, CompletionRequest, derive_seed
from triptych.api.responses import ChoiceOutput, ReplyCall, ReplyParts
from triptych.api.stream import BufferedChoice, StreamedChoice
from triptych.api.structured import grammar_parameter
from triptych.api.tools import ToolUse
from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidSchema, InvalidValue, UnsupportedParameter
from triptych.http.exchange import new_id
from triptych.messages import Delta, Grammar, Sampling
from triptych.parsers.base import NOTHING, OutputParser, ParsedOutput
from triptych.parsers.reasoning import ReasoningParser
from triptych.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    detect_reasoning_parser,
    detect_tool_parser,
    kept_markers,
    make_parser,
    starts_in_reasoning,
)
from triptych.prompt.detokenizer import Detokenizer
from triptych.prompt.processor import PromptProcessor
from triptych.prompt.tokenizer import Tokenizer

PROMPT_END = 16  # tokens in which the marker that opens the reasoning stands, if the prompt has it
CALLS_PARSER = "json"  # of output that a grammar holds
AFTER_REASONING = -1  # index of the seed with which a cut choice goes on; choices count from 0


class ReplyFormats:
    """How the served model writes tool calls and reasoning."""

    def __init__(self, config: Config, processor: PromptProcessor) -> None:
        template = processor.tool_template_source
        self._tool = _choose(
            "tool-parser", config.tool_parser, TOOL_PARSERS, detect_tool_parser(template)
        )
        self._reasoning = _choose(
            "reasoning-parser",
            config.reasoning_parser,
            REASONING_PARSERS,
            detect_reasoning_parser(template),
        )
        self._describes_tools = processor.describes_tools

    @property
    def marks_reasoning(self) -> bool:
        """Whether reasoning is told from the rest of a reply."""
        return self._reasoning is not None

    def parsing(self, request: ChatRequest, tools: ToolUse | None) -> ReplyParsing | None:
        """How the replies to this request are parsed. None: they are plain text."""
        budget = request.max_thinking_tokens
        if budget is not None:
            self._check_budget(request)
        if tools is None:
            if self._reasoning is None:
                return None
            return ReplyParsing(None, None, self._reasoning, budget)
        if tools.grammar is not None:
            return ReplyParsing(tools, CALLS_PARSER, None, None)
        self._check_auto()
        return ReplyParsing(tools, self._tool, self._reasoning, budget)

    def _check_auto(self) -> None:
        """Whether the model can decide by itself to call a tool."""
        if not self._describes_tools:
            raise UnsupportedParameter(
                "The chat template of this model has no place for tools, so that the model would "
                "not know them. Require a call (tool_choice), or serve the model with a template "
                "that has one (--chat-template).",
                param="tools",
            )
        if self._tool is None:
            raise UnsupportedParameter(
                "This server does not know how its model writes tool calls; --tool-parser says it. "
                "Require a call (tool_choice), or leave the tools out.",
                param="tools",
            )

    def _check_budget(self, request: ChatRequest) -> None:
        if self._reasoning is None:
            raise UnsupportedParameter(
                "This model marks no reasoning that could be limited.", param="max_thinking_tokens"
            )
        if request.logprobs:
            raise UnsupportedParameter(
                "The end of a limited reasoning has no logprobs: leave out one of the two.",
                param="max_thinking_tokens",
            )


def _choose(flag: str, given: str, names: Collection[str], detected: str | None) -> str | None:
    if given == "auto":
        return detected
    if given == "none":
        return None
    if given not in names:
        raise InvalidConfig(f"--{flag} is auto, none, {', '.join(sorted(names))}; not '{given}'.")
    return given


class ReplyParsing(Struct, frozen=True):
    """How the choices of one request are parsed."""

    tools: ToolUse | None
    tool_parser: str | None
    reasoning_parser: str | None
    thinking_budget: int | None  # tokens

    @property
    def grammar(self) -> Grammar | None:
        return None if self.tools is None else self.tools.grammar

    @property
    def kept(self) -> tuple[str, ...]:
        """Special tokens whose text the parsers must see."""
        return kept_markers(self.tool_parser, self.reasoning_parser)

    def reader(
        self, detokenizer: Detokenizer, tokenizer: Tokenizer, prompt: Sequence[int], context: int
    ) -> ReplyReader:
        """The reader of one choice. ``detokenizer``: a new one, of its text."""
        end = tokenizer.library.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        tools = self.tools
        parser = make_parser(
            self.tool_parser,
            self.reasoning_parser,
            starts_in_reasoning=starts_in_reasoning(self.reasoning_parser, end),
            functions=None if tools is None else tools.known,
            named=None if tools is None else tools.named,
            held=tools is not None and tools.required,
        )
        assert parser is not None, "there is a parser of one of both"
        limit = None
        if self.thinking_budget is not None and self.reasoning_parser is not None:
            marker = REASONING_PARSERS[self.reasoning_parser].closing
            closing = tuple(tokenizer.ids(f"\n{marker}\n\n"))
            limit = ThinkingLimit(self.thinking_budget, closing, context)
        one_call = tools is not None and not tools.parallel
        return ReplyReader(detokenizer, parser, one_call, limit)


def apply_grammar(
    parsing: ReplyParsing,
    sampling: Sampling,
    request: ChatRequest | CompletionRequest,
    max_bytes: int,
) -> tuple[ReplyParsing | None, Sampling]:
    """Let a grammar hold the calls that the client demands.

    A grammar holds from the first token on, so there is no reasoning before what it describes.
    """
    if sampling.grammar is not None:
        if parsing.tools is not None:
            raise InvalidValue(
                "The output can't follow a format and be free to call tools. Leave the tools out, "
                "or set tool_choice to none.",
                param=grammar_parameter(request),
            )
        return None, sampling
    if (grammar := parsing.grammar) is None:
        return parsing, sampling
    if (size := len(grammar.text.encode())) > max_bytes:
        raise InvalidSchema(
            f"The schemas of the tools have {size} bytes; the limit is {max_bytes}. Shorten them.",
            param="tools",
        )
    return parsing, msgspec.structs.replace(sampling, grammar=grammar)


class ThinkingLimit(Struct, frozen=True):
    """How many tokens the reasoning may have, and the tokens that end it then."""

    tokens: int
    closing: tuple[int, ...]
    context: int  # of the model, in tokens

    def room(self, prompt: int, generated: int, max_tokens: int | None) -> int:
        """How many tokens may follow the end of the reasoning."""
        used = generated + len(self.closing)
        room = self.context - prompt - used
        return room if max_tokens is None else min(room, max_tokens - used)


class ReplyReader:
    """The reply of one choice, in parts. Its ``push`` returns no text: ``take`` has the parts.

    It also stops at a second call, where the client wants one, and at the end of the thinking
    budget (``cut``): then the choice goes on after the marker that ends the reasoning.
    """

    __slots__ = (
        "_called",
        "_closed",
        "_detokenizer",
        "_limit",
        "_one_call",
        "_parser",
        "_pieces",
        "_reasoning",
        "cut",
        "generated",
        "reasoning_tokens",
        "stopped",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: OutputParser,
        one_call: bool,
        limit: ThinkingLimit | None,
    ) -> None:
        self.stopped = False
        self.cut = False
        self.reasoning_tokens = 0
        self.generated: list[int] = []  # only while the reasoning is limited
        self._detokenizer = detokenizer
        self._parser = parser
        self._reasoning = parser if isinstance(parser, ReasoningParser) else None
        self._one_call = one_call
        self._limit = limit
        self._closed = False
        self._called = False
        self._pieces: list[ParsedOutput] = []  # not taken yet

    @property
    def used(self) -> int:
        return self._detokenizer.used

    @property
    def stop_string(self) -> str:
        return self._detokenizer.stop_string

    @property
    def counts_reasoning(self) -> bool:
        return self._reasoning is not None

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        if self.stopped:
            return ""
        for id in ids:
            self._push(id)
            if self.stopped:
                break
        if last and not self.stopped:
            self._read(self._detokenizer.push((), True))
        if (last or self.stopped) and not self.cut:
            self._close()
        return ""

    def _push(self, id: int) -> None:
        """One token: what is counted and where a reply is cut must not depend on its deltas."""
        reasoning = self._reasoning
        before = reasoning is not None and reasoning.inside
        self._read(self._detokenizer.push((id,)))
        self.stopped |= self._detokenizer.stopped
        if reasoning is None:
            return
        self.reasoning_tokens += before or reasoning.inside
        if (limit := self._limit) is not None:
            self.generated.append(id)
            if reasoning.inside and self.reasoning_tokens >= limit.tokens and not self.stopped:
                self.cut = self.stopped = True

    def _read(self, text: str) -> None:
        if text:
            self._keep(self._parser.push(text))

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._keep(self._parser.finish())

    def _keep(self, parsed: ParsedOutput) -> None:
        if self._one_call and any(call.index for call in parsed.calls):
            first = tuple(call for call in parsed.calls if not call.index)
            parsed = ParsedOutput(parsed.content, parsed.reasoning, first)
            self.stopped = self._closed = True
        if parsed is not NOTHING:
            self._pieces.append(parsed)

    def end_here(self) -> None:
        """Make a cut the end."""
        self.cut = False
        self._close()

    def lift_limit(self) -> ThinkingLimit:
        """Go on after a cut, without the limit; return it."""
        limit, self._limit = self._limit, None
        assert limit is not None, "only a limit cuts"
        self.cut = self.stopped = False
        return limit

    def take(self) -> ReplyParts:
        """The parts of the reply since the last time."""
        pieces, self._pieces = self._pieces, []
        calls: dict[int, ReplyCall] = {}
        for call in (call for piece in pieces for call in piece.calls):
            if (known := calls.get(call.index)) is None:
                known = ReplyCall(call.index, new_id("call_") if call.name else "", call.name, "")
            arguments = known.arguments + call.arguments
            calls[call.index] = ReplyCall(call.index, known.id, known.name, arguments)
        self._called |= bool(calls)
        return ReplyParts(
            "".join([piece.content for piece in pieces]),
            "".join([piece.reasoning for piece in pieces]),
            tuple(calls.values()),
            self._called,
            bool(self.stop_string) and any(piece.cut for piece in pieces),
        )


class ParsedChoice(BufferedChoice):
    """A choice whose reply is parsed, kept until it is complete."""

    __slots__ = ()
    _reader: ReplyReader

    @property
    def interrupted(self) -> bool:
        """Whether the thinking budget is used up, so that the choice must go on by ``resume``."""
        return self._reader.cut and self.finish is None

    @property
    def reasoning_tokens(self) -> int | None:
        parser = self._reader
        return parser.reasoning_tokens if parser.counts_reasoning else None

    def deliver(self, delta: Delta) -> None:
        if not self._reader.cut:  # what still comes after a cut does not count
            super().deliver(delta)

    def _consume(self, delta: Delta) -> tuple[str, Sequence[int]]:
        text, ids = super()._consume(delta)
        if self._reader.cut:
            self.finish = None  # not the end of the choice,
            if delta.finish is not None and len(ids) == len(delta.ids):
                self.finish = delta.finish  # unless the engine ended it too
                self._reader.end_here()
        return text, ids

    def resume(self) -> None:
        """End the reasoning, and let ``work`` continue after it if any token may follow."""
        generated = self._reader.generated
        limit = self._reader.lift_limit()
        work, sampling = self.work, self.work.sampling
        prompt = len(work.prompt) if self.prompt is None else self.prompt.tokens
        if limit.room(prompt, len(generated), sampling.max_tokens) < 1:
            self.deliver(Delta((), "length"))
            return
        closing = limit.closing
        used = len(generated) + len(closing)
        self.work = msgspec.structs.replace(
            work,
            prompt=(*work.prompt, *generated, *closing),
            sampling=msgspec.structs.replace(
                sampling,
                seed=derive_seed(sampling.seed, AFTER_REASONING),
                max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - used,
                min_tokens=max(0, sampling.min_tokens - used),
                prompt_logprobs=None,  # the first run has them
            ),
        )
        task, self.task = self.task, None  # a stop string in the marker has no run to cancel
        self.deliver(Delta(closing))
        self.task = task

    def output(self) -> ChoiceOutput:
        return msgspec.structs.replace(super().output(), reply=self._reader.take())


class ParsedStreamedChoice(ParsedChoice, StreamedChoice):
    """A choice whose reply is parsed, and sent as its tokens arrive."""

    __slots__ = ()

    @property
    def _text_only(self) -> bool:
        return False

    def _output(self, text: str, ids: Sequence[int], delta: Delta) -> ChoiceOutput:
        output = super()._output(text, ids, delta)
        return msgspec.structs.replace(output, reply=self._reader.take())
