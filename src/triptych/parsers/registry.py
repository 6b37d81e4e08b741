"""The formats by name, which of them a chat template writes, and the parser of one output."""

from __future__ import annotations

from triptych.parsers.base import KnownFunctions, OutputParser
from triptych.parsers.hermes import HermesParser
from triptych.parsers.plain_json import ArgumentsParser, PlainParser
from triptych.parsers.reader import ToolReader
from triptych.parsers.reasoning import ReasoningMarkers, ReasoningParser

TOOL_PARSERS: dict[str, type[ToolReader]] = {
    "hermes": HermesParser,
    "json": PlainParser,
}
REASONING_PARSERS: dict[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}

# Text of a template that only this format has; the first that is found counts.
_TOOL_SIGNS = (("<tool_call>", "hermes"),)
_REASONING_SIGNS = (("</think>", "think"), ("[/THINK]", "mistral"))


def detect_tool_parser(chat_template: str) -> str | None:
    return next((name for sign, name in _TOOL_SIGNS if sign in chat_template), None)


def detect_reasoning_parser(chat_template: str) -> str | None:
    return next((name for sign, name in _REASONING_SIGNS if sign in chat_template), None)


def starts_in_reasoning(reasoning: str | None, prompt: str) -> bool:
    """Whether this prompt, as the chat template rendered it, opens the reasoning."""
    return reasoning is not None and REASONING_PARSERS[reasoning].opened_by(prompt)


def kept_markers(tool: str | None, reasoning: str | None) -> tuple[str, ...]:
    """Strings whose text the detokenizer must keep, where they are special tokens."""
    markers = TOOL_PARSERS[tool].kept_markers if tool else ()
    if reasoning:
        markers += (REASONING_PARSERS[reasoning].opening, REASONING_PARSERS[reasoning].closing)
    return markers


def make_parser(
    tool: str | None,
    reasoning: str | None,
    *,
    starts_in_reasoning: bool = False,
    functions: KnownFunctions | None = None,
    named: str | None = None,
) -> OutputParser | None:
    """A parser for one output. None if there is nothing to look for.

    A call of a function that is not among ``functions`` is content (None: any name is a function).
    ``named``: after the reasoning, the output is the arguments of this function, whatever ``tool``.
    """
    calls: ToolReader | None = None
    if named:
        calls = ArgumentsParser(named)
    elif tool:
        calls = TOOL_PARSERS[tool](functions)
    if reasoning:
        return ReasoningParser(REASONING_PARSERS[reasoning], starts_in_reasoning, calls)
    return calls
