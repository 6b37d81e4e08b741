"""Translates and compiles grammars with llguidance. Its ``main`` is the process of a
``GrammarChecker``.

Everything that a client wrote is read in this process first, where it can harm nothing else: it has
little memory, and a small stack. The worker compiles only what compiled here.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from triptych.engines.torch.grammar_messages import CheckedGrammar, CheckerSetup, receive, send
from triptych.media import lockdown
from triptych.messages import Grammar
from triptych.runtime.parent_death import die_with_parent

STACK = 2 << 20  # bytes: less than a thread of the worker has, so that this process overflows first
MAX_ERROR = 300  # characters
# Between the tokens of JSON: at most one space. A model that is not sure what follows would write
# white space until max_tokens.
WHITESPACE = " ?"
MAX_LEXER_STATES = 50_000  # of some 2 kB each: the default would let one grammar fill 500 MB
LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
# Of EBNF and Lark, which can be ambiguous. The time for a token then grows with the cube of the
# items in a row, and all sequences of the step wait: with the default, 2,000, for some 90 ms; with
# 500 for 2 to 9 ms. A JSON schema needs more items (four for an optional property), and less time.
GRAMMAR_LIMITS = LLParserLimits(
    max_lexer_states=MAX_LEXER_STATES,
    max_items_in_row=500,
    step_max_items=25_000,
    verbose_errors=False,
)


def load_tokenizer(folder: str, end_ids: tuple[int, ...]) -> LLTokenizer:
    """The tokenizer of a checkpoint, as llguidance reads it. Raises ValueError or OSError."""
    text = (Path(folder) / "tokenizer.json").read_text()
    return LLTokenizer(text, eos_token=list(end_ids) or None)


def build_matcher(tokenizer: LLTokenizer, source: str, kind: str) -> LLMatcher:
    """A matcher at the start of the grammar, or one that ``is_error``. Releases the GIL."""
    limits = GRAMMAR_LIMITS if kind == "grammar" else LIMITS
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def translate(grammar: Grammar) -> str:
    """A grammar as llguidance takes it. Raises ValueError. The matcher finds most errors."""
    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(
                _closed(grammar.text),
                # Over those that a schema may set itself (``x-guidance``).
                overrides={"lenient": False, "whitespace_pattern": WHITESPACE},
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            strings = " | ".join(
                json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)
            )
            return LLMatcher.grammar_from_lark(f"start: {strings}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_to_lark(grammar.text))


def _to_lark(text: str) -> str:
    """A grammar in Lark's syntax, or in EBNF. Raises ValueError, and RecursionError."""
    try:
        return any_to_lark(text)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the library's errors are plain Exceptions, and some IndexErrors
        raise ValueError(f"it is not valid EBNF: {error}") from error


def _closed(text: str) -> str:
    if '"allOf"' in text:  # each of its schemas, or what these refer to, names some properties
        return text
    return json.dumps(close_objects(json.loads(text)), ensure_ascii=False)


def close_objects(schema: Any) -> Any:
    """The schema without properties that it does not name, where it does not say otherwise.

    Clients mean this, and so does vLLM: a model that may write further properties writes them until
    its tokens are used up. Objects whose schema is combined with others stay open.
    """
    if not isinstance(schema, dict) or _combined(schema):
        return schema
    closed = {
        key: _CLOSING[key](value) if key in _CLOSING else value for key, value in schema.items()
    }
    if "properties" in schema and not schema.keys() & _NAMES_OTHERS:
        closed["additionalProperties"] = False
    return closed


def _combined(schema: dict[str, Any]) -> bool:
    return "properties" in schema and bool(schema.keys() & _COMBINES)


def _close_each(schemas: Any) -> Any:
    if isinstance(schemas, list):
        return [close_objects(schema) for schema in schemas]
    if isinstance(schemas, dict):
        return {name: close_objects(schema) for name, schema in schemas.items()}
    return schemas


_NAMES_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_COMBINES = {"anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
_CLOSING = {
    "properties": _close_each,
    "$defs": _close_each,
    "definitions": _close_each,
    "prefixItems": _close_each,
    "anyOf": _close_each,
    "oneOf": _close_each,
    "items": close_objects,
}


def check_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> CheckedGrammar:
    """Compile, and compute the first mask: some grammars turn out impossible only there."""
    try:
        source = translate(grammar)
    except (ValueError, RecursionError) as error:
        return CheckedGrammar(error=_short(str(error)))
    matcher = build_matcher(tokenizer, source, grammar.kind)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return CheckedGrammar(error=describe(matcher))
    return CheckedGrammar(source)


def describe(matcher: LLMatcher) -> str:
    """What is wrong with a matcher that ``is_error``."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    return "no text matches it." if error.startswith("NoExtension") else _short(error)


def _short(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ".join(lines)[:MAX_ERROR]


def _serve(sock: socket.socket) -> None:
    setup = receive(sock, CheckerSetup)
    try:
        tokenizer = load_tokenizer(setup.folder, setup.end_ids)
    except (ValueError, OSError) as error:
        send(sock, CheckedGrammar(error=_short(str(error))))
        return
    lockdown.limit_resources(setup.memory)
    send(sock, CheckedGrammar())
    while True:
        send(sock, check_grammar(tokenizer, receive(sock, Grammar)))


def main(words: list[str]) -> None:
    """``SOCKET PARENT``: serve the checker at the other end of the socket until it is gone."""
    number, parent = (int(word) for word in words)
    die_with_parent(parent)

    def serve() -> None:
        try:
            _serve(socket.socket(fileno=number))
        except (EOFError, ConnectionError):
            return

    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
