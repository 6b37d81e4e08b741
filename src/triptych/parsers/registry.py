"""The formats by name, which of them a chat template writes, and the parser of one output."""

from __future__ import annotations

from triptych.parsers.base import KnownFunctions, OutputParser
from triptych.parsers.deepseek import DeepSeekParser
from triptych.parsers.glm import GLMParser
from triptych.parsers.hermes import HermesParser
from triptych.parsers.llama import LlamaParser
from triptych.parsers.mistral import MistralParser
from triptych.parsers.plain_json import ArgumentsParser, HeldParser, PlainParser
from triptych.parsers.pythonic import PythonicParser
from triptych.parsers.qwen_coder import QwenCoderParser
from triptych.parsers.reader import ToolReader
from triptych.parsers.reasoning import ReasoningMarkers, ReasoningParser

TOOL_PARSERS: dict[str, type[ToolReader]] = {
    "deepseek": DeepSeekParser,
    "glm": GLMParser,
    "hermes": HermesParser,
    "json": PlainParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen-coder": QwenCoderParser,
}
REASONING_PARSERS: dict[str, ReasoningMarkers] = {
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "think": ReasoningMarkers("<think>", "</think>"),
}

# Texts that a template of this format has, all of them; the first format that fits counts. None:
# a format of its own that looks like the next.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("<tool_call>", "<arg_key>"), "glm"),
    (("<tool_call>", "<function="), "qwen-coder"),
    (("<tool_calls>",), None),
    (("<tool_call>", '"arguments'), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>",), "deepseek"),
    (("<|tool_call_start|>[",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": dictionary of argument name',), "llama"),
)


def detect_tool_parser(chat_template: str) -> str | None:
    fitting = (name for signs, name in _TOOL_SIGNS if all(sign in chat_template for sign in signs))
    return next(fitting, None)


def detect_reasoning_parser(chat_template: str) -> str | None:
    found = (name for name, m in REASONING_PARSERS.items() if m.closing in chat_template)
    return next(found, None)


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
    held: bool = False,
) -> OutputParser | None:
    """A parser for one output. None if there is nothing to look for.

    A call of a function that is not among ``functions`` is content (None: any name is a function).
    ``named``: after the reasoning, the output is the arguments of this function, whatever ``tool``.
    ``held``: a grammar makes the output a list of calls, whatever ``tool``.
    """
    calls: ToolReader | None = None
    if named:
        calls = ArgumentsParser(named)
    elif held:
        calls = HeldParser(functions)
    elif tool:
        calls = TOOL_PARSERS[tool](functions)
    if reasoning:
        return ReasoningParser(REASONING_PARSERS[reasoning], starts_in_reasoning, calls)
    return calls
