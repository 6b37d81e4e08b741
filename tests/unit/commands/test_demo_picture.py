"""docs/demo.svg: a terminal's text as a picture."""

import xml.etree.ElementTree as ET

import pytest
from tools.demo_picture import FRONT, Style, runs, svg, tidied

from triptych.commands.terminal import Terminal

PAINT = Terminal("all", True).paint
SVG = "{http://www.w3.org/2000/svg}"


def test_runs_have_their_place_and_style():
    text = f"ab{PAINT('cd', (1, 2, 3), (4, 5, 6))}e\nf"
    assert [(r.row, r.column, r.text, r.style) for r in runs(text)] == [
        (0, 0, "ab", Style()),
        (0, 2, "cd", Style("#010203", "#040506")),
        (0, 4, "e", Style()),
        (1, 0, "f", Style()),
    ]


def test_an_unknown_sequence_is_not_passed_over():
    with pytest.raises(ValueError, match="7"):
        list(runs("\x1b[7mx"))


def test_half_blocks_and_bars_become_areas_and_words_stay_words():
    text = f"{PAINT('▀▀', (255, 0, 0), (0, 0, 255))} a <b>\n{PAINT('█▄', (0, 255, 0))}"
    root = ET.fromstring(svg(text))
    paths = {path.get("fill"): path.get("d") for path in root.iter(f"{SVG}path")}
    assert paths["#ff0000"].count("M") == 1  # equal neighbours are one area
    assert paths["#00ff00"].count("M") == 2
    assert "h16v17" in paths["#0000ff"]
    assert "h16v8.5" in paths["#ff0000"]
    words = [(t.text, t.get("fill")) for t in root.iter(f"{SVG}text")]
    assert ("a <b>", FRONT) in words
    assert not any("▀" in text for text, _ in words)


RUN = """Triptych demo: E/PD.

starting  2 s
ready     after 3 s

  1/2  picture a.png

  question  A?

  \x1b[38;2;1;2;3m▀▀\x1b[0m   \x1b[38;2;9;9;9m2/2  sound b.wav\x1b[0m
  question  B?

2 of 2 answers are right.
"""


def test_a_run_is_tidied():
    text = tidied(RUN)
    assert text.startswith("$ make demo\nTriptych demo: E/PD.\n\nready     after 3 s\n\n  1/2  pic")
    assert "starting" not in text
    assert text.endswith("B?\n\n2 of 2 answers are right.")
    assert "A?" in text


def test_examples_can_be_chosen():
    text = tidied(RUN, ["2"])
    assert "A?" not in text
    assert "B?" in text
    assert text.endswith("\n\n2 of 2 answers are right.")
    assert "B?" not in tidied(RUN, ["1"])
