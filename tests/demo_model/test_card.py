"""The model card's tables say what the results say."""

import json
import re
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from models.demo import card, examples, scores
from models.demo.asking import CHECKPOINT
from models.demo.recipe.backgrounds import GROUNDS

RUN = scores.Run(
    "2026-01-01T00:00:00+00:00",
    "c0ffee1234567",
    0,
    "python -m models.demo.evaluate",
    {"cores": 2, "cpu": "a CPU"},
    "f00d5678901234",
    "seeds",
)
KNOWN = scores.Tally(
    200,
    {"EPD": 199, "E/PD": 198},
    {"EPD": 197, "E/PD": 196},
    1,
    [scores.Mistake("red", "green", 2)],
)
NEW = scores.Tally(100, {"EPD": 95, "E/PD": 95}, {"EPD": 90, "E/PD": 90}, 2)
FOUND = scores.Evaluation(
    RUN,
    {"colour": 0.98, "count": 0.995},
    {"colour": {"test": KNOWN, "new": NEW}, "count": {"test": KNOWN}, "talk": {"new": NEW}},
)


# Rows of "What it can", and the results that they rest on.
CLAIMS = {
    "colours": ["colour"],
    "shapes": ["shape"],
    "position": ["position"],
    "place": ["place"],
    "counting": ["count", "count to four", "count to four on texture"],
    "what is not there": ["absent"],
    "several pictures": ["pictures"],
    "digits": ["digit"],
    "emoji": ["emoji"],
    "words": ["word", "new word"],
    "clips": ["motion", "order"],
    "spoken digits": ["spoken digit"],
    "tones": ["tone", "beeps", "glide"],
    "a picture and a sound": ["together"],
    "a picture, a clip and a sound": ["mixed"],
    "a later turn": ["later"],
    "what it does not know": ["unknown texture"],
    "sounds without a word": ["unknown noise"],
    "no media": ["talk", "refuse", "nothing"],
}


def rows(text):
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def test_accuracy_is_held_against_its_aim():
    found = rows(card.table(FOUND))
    assert found["colour"] == [
        "98%",
        "99.0% of 200",
        "yes",
        "98.0%",
        "95.0% of 100",
        "90.0%",
        "3",
        "red → green (2)",
    ]
    assert found["count"][:6] == ["100%", "99.0% of 200", "**no**", "98.0%", "", ""]
    assert found["talk"][:6] == ["", "", "", "", "95.0% of 100", "90.0%"]


def test_changed_files_and_stored_answers_are_listed():
    assert "commit `c0ffee1234`, checkpoint" in card.table(FOUND)
    run = msgspec.structs.replace(RUN, changed_files=1, kept=[scores.Code("beef", 3)])
    said = card.table(msgspec.structs.replace(FOUND, run=run))
    told = "`c0ffee1234` with 1 changed file (some answers at `beef` with 3 changed files), check"
    assert told in said


def test_whatever_was_said_fits_its_cell():
    odd = scores.Tally(
        9, {"EPD": 0}, {"EPD": 0}, 0, [scores.Mistake("red", "a|b\n" + "word " * 40, 9)]
    )
    text = card.table(scores.Evaluation(RUN, {}, {"colour": {"test": odd}}))
    [said] = rows(text)["colour"][-1:]
    assert said.startswith("red → a/b word word")
    assert len(said) < 60


def test_controls_show_shares():
    control = scores.Control(0.25, 200, 196, 50, 60, 150, 1, 200, 199, 40, 39, 38)
    [_, _, row] = rows(card.table(scores.Controls(RUN, "EPD", {"colour": control}))).items()
    noise, removed = ["25.0%", "30.0%", "75.0%"], ["0.5%", "100.0%", "99.5%"]
    assert row == ("colour", ["25.0%", "98.0%", *noise, *removed, "40", "97.5%", "95.0%"])


def test_a_task_without_pairs_shows_none():
    control = scores.Control(0.25, 200, 196, 50, 60, 150, 1, 200, 199, 0, 0, 0)
    text = card.table(scores.Controls(RUN, "EPD", {"colour": control}))
    assert rows(text)["colour"][-3:] == ["0", "", ""]


def test_a_comparison_is_a_sentence():
    said = card.table(scores.Comparison(RUN, "EPD", 200, 199, 1.5e-5, {"colour": 100, "x": 100}))
    assert "199 of 200 requests over 2 tasks" in said
    assert "1.5e-05" in said


def test_agreement_with_vllm_is_a_sentence():
    drawn, samples = scores.Agreed(204, 203), scores.Agreed(36, 36)
    said = card.table(scores.Agreement(RUN, {"vllm": "0.1", "torch": "2"}, drawn, samples, 2.9e-6))
    assert "203 of 204 held-out requests over all tasks and 36 of 36 frozen samples" in said
    assert "(vllm 0.1, torch 2;" in said
    assert "3e-06 at most" in said


def test_the_card_says_what_the_results_say(tmp_path):
    """After an evaluation: ``python -m models.demo.card``."""
    page = tmp_path / "README.md"
    shutil.copy(card.CARD, page)
    card.write(page)
    assert page.read_text() == card.CARD.read_text()


@pytest.fixture(scope="module")
def measured():
    """In learned wordings. Parts were asked more often: where a task is in both, they count."""
    results = [scores.load(card.RESULTS / f"{name}.json") for name in ("evaluation", "parts")]
    return {
        task: splits["test"].accuracy for found in results for task, splits in found.tasks.items()
    }


def test_finding_13_nothing_below_95_percent_is_in_what_it_can(measured):
    text = card.CARD.read_text().partition("## What it can\n")[2].partition("\n## ")[0]
    claimed = [*rows(text)][2:]  # after the table's head
    assert claimed == [*CLAIMS]
    below = {
        row: [task for task in tasks if measured[task] < 0.95] for row, tasks in CLAIMS.items()
    }
    assert {row: tasks for row, tasks in below.items() if tasks} == {}


def test_finding_13_the_demo_shows_only_what_is_claimed():
    for pick in examples.PICKS:
        task = pick.maker.replace("_", " ")
        assert any(task in tasks for tasks in CLAIMS.values()), task


def test_finding_13_accuracy_is_listed_by_background():
    found = scores.load(card.RESULTS / "backgrounds.json")
    assert {"count", "position"} <= {*found.tasks}
    assert all({*kinds} == {*GROUNDS} for kinds in found.tasks.values())
    assert "| task | plain | pattern | texture |" in card.CARD.read_text()


def test_every_result_is_of_the_checkpoint_that_ships():
    shipped = scores.fingerprint(scores.open_model(CHECKPOINT))
    for file in card.RESULTS.glob("*.json"):
        assert scores.load(file).run.checkpoint == shipped, file.name


def test_no_result_names_a_place_on_a_machine():
    for file in (card.CARD, *card.RESULTS.glob("*.json")):
        assert re.findall(r"(?<![\w.:/)-])[/~]/?\w[\w.-]*/[^\s`]*", file.read_text()) == [], file


def test_results_stand_between_their_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("A\n<!-- evaluation: begin -->\nold\n<!-- evaluation: end -->\nB\n")
    scores.save(FOUND, tmp_path / "results" / "evaluation.json")
    for _ in range(2):
        card.write(page, tmp_path / "results", tmp_path / "none", tmp_path / "none.json")
    text = page.read_text()
    assert text.startswith("A\n<!-- evaluation: begin -->\n\n`python -m models.demo.evaluate`, 20")
    assert text.endswith("\n\n<!-- evaluation: end -->\nB\n")
    assert "old" not in text
    assert text.count("| colour |") == 1


def test_a_page_without_a_place_is_refused():
    with pytest.raises(SystemExit, match="no place for controls"):
        card.put("A\n<!-- controls: begin -->\n", "controls", "table")


def test_size_is_counted_from_the_weights(tmp_path):
    weights = {
        "thinker.visual.a": torch.zeros(3, 4),
        "thinker.audio_tower.b": torch.zeros(5),
        "thinker.model.embed_tokens.weight": torch.zeros(10, 2),
        "thinker.model.layers.0.c": torch.zeros(7),
        "thinker.model.norm.weight": torch.zeros(2),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "tokenizer.json").write_bytes(b" " * 1_500_000)
    text = card.size(tmp_path)
    found = rows(text)
    assert found["vision tower"] == ["12"]
    assert found["audio tower"] == ["5"]
    assert found["token embeddings (in and out)"] == ["20"]
    assert found["language model"] == ["9"]
    assert found["all"] == ["46"]
    assert "1.5 MB in all" in text


def test_sources_are_listed_by_licence(tmp_path):
    listed = [("b", "2", "MIT"), ("a", "1", "OFL"), ("c", "3", "MIT")]
    packages = [{"package": p, "version": v, "licence": licence} for p, v, licence in listed]
    (tmp_path / "SOURCES.json").write_text(json.dumps({"fonts.zip": packages}))
    text = card.credits(tmp_path / "SOURCES.json")
    assert "| fonts.zip | MIT | b 2, c 3 |" in text
    assert "| fonts.zip | OFL | a 1 |" in text
