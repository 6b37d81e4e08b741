"""Arbitrary text in every format: nothing is lost, nothing raises, and the work is linear.

The invariant: each character of an output is in its content, its reasoning, the name or the
arguments of a call, or it is syntax of a call that was recognized. So (1) characters that no syntax
has come out exactly once; (2) what is content is a subsequence of the output;
(3) without a call, content is the output itself; (4) all of this is the same however the output is
divided.
"""

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.parsers.outputs import parse
from tests.unit.parsers.recorded import FUNCTIONS, RECORDED

from triptych.parsers.json_arguments import DEPTH
from triptych.parsers.reader import NAME_CHARACTERS, Markers
from triptych.parsers.registry import TOOL_PARSERS, make_parser

MARKERS = sorted({marker for one in TOOL_PARSERS.values() for marker in one.kept_markers})
WORDS = [
    *('{"name": "now"', ', "arguments": {', '"parameters":', '"click"', "null", "true", "1.5e-3"),
    *("[now(", "click(x=", "'a\\'", '"b\\n"', "True", "```json", "```", "function", "f", "now"),
    *("<function=now>", "<parameter=x>", "</parameter>", "</function>", '"id": "a1"', "\\u00e9"),
    *"{}[]()<>\"':;,=\\/-0 \n\t\x00",
]
PAYLOAD = [chr(0xE000 + place) for place in range(64)]  # private: no syntax has them


@st.composite
def outputs_of(draw, tool):
    """Fragments in any order, or recorded outputs with a few edits."""
    own = list(TOOL_PARSERS[tool].kept_markers) or ["[", "{"]
    recorded = [r.text for r in RECORDED if r.tool == tool and r.reasoning_parser is None]
    half = st.builds(lambda marker, end: marker[:end], st.sampled_from(own), st.integers(1, 12))
    some = st.one_of(st.sampled_from(own), st.sampled_from(WORDS), half, st.sampled_from(PAYLOAD))
    if draw(st.booleans()):
        return unique("".join(draw(st.lists(some, max_size=40))))
    text = "".join(draw(st.lists(st.sampled_from(recorded), min_size=1, max_size=2)))
    places = st.integers(0, len(text))
    for at, removed, new in draw(st.lists(st.tuples(places, st.integers(0, 9), some), max_size=4)):
        text = text[:at] + new + text[at + removed * (removed > 5) :]
    for character, at in zip(PAYLOAD, draw(st.lists(places, max_size=4)), strict=False):
        text = text[:at] + character + text[at:]
    return unique(text)


def unique(text):
    """The text with the first of each payload character only."""
    seen = set()
    return "".join(
        character
        for character in text
        if not is_payload(character) or not (character in seen or seen.add(character))
    )


def is_payload(character):
    return "\ue000" <= character <= "\uf8ff"


def new_parser(tool):
    return make_parser(tool, None, functions=FUNCTIONS)


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_text_is_lost(tool, data):
    text = data.draw(outputs_of(tool))
    whole = content, reasoning, calls = parse(new_parser(tool), [text])
    assert reasoning == ""
    said = content + "".join(map("".join, calls))
    assert sorted(filter(is_payload, said)) == sorted(filter(is_payload, text))
    unread = iter(text)
    assert all(character in unread for character in content), "a subsequence"
    if not calls:
        assert content == text
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    edges = [0, *sorted(cuts), len(text)]
    assert parse(new_parser(tool), [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert parse(new_parser(tool), text) == whole


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
@settings(max_examples=30, deadline=None)
@given(text=st.text())
def test_ordinary_text_is_content(tool, text):
    assert parse(new_parser(tool), text) == (text, "", [])


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
def test_ordinary_text_is_not_withheld(tool):
    parser = new_parser(tool)
    assert parser.push("Hello, ").content == "Hello, "
    assert parser.push("world. 2 + ").content == "world. 2 + "


HOSTILE = [
    *("<", "<tool_call>", "<tool_call>\n", '<tool_call>{"name": "', "[", "{", "[TOOL_CALLS]"),
    *(
        '{"name": "now", ',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
        " ",
        "\n",
    ),
    *("[now(", "[click(x=", "<tool_call>now<arg_key>", "<function=now>", '{"arguments": {}, '),
]
OPENED = {
    "deepseek": "<｜tool▁call▁begin｜>click<｜tool▁sep｜>",
    "glm": "<tool_call>click<arg_key>x</arg_key><arg_value>",
    "hermes": '<tool_call>{"name": "click", "arguments": ',
    "json": '{"name": "click", "arguments": ',
    "llama": '{"name": "click", "parameters": ',
    "mistral": "[TOOL_CALLS]click[ARGS]",
    "pythonic": "[click(x=",
    "qwen-coder": "<function=click><parameter=x>",
}
HOSTILE_ARGUMENTS = [
    '{"a":',
    "[",
    '{"a": "' + "\\",
    '{"a": "\\u',
    "1",
    "{'",
    '{"a": 1e',
    "</",
    "\n",
]


def count_calls(parser, pieces):
    """How many functions are called, those of C too."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for piece in pieces:
            parser.push(piece)
            unread = len(parser._text) - parser._at
            assert unread <= 32, "what is unread is copied with every push"
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
def test_work_is_linear_in_the_text(tool):
    opened = [OPENED[tool] + start for start in HOSTILE_ARGUMENTS]
    for start, unit in [*(("", one) for one in HOSTILE), *((one, one[-1]) for one in opened)]:
        for split in (list, lambda text: [text]):
            short, long = (
                count_calls(new_parser(tool), split(start + unit * times)) for times in (50, 200)
            )
            assert long <= 4.4 * short + 100, (start, unit, short, long)


@pytest.mark.parametrize("tool", ["hermes", "pythonic"])
@pytest.mark.parametrize("extra", [0, 1])
def test_depth_is_bounded(tool, extra):
    nested = "[" * (DEPTH - (tool == "hermes") + extra)
    argument = nested + nested.replace("[", "]")
    if tool == "hermes":
        text = f'<tool_call>{{"name": "click", "arguments": {{"x": {argument}}}}}</tool_call>'
    else:
        text = f"[click(x={argument})]"
    content, _, _ = parse(new_parser(tool), [text])
    assert bool(content) == bool(extra)


def test_names_are_bounded():
    text = f'<tool_call>{{"name": "{"f" * (NAME_CHARACTERS + 1)}"}}</tool_call>'
    assert parse(make_parser("hermes", None), [text]) == (text, "", [])
    assert parse(make_parser("hermes", None), [text.replace("ff", "f", 1)])[0] == ""


def test_markers_find_the_first_and_the_beginning_of_one():
    markers = Markers("<ab>", "<<c", "<ab>d")
    assert markers.find("x<ab>d<<c", 0) == (1, 6)
    assert markers.find("x<ab>d<<c", 2) == (6, 9)
    assert markers.find("x<<a<ab", 0) == (4, 4)
    assert markers.find("x<<", 0) == (1, 1)
    assert markers.find("xyz", 0) == (3, 3)


@pytest.mark.parametrize(
    ("format", "text", "cut"),
    [
        ("hermes", '<tool_call>{"name": "click", "arguments": {"x": {"y": 1}', True),
        ("hermes", '<tool_call>{"name": "click", "arguments": {"x": 1}}', False),
        ("glm", "<tool_call>click<arg_key>x</arg_key><arg_value>1", True),
        ("glm", "<tool_call>click<arg_key>x</arg_key><arg_value>1</arg_value>", True),
        ("glm", "<tool_call>click<arg_key>x</arg_key><arg_value>1</arg_value></tool", False),
        ("glm", '<tool_call>click<arg_key>x</arg_key><arg_value>{"a": 1}', True),
        ("hermes", "No call", False),
    ],
)
def test_an_output_tells_whether_it_ended_inside_of_a_call(format, text, cut):
    parser = make_parser(format, None)
    parser.push(text)
    assert parser.finish().cut == cut
