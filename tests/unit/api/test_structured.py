"""Every name for structured output becomes the same four kinds of grammar."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest

from triptych.api.structured import StructuredOptions, to_grammar
from triptych.config import Limits
from triptych.errors import InvalidSchema, InvalidValue
from triptych.messages import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
LIMIT = 1000


def grammar(limit: int = LIMIT, **fields: Any) -> Grammar | None:
    return to_grammar(msgspec.convert(fields, StructuredOptions), limit)


def json_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", **more}}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}')),
        ({"response_format": json_schema(schema=SCHEMA, strict=True)}, ("json", TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json", TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json", TEXT)),
        ({"structured_outputs": {"json_object": True}}, ("json", '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("grammar", 'root ::= "a"')),
        ({"guided_json": SCHEMA}, ("json", TEXT)),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["é"]}, ("choice", '["é"]')),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"json_schema": TEXT}, ("json", TEXT)),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ],
)
def test_each_name_becomes_its_kind(fields, found):
    assert grammar(**fields) == (None if found is None else Grammar(*found))


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "ebnf": 'root ::= "a"'},
        {"response_format": {"type": "json_object"}, "regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": json_schema()},
        {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
    ],
)
def test_b54_two_at_once_or_an_incomplete_one_is_refused(fields):
    with pytest.raises(InvalidValue):
        grammar(**fields)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": "no JSON"},
        {"guided_json": "[1]"},
        {"guided_json": deep(200)},
        {"guided_json": "[" * 100_000},
        {"guided_json": {"enum": ["a" * LIMIT]}},
        {"guided_regex": "é" * (LIMIT // 2 + 1)},
        {"guided_choice": ["a", ""]},
    ],
    ids=range(7),
)
def test_b13_what_no_engine_should_read_is_an_invalid_schema(fields):
    with pytest.raises(InvalidSchema) as refused:
        grammar(**fields)
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize("form", [json.dumps, lambda schema: schema])
def test_the_size_is_checked_before_each_value_is_visited(form):
    with pytest.raises(InvalidSchema, match=f"the limit is {LIMIT}"):
        grammar(guided_json=form({"a": deep(200), "b": "c" * LIMIT}))


def test_a_schema_that_is_too_deep_for_the_encoder():
    options = StructuredOptions(guided_json=deep(sys.getrecursionlimit()))
    with pytest.raises(InvalidSchema, match="nested"):
        to_grammar(options, LIMIT)


def test_the_limits_are_the_last_that_pass():
    assert grammar(guided_json=deep(99)) is not None
    assert grammar(guided_regex="é" * (LIMIT // 2)) is not None


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "unsupported_parameter", "x"),
        ({"structured_outputs": {"xml": 1}}, "unsupported_parameter", "structured_outputs.xml"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_regex": ""}, "invalid_value", "guided_regex"),
        ({"guided_json": 3}, "invalid_value", "guided_json"),
        ({"regex": "a", "ebnf": "b"}, "invalid_value", "ebnf"),
        ({"guided_json": deep(200)}, "invalid_schema", "guided_json"),
    ],
)
@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_b54_a_bad_field_is_named(web, route, fields, code, param):
    if route == "chat":
        reply = await web.chat(**fields)
    else:
        body = {"model": "tiny", "prompt": "Hi", **fields}
        reply = await web.ask("/v1/completions", body)
    assert (reply.status, reply.code) == (400, code)
    assert reply.param == param or reply.param == f"response_format.{param}"


async def test_a_grammar_reaches_the_engine_from_both_routes(web):
    await web.chat(response_format=json_schema(schema=SCHEMA))
    await web.ask("/v1/completions", {"model": "tiny", "prompt": "Hi", "guided_regex": "a"})
    chat, completion = web.pipeline.works
    assert chat.sampling.grammar == Grammar("json", TEXT)
    assert completion.sampling.grammar == Grammar("regex", "a")


async def test_the_size_is_limited_by_a_setting(open_site):
    async with open_site(Limits(grammar_bytes=10)) as web:
        reply = await web.chat(guided_regex="a" * 11)
    assert (reply.status, reply.code, reply.param) == (400, "invalid_schema", "guided_regex")
