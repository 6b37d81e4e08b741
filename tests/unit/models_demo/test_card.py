"""The model card's tables say what the results say."""

import pytest

from models.demo import card, scores

RUN = scores.Run(
    "2026-01-01T00:00:00+00:00",
    "c0ffee1234567",
    0,
    "python -m models.demo.evaluate",
    {"cores": 2, "cpu": "a CPU"},
    "f00d5678901234",
    "seeds",
)
KNOWN = scores.Tally(200, {"EPD": 199, "E/PD": 198}, 1, [scores.Mistake("red", "green", 2)])
NEW = scores.Tally(200, {"EPD": 190, "E/PD": 190}, 2)
FOUND = scores.Evaluation(
    RUN,
    {"colour": 0.98, "count": 0.995},
    {"colour": {"test": KNOWN, "new": NEW}, "count": {"test": KNOWN}, "talk": {"new": NEW}},
)


def rows(text):
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def test_accuracy_is_held_against_its_aim():
    found = rows(card.table(FOUND))
    assert found["colour"] == [
        "98%",
        "99.0% of 200",
        "yes",
        "95.0% of 200",
        "3",
        "red → green (2)",
    ]
    assert found["count"][:4] == ["100%", "99.0% of 200", "**no**", ""]
    assert found["talk"][:4] == ["", "", "", "95.0% of 200"]


def test_whatever_was_said_fits_its_cell():
    odd = scores.Tally(9, {"EPD": 0}, 0, [scores.Mistake("red", "a|b\n" + "word " * 40, 9)])
    text = card.table(scores.Evaluation(RUN, {}, {"colour": {"test": odd}}))
    [said] = rows(text)["colour"][-1:]
    assert said.startswith("red → a/b word word")
    assert len(said) < 60


def test_controls_show_shares():
    control = scores.Control(0.25, 200, 196, 50, 150, 1, 200, 199, 40, 39, 38)
    [_, _, row] = rows(card.table(scores.Controls(RUN, "EPD", {"colour": control}))).items()
    shares = ["25.0%", "98.0%", "25.0%", "75.0%", "0.5%", "100.0%", "99.5%", "40", "97.5%", "95.0%"]
    assert row == ("colour", shares)


def test_a_task_without_pairs_shows_none():
    control = scores.Control(0.25, 200, 196, 50, 150, 1, 200, 199, 0, 0, 0)
    text = card.table(scores.Controls(RUN, "EPD", {"colour": control}))
    assert rows(text)["colour"][-3:] == ["0", "", ""]


def test_a_comparison_is_a_sentence():
    said = card.table(scores.Comparison(RUN, "EPD", 200, 199, 1.5e-5, {"colour": 100, "x": 100}))
    assert "199 of 200 requests over 2 tasks" in said
    assert "1.5e-05" in said


def test_results_stand_between_their_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("A\n<!-- evaluation: begin -->\nold\n<!-- evaluation: end -->\nB\n")
    scores.save(FOUND, tmp_path / "results" / "evaluation.json")
    for _ in range(2):
        card.write(page, tmp_path / "results")
    text = page.read_text()
    assert text.startswith("A\n<!-- evaluation: begin -->\n\n`python -m models.demo.evaluate`, 20")
    assert text.endswith("\n\n<!-- evaluation: end -->\nB\n")
    assert "old" not in text
    assert text.count("| colour |") == 1


def test_a_page_without_a_place_is_refused():
    with pytest.raises(SystemExit, match="no place for controls"):
        card.put("A\n<!-- controls: begin -->\n", "controls", "table")
