"""Parameters that ask for structured output, and how they become a Grammar.

OpenAI, vLLM (``structured_outputs``, and ``guided_...`` before it) and SGLang have names of their
own for the same four things. Checks what no engine needs to see: form, size and depth. Whether a
schema, regular expression or grammar is valid, the engine decides: each has its own library.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import InvalidSchema, InvalidValue
from triptych.messages import Grammar

MAX_DEPTH = 100  # levels of JSON in a schema: engines descend into it
MAX_CHOICE_STRINGS = 1024

JsonSchema = dict[str, Any]
SchemaOrText = JsonSchema | str
FormatType = Literal["text", "json_object", "json_schema"]
GrammarText = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_STRINGS)]

ANY_OBJECT: JsonSchema = {"type": "object"}


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """``response_format.json_schema``. A schema always holds, ``strict`` or not."""

    name: str
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's object; one of them."""

    json: SchemaOrText | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class StructuredOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """At most one of them has a value that asks for anything."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None  # of earlier versions of vLLM, as are the next three
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: SchemaOrText | None = None  # of SGLang, as are the next two
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None


_Given = list[tuple[str, Grammar]]  # the parameter, and what it asks for


def to_grammar(options: StructuredOptions, limit: int) -> Grammar | None:
    """What the generated text must be; None: any text. ``limit``: of the grammar's text, in bytes.

    Raises InvalidValue for two at once, InvalidSchema for one that is too large or too deep.
    """
    given = _given(options)
    if not given:
        return None
    param, grammar = given[0]
    if len(given) > 1:
        raise InvalidValue(
            f"'{param}' and '{given[1][0]}' both ask for structured output. Give one.",
            param=given[1][0],
        )
    size = len(grammar.text.encode())
    if size > limit:
        raise InvalidSchema(
            f"'{param}' has {size} bytes; the limit is {limit}. Shorten it.", param=param
        )
    return _check_schema(param, grammar.text) if grammar.kind == "json" else grammar


def grammar_parameter(options: StructuredOptions) -> str | None:
    """The name of the parameter that asks for structured output."""
    given = _given(options)
    return given[0][0] if given else None


def _given(o: StructuredOptions) -> _Given:
    found: _Given = []
    if o.response_format is not None:
        found += _of_response_format(o.response_format)
    if o.structured_outputs is not None:
        found += _of_structured_outputs(o.structured_outputs)
    if o.guided_json is not None:
        found.append(_json("guided_json", o.guided_json))
    if o.json_schema is not None:
        found.append(_json("json_schema", o.json_schema))
    if o.guided_regex is not None:
        found.append(("guided_regex", Grammar("regex", o.guided_regex)))
    if o.regex is not None:
        found.append(("regex", Grammar("regex", o.regex)))
    if o.guided_choice is not None:
        found.append(_choice("guided_choice", o.guided_choice))
    if o.guided_grammar is not None:
        found.append(("guided_grammar", Grammar("grammar", o.guided_grammar)))
    if o.ebnf is not None:
        found.append(("ebnf", Grammar("grammar", o.ebnf)))
    return found


def _of_response_format(format: ResponseFormat) -> _Given:
    if format.type == "json_schema":
        if format.json_schema is None or format.json_schema.schema is None:
            raise InvalidValue(
                "response_format of type json_schema needs json_schema.schema.",
                param="response_format.json_schema",
            )
        return [_json("response_format", format.json_schema.schema)]
    if format.json_schema is not None:
        raise InvalidValue(
            f"response_format has a json_schema, but its type is {format.type}.",
            param="response_format.json_schema",
        )
    return [_json("response_format", ANY_OBJECT)] if format.type == "json_object" else []


def _of_structured_outputs(given: StructuredOutputs) -> _Given:
    found: _Given = []
    if given.json is not None:
        found.append(_json("structured_outputs.json", given.json))
    if given.json_object:
        found.append(_json("structured_outputs.json_object", ANY_OBJECT))
    if given.regex is not None:
        found.append(("structured_outputs.regex", Grammar("regex", given.regex)))
    if given.choice is not None:
        found.append(_choice("structured_outputs.choice", given.choice))
    if given.grammar is not None:
        found.append(("structured_outputs.grammar", Grammar("grammar", given.grammar)))
    if not found:
        raise InvalidValue(
            "structured_outputs needs one of json, regex, choice, grammar and json_object: true.",
            param="structured_outputs",
        )
    return found


def _json(param: str, schema: SchemaOrText) -> tuple[str, Grammar]:
    """A schema as an object, or as the text of one."""
    if isinstance(schema, str):
        return param, Grammar("json", schema)
    try:
        return param, Grammar("json", msgspec.json.encode(schema).decode())
    except RecursionError:
        raise _too_deep(param) from None


def _check_schema(param: str, text: str) -> Grammar:
    """Refuse a text that is no object, or too deep. Its size was checked: this takes time."""
    try:
        schema = msgspec.json.decode(text, type=JsonSchema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSchema(
            f"'{param}' is not the text of a JSON object: {error}.", param=param
        ) from None
    _check_depth(param, schema)
    return Grammar("json", msgspec.json.encode(schema).decode())


def _choice(param: str, strings: list[str]) -> tuple[str, Grammar]:
    if not all(strings):
        raise InvalidSchema(f"'{param}' has an empty string.", param=param)
    return param, Grammar("choice", msgspec.json.encode(strings).decode())


def _check_depth(param: str, schema: JsonSchema) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise _too_deep(param)


def _too_deep(param: str) -> InvalidSchema:
    return InvalidSchema(
        f"'{param}' is nested more than {MAX_DEPTH} levels deep. Use $ref for what repeats.",
        param=param,
    )


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list)]
    if isinstance(value, list):
        return [child for child in value if isinstance(child, dict | list)]
    return []
