"""Replies in parts: content, reasoning and tool calls, parsed while their tokens arrive.

``ReplyFormats`` knows how the served model writes them, ``ReplyParsing`` what one request asks for,
and ``ReplyDetokenizer`` takes one choice apart. A request that needs none of this gets plain
detokenizers. How each format looks is in ``parsers``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Struct

from triptych.api.requests import ChatRequest, derive_seed
from triptych.api.responses import ChoiceOutput, Reply, ReplyCall
from triptych.api.stream import BufferedChoice, StreamedChoice
from triptych.api.tools import ToolUse
from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedParameter
from triptych.http.exchange import new_id
from triptych.messages import Delta, Grammar
from triptych.parsers.base import OutputParser, ParsedOutput, string_parameters
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

    def detokenizer(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        end_ids: tuple[int, ...],
        prompt: Sequence[int],
    ) -> ReplyDetokenizer:
        """The detokenizer of one choice."""
        markers = kept_markers(self.tool_parser, self.reasoning_parser)
        kept = {tokenizer.specials[m]: m for m in markers if m in tokenizer.specials}
        end = tokenizer.library.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        tools = self.tools
        parser = make_parser(
            self.tool_parser,
            self.reasoning_parser,
            starts_in_reasoning=starts_in_reasoning(self.reasoning_parser, end),
            functions=tools
            and {f.name: string_parameters(f.parameters or {}) for f in tools.functions},
            named=tools and tools.named,
        )
        assert parser is not None, "there is a parser of one of both"
        one_call = tools is not None and not tools.parallel
        closing = ()
        if self.thinking_budget is not None and self.reasoning_parser is not None:
            marker = REASONING_PARSERS[self.reasoning_parser].closing
            closing = tuple(tokenizer.ids(f"\n{marker}\n\n"))
        limit = ThinkingLimit(self.thinking_budget or 0, closing)
        return ReplyDetokenizer(tokenizer, stop, end_ids, kept, parser, one_call, limit)


class ThinkingLimit(Struct, frozen=True):
    """How many tokens the reasoning may have, and what ends it then. 0: there is no limit."""

    tokens: int
    closing: tuple[int, ...]


class ReplyDetokenizer(Detokenizer):
    """The reply of one choice, in parts. Its ``push`` returns no text: ``take`` has the parts.

    It also stops after one call, where the client wants no more, and at the end of the thinking
    budget (``cut``): then the choice goes on after the marker that ends the reasoning.
    """

    __slots__ = (
        "_calls",
        "_closed",
        "_limit",
        "_one_call",
        "_parser",
        "_parts",
        "_pieces",
        "cut",
        "ids",
        "reasoning_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        end_ids: tuple[int, ...],
        kept: Mapping[int, str],
        parser: OutputParser,
        one_call: bool,
        limit: ThinkingLimit,
    ) -> None:
        super().__init__(tokenizer, stop, end_ids, kept)
        self.reasoning_tokens = 0
        self.cut = False
        self.ids: list[int] = []  # while the reasoning is limited
        self._parser = parser
        self._one_call = one_call
        self._limit = limit
        self._closed = False
        self._pieces: list[ParsedOutput] = []  # not taken yet
        self._calls: list[ReplyCall] = []  # of the whole reply, without their arguments
        self._parts: list[ParsedOutput] = []  # of the whole reply
