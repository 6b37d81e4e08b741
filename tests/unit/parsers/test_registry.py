"""The formats by name, their detection, and parsers of whole outputs."""

import pytest
from tests.unit.parsers.outputs import parse

from triptych.parsers.base import string_parameters
from triptych.parsers.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    kept_markers,
    make_parser,
    starts_in_reasoning,
)


def test_nothing_to_look_for_is_no_parser():
    assert make_parser(None, None) is None


@pytest.mark.parametrize("at", range(60))
def test_reasoning_comes_before_calls(at):
    text = '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f"}</tool_call>'
    parser = make_parser("hermes", "think")
    assert parse(parser, [text[:at], text[at:]]) == ("", "Hm.", [("f", "{}")])


def test_a_named_function_takes_the_whole_output_as_arguments():
    parser = make_parser("hermes", None, named="f")
    assert parse(parser, ['{"name": "g"', "}"]) == ("", "", [("f", '{"name": "g"}')])


def test_unknown_functions_are_content():
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse(make_parser("hermes", None, functions={"f": frozenset()}), [text])[0] == text


def test_a_prompt_may_open_the_reasoning():
    assert starts_in_reasoning("think", "<|im_start|>assistant\n<think>\n")
    assert not starts_in_reasoning("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not starts_in_reasoning(None, "<think>")


def test_templates_without_signs_have_no_parser():
    assert detect_tool_parser("{{ messages }}") is None
    assert detect_reasoning_parser("{{ messages }}") is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ('<tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=p>", "qwen-coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("{{ '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}", "mistral"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>",
            "deepseek",
        ),
        (
            "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
            "pythonic",
        ),
        ('"<|tool_call_start|>[" + (calls | join(", ")) + "]<|tool_call_end|>"', "pythonic"),
        ('{"name": function name, "parameters": dictionary of argument name and its', "llama"),
        ("{{ '<function=' + name + '>' + arguments + '</function>' }}<|python_tag|>", None),
        ('within <tool_call></tool_call>: <tool_calls>[{"name": f, "arguments": a}]', None),
        ("{%- set begin = namespace ~ '<tool_call>' -%}", None),
    ],
)
def test_templates_say_their_format(written, name):
    assert detect_tool_parser("{% if tools %}" + written) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [("content.split('</think>')", "think"), ("[/THINK]", "mistral"), ("◁/think▷", "kimi")],
)
def test_templates_say_their_reasoning(written, name):
    assert detect_reasoning_parser("{{ messages }}" + written) == name


def test_markers_to_keep_are_those_of_both():
    assert kept_markers(None, None) == ()
    assert "<tool_call>" in kept_markers("hermes", "think")
    assert "</think>" in kept_markers("hermes", "think")


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, {"a"}),
        ({"properties": {"a": {"enum": ["x"]}, "b": {"enum": ["x", 1]}}}, {"a"}),
        ({"properties": {"a": {"type": ["string", "null"]}, "b": True}}, set()),
        ({"properties": 1}, set()),
        ({}, set()),
    ],
)
def test_only_parameters_that_take_nothing_but_strings_count(schema, names):
    assert string_parameters(schema) == names
