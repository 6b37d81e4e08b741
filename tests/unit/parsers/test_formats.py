"""What is not a well-formed call: where each character goes, format by format."""

import json

import pytest
from tests.unit.parsers.outputs import parse
from tests.unit.parsers.recorded import FUNCTIONS

from triptych.parsers.registry import make_parser

NOW = ("now", "{}")


def check(tool, text, content, calls):
    for pieces in ([text], text):
        parsed = parse(make_parser(tool, None, functions=FUNCTIONS), pieces)
        assert parsed == (content, "", calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        pytest.param(
            'A <tool_call>{"name": "now"}</tool_call> B <tool_call>{"name": "now"}</tool_call> C',
            "A  B  C",
            [NOW, NOW],
            id="text before, between and after",
        ),
        pytest.param(
            ' \n<tool_call>{"name": "now"}</tool_call>\n\n<tool_call>{"name": "now"}</tool_call>\n',
            "",
            [NOW, NOW],
            id="white space separates calls",
        ),
        pytest.param(
            '<tool_call>{"arguments": {"x": 1}, "name": "click"}</tool_call>',
            "",
            [("click", '{"x": 1}')],
            id="arguments before the name",
        ),
        pytest.param(
            '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW], id="null"
        ),
        pytest.param(
            '<tool_call>{"name": "click", "arguments": {"x": oops}}</tool_call>.',
            "oops}}</tool_call>.",
            [("click", '{"x": ')],
            id="malformed after it began: the call stands, the rest is content",
        ),
        pytest.param(
            '<tool_call>{"name": "click", "arguments": {"x": 1',
            "",
            [("click", '{"x": 1')],
            id="cut off inside of arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "now", "arguments": {}}\n</tool_',
            "",
            [NOW],
            id="cut off in the end marker",
        ),
        pytest.param(
            '<tool_call>{"name": "now", "arguments": {}, "why": 1}</tool_call>',
            ', "why": 1}</tool_call>',
            [NOW],
            id="another key after the arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "now", "arguments": {}} ok</tool_call>',
            " ok</tool_call>",
            [NOW],
            id="text before the end marker",
        ),
        pytest.param(
            '<tool_call>{"name": "now"}<tool_call>{"name": "now"}</tool_call>',
            "",
            [NOW, NOW],
            id="no end marker",
        ),
        pytest.param(
            '<tool_call><tool_call>{"name": "now"}</tool_call>',
            "<tool_call>",
            [NOW],
            id="the marker twice",
        ),
        pytest.param(
            '<tool_call>{"name": "write_file", "arguments": {"text": "</tool_call><tool_call>"}}'
            "</tool_call>",
            "",
            [("write_file", '{"text": "</tool_call><tool_call>"}')],
            id="markers in a string",
        ),
        pytest.param(
            '<tool_call>{"name": "write_file", "arguments": {"text": "a\n\t\\d\\\'\x00"}}'
            "</tool_call>",
            "",
            [("write_file", '{"text": "a\\n\\t\\\\d\\\\\'\\u0000"}')],
            id="repaired strings",
        ),
    ],
)
def test_hermes(text, content, calls):
    check("hermes", text, content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now"',
        '<tool_call>{"name": "now", "arguments": ',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "why": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        '<tool_call>{"arguments": {"x": 1}, "name": "unknown"}</tool_call>',
        '<tool_call>{"arguments": {"x": 1}}</tool_call>',
        '<tool_call>["now"]</tool_call>',
        "<tool_call></tool_call>",
        "</tool_call>",
    ],
)
def test_what_never_becomes_a_call_is_content(text):
    check("hermes", text, text, [])


@pytest.mark.parametrize("number", ["0", "-0", "12", "-1.5", "1e5", "2E-3", "0.5e+1"])
def test_json_numbers(number):
    text = f'<tool_call>{{"name": "click", "arguments": {{"x": {number}}}}}</tool_call>'
    check("hermes", text, "", [("click", f'{{"x": {number}}}')])


@pytest.mark.parametrize(("number", "good"), [("01", "0"), ("1.", "1."), (".5", ""), ("+1", "")])
def test_what_is_no_json_number(number, good):
    text = f'<tool_call>{{"name": "click", "arguments": {{"x": {number}}}}}</tool_call>'
    rest = number.removeprefix(good) + "}}</tool_call>"
    check("hermes", text, rest, [("click", f'{{"x": {good}')])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('So: {"name": "now", "parameters": {}}', None, []),
        ('So:\n {"name": "now", "parameters": {}}', "So:\n ", [NOW]),
        ('{"name": "now"}', None, []),
        ('<|python_tag|>{"name": "now"}', "", [NOW]),
        ('{"a": {"name": "now", "parameters": {}}}', None, []),
        ("<|python_tag|>print(1)", None, []),
        ('{"name": "now", "parameters": {}}; and', "; and", [NOW]),
        ('{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', "", [NOW, NOW]),
    ],
)
def test_llama(text, content, calls):
    check("llama", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[now()]", "", [NOW]),
        ("[now(), now()] ok", " ok", [NOW, NOW]),
        ("see [now()]", None, []),
        ("[now](https://example.com)", None, []),
        ("[now, now]", None, []),
        ("[unknown(a=1)]", None, []),
        ("[click(1)]", None, []),
        ("[click(x=print(1))]", "print(1))]", [("click", '{"x": ')]),
        ("[click(x=1 + 1)]", " + 1)]", [("click", '{"x": 1')]),
        ("[click(x=1, 2)]", ", 2)]", [("click", '{"x": 1')]),
        ("[click(x=((), [], {}), y=(1,))]", "", [("click", '{"x": [[], [], {}], "y": [1]}')]),
        ("[click(x={'a': {'b': None}})]", "", [("click", '{"x": {"a": {"b": null}}}')]),
        ("[click(x={1: 2})]", "1: 2})]", [("click", '{"x": {')]),
        ("[now(), ", ", ", [NOW]),
    ],
)
def test_pythonic(text, content, calls):
    check("pythonic", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    "written",
    [
        "''",
        '""',
        r"'it\'s'",
        '"it\'s"',
        r"'\x41\u00e9\U0001F431\ud83d\udc31'",
        r"'\d\\d\a\0'",
        "'''a 'b' ''c'''",
        '"""two\nlines"""',
        "'a\\\nb'",
    ],
)
def test_pythonic_strings_mean_what_python_reads(written):
    text = f"[write_file(text={written})]"
    content, _, [(_, arguments)] = parse(make_parser("pythonic", None), text)
    expected = {r"'\d\\d\a\0'": "\\d\\d\a\0"}.get(written) or eval(written)
    assert content == ""
    value = json.loads(arguments)["text"]
    assert value == expected.encode("utf-16", "surrogatepass").decode("utf-16")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[TOOL_CALLS]now{}", "", [NOW]),
        ("[TOOL_CALLS]now[ARGS]{} ok", " ok", [NOW]),
        ("[TOOL_CALLS]now[ARGS]", None, []),
        ("[TOOL_CALLS]now[CALL_ID][ARGS]{}", None, []),
        ("[TOOL_CALLS]unknown[ARGS]{}", None, []),
        ("[TOOL_CALLS] []", None, []),
        ('[TOOL_CALLS] [{"name": "now"}, 5]', ", 5]", [NOW]),
        ('[TOOL_CALLS] [{"name": "now"}', "", [NOW]),
    ],
)
def test_mistral(text, content, calls):
    check("mistral", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<｜tool▁calls▁begin｜>", None, []),
        ("<｜tool▁calls▁begin｜>now", None, []),
        ("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [NOW]),
        ("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁ca", "", [NOW]),
        ("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜> ok", " ok", [NOW]),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n``", "", [NOW]),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}", None, []),
    ],
)
def test_deepseek(text, content, calls):
    check("deepseek", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>now</tool_call>ok", "ok", [NOW]),
        ("<tool_call>now", None, []),
        ('<tool_call>{"name": "now"}</tool_call>', None, []),
        ("<tool_call>click<arg_key>x</arg_key>1</tool_call>", None, []),
        (
            "<tool_call>click<arg_key>x</arg_key><arg_value>1</arg_value>ok",
            "ok",
            [("click", '{"x": 1')],
        ),
        (
            "<tool_call>click<arg_key>x</arg_key><arg_value>1</arg_value></tool",
            "",
            [("click", '{"x": 1}')],
        ),
        (
            "<tool_call>click<arg_key>x</arg_key><arg_value>1</arg_",
            "",
            [("click", '{"x": "1</arg_')],
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>1</arg_",
            "",
            [("get_weather", '{"city": "1</arg_')],
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>1</arg_value></tool_call>",
            "",
            [("get_weather", '{"city": "1"}')],
        ),
        (
            "<tool_call>click<arg_key>x</arg_key><arg_value>True</arg_value>"
            "<arg_key>y</arg_key><arg_value>1, 2</arg_value></tool_call>",
            "",
            [("click", '{"x": true, "y": "1, 2"}')],
        ),
    ],
)
def test_glm(text, content, calls):
    check("glm", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<function=now></function>", "", [NOW]),
        ("<function=now></function>ok", "ok", [NOW]),
        ("<tool_call><function=now>", None, []),
        ("<tool_call>now</tool_call>", None, []),
        (
            "<function=click><parameter=x>\n\n a\n\n</parameter></function>",
            "",
            [("click", '{"x": "\\n a\\n"}')],
        ),
        ("<function=click><parameter=x>\n1\n</parameter>ok", "ok", [("click", '{"x": 1')]),
    ],
)
def test_qwen_coder(text, content, calls):
    check("qwen-coder", text, text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "arguments": {}}', "", [NOW]),
        ('[{"name": "now", "parameters": {}}] ok', " ok", [NOW]),
        ('Yes {"name": "now", "arguments": {}}', None, []),
        ("[]", None, []),
        (" \n", None, []),
    ],
)
def test_plain(text, content, calls):
    check("json", text, text if content is None else content, calls)


HELD = ' [{"name": "now", "parameters": {}}, {"name": "click", "parameters": {"x": 1}}]'


@pytest.mark.parametrize("size", range(len(HELD)))
def test_held_calls_that_are_cut_are_no_content(size):
    """Whatever the number of tokens: the syntax of the grammar is not for readers."""
    content, _, calls = parse(make_parser("json", None, held=True), HELD[:size])
    assert content == ""
    assert [name for name, _ in calls] == ["now", "click"][: len(calls)]
    assert len(calls) == (size > HELD.index("{}")) + (size > HELD.index('{"x"'))


def test_held_output_of_an_engine_that_follows_no_grammar_is_content():
    for text in ("Yes.", '[{"name": "now", 5'):
        assert parse(make_parser("json", None, held=True), text) == (text, "", [])


@pytest.mark.parametrize("text", ["5", "", ' "a"', "[1]"])
def test_a_named_function_without_an_object_is_content(text):
    assert parse(make_parser("json", None, named="now"), text) == (text, "", [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("12345678901234567890123", "12345678901234567890123"), ("[" * 5000, None), ("\ud800", None)],
)
def test_values_between_tags(value, expected):
    text = f"<tool_call>click<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
    _, _, [(_, arguments)] = parse(make_parser("glm", None), [text])
    assert arguments == f'{{"x": {expected or chr(34) + value + chr(34)}}}'
