"""Outputs of all families: however they are divided, the deltas add up to the same calls."""

import gc
import itertools
import json
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.parsers.outputs import outputs, parse
from tests.unit.parsers.recorded import FUNCTIONS, RECORDED, Recorded

from triptych.parsers.registry import TOOL_PARSERS, make_parser


def parser_of(recorded: Recorded):
    return make_parser(
        recorded.tool,
        recorded.reasoning_parser,
        starts_in_reasoning=recorded.inside,
        functions=FUNCTIONS,
    )


def in_pieces(text, cuts):
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def test_every_format_is_recorded():
    assert {recorded.tool for recorded in RECORDED} == set(TOOL_PARSERS)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
def test_whole_outputs(recorded):
    content, reasoning, calls = parse(parser_of(recorded), [recorded.text])
    assert (content, reasoning) == (recorded.content, recorded.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == recorded.calls


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
def test_split_at_every_place(recorded):
    text = recorded.text
    whole = parse(parser_of(recorded), [text])
    for at in range(len(text) + 1):
        assert parse(parser_of(recorded), [text[:at], text[at:]]) == whole, at
    assert parse(parser_of(recorded), text) == whole, "character by character"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
def test_split_at_many_places(recorded):
    chance = random.Random(7)
    whole = parse(parser_of(recorded), [recorded.text])
    for _ in range(100):
        cuts = chance.choices(range(len(recorded.text)), k=chance.randint(2, 30))
        pieces = in_pieces(recorded.text, cuts)
        assert parse(parser_of(recorded), pieces) == whole, pieces


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
def test_an_output_cut_off_anywhere_loses_nothing_that_was_sent(recorded):
    """What the parser said of a text stays a beginning of what it says of a longer one."""
    whole_content, whole_reasoning, whole_calls = parse(parser_of(recorded), [recorded.text])
    for end in range(len(recorded.text)):
        parser = parser_of(recorded)
        sent = parser.push(recorded.text[:end])
        assert whole_content.startswith(sent.content)
        assert whole_reasoning.startswith(sent.reasoning)
        for call in sent.calls:
            name, arguments = whole_calls[call.index]
            assert call.name == name
            assert arguments.startswith(call.arguments)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
def test_arguments_stream(recorded):
    """No argument waits for the end of its call: each has as many deltas as pushes gave text."""
    parsed = list(outputs(parser_of(recorded), recorded.text))
    for index, (_, value) in enumerate(recorded.calls):
        if value:
            deltas = [call for one in parsed for call in one.calls if call.index == index]
            assert len(deltas) > len(value)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.family)
@pytest.mark.parametrize("end", [None, 10])
def test_a_finished_parser_needs_no_garbage_collection(recorded, end):
    gc.disable()
    try:
        parser = parser_of(recorded)
        gone = weakref.ref(parser)
        parse(parser, [recorded.text[:end]])
        del parser
        assert gone() is None
    finally:
        gc.enable()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_several_outputs_in_a_row(data):
    """Calls of one family, with text between, at random cuts."""
    tool = data.draw(st.sampled_from(sorted(TOOL_PARSERS)))
    texts = [r.text for r in RECORDED if r.tool == tool and r.reasoning_parser is None]
    between = st.sampled_from(["\n", " and ", "\n<", "[", "{", "\n\n```\n"])
    parts = data.draw(st.lists(st.tuples(between, st.sampled_from(texts or [""])), max_size=4))
    text = "".join(map("".join, parts))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    whole = parse(make_parser(tool, None, functions=FUNCTIONS), [text])
    assert parse(make_parser(tool, None, functions=FUNCTIONS), in_pieces(text, cuts)) == whole
