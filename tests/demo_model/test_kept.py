"""Answers on disk: found again when the same is asked, and whole lines only."""

import msgspec

from models.demo.asking import Answer, Question
from models.demo.kept import Kept
from models.demo.recipe.sample import Turn
from models.demo.scores import Code, Run

RUN = Run("2026-01-01", "c0ffee", 1, "python -m x", {}, "f00d", "seeds")
ONE, OTHER = (
    [Question("side", 0, Turn("side", asked, "Left.", ("left",)))] for asked in ("Which?", "Where?")
)
SAID = [Answer("Left.", (1, 2), (3,), (-0.5, -0.25))]


def test_what_was_answered_is_found_with_its_code(tmp_path):
    file = tmp_path / "answers.jsonl"
    Kept(file, RUN).add("EPD", ONE, SAID)
    kept = Kept(file, msgspec.structs.replace(RUN, commit="beef"))
    assert kept.run.kept == []
    assert kept.get("EPD", OTHER) is None
    assert kept.get("E/PD", ONE) is None
    assert kept.get("EPD", ONE) == SAID
    assert kept.run.kept == [Code("c0ffee", 1)]


def test_a_line_that_was_being_written_is_dropped(tmp_path):
    file = tmp_path / "answers.jsonl"
    for asked in (ONE, OTHER):
        Kept(file, RUN).add("EPD", asked, SAID)
    file.write_bytes(file.read_bytes()[:-9])
    kept = Kept(file, RUN)
    assert (kept.get("EPD", ONE), kept.get("EPD", OTHER)) == (SAID, None)
    kept.add("EPD", OTHER, SAID)
    assert Kept(file, RUN).get("EPD", OTHER) == SAID


def test_nothing_is_stored_without_a_file():
    kept = Kept(None, RUN)
    kept.add("EPD", ONE, SAID)
    assert kept.get("EPD", ONE) is None
