"""Reasoning before the answer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.parsers.outputs import outputs, parse

from triptych.parsers.registry import make_parser


def split_whole(text, inside):
    """What the parser should make of a text, from the whole of it."""
    if opening := re.match(r"\s*<think>", text):
        text = text[opening.end() :]
    elif not inside:
        return text, "", []
    thought, closed, rest = text.partition("</think>")
    thought = thought.lstrip("\n")
    return rest.lstrip("\n"), thought.rstrip("\n") if closed else thought, []


PARTS = ["<think>", "</think>", "<", "</", "think>", "\n", "\n\n", " ", "a", "<tool_call>", "é"]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.booleans(), st.integers(1, 9))
def test_however_it_is_divided(parts, inside, size):
    text = "".join(parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parser = make_parser(None, "think", starts_in_reasoning=inside)
    assert parse(parser, pieces) == split_whole(text, inside)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nYes.\n</think>\n\nNo.", "No.", "Yes."),
        ("<think>\n\n</think>\n\nNo.", "No.", ""),
        ("No <think>Yes</think>", "No <think>Yes</think>", ""),
        ("<think>Yes", "", "Yes"),
        ("</think>No", "</think>No", ""),
        ("<thin", "<thin", ""),
    ],
)
def test_reasoning_and_content(text, content, reasoning):
    assert parse(make_parser(None, "think"), text) == (content, reasoning, [])


def test_reasoning_is_withheld_only_where_a_marker_may_begin():
    parser = make_parser(None, "think", starts_in_reasoning=True)
    sent = [one.reasoning for one in outputs(parser, ["We ", "see\n", "a < b", " <", "/th", "ere"])]
    assert sent == ["We ", "see", "\na < b", " ", "", "</there", ""]


def test_white_space_does_not_add_up():
    """However much white space comes, a push copies none of what came before."""
    parser = make_parser(None, "think")
    for _ in range(1000):
        parser.push("\n")
    assert parser._held == ""
    assert parser.push("a").content == "\n" * 1000 + "a"
