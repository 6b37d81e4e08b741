"""Evaluation, controls and frozen samples, with answers that are made up instead of a server's."""

import contextlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from models.demo import evaluate, frozen, scores
from models.demo.asking import Answer, draw, question
from models.demo.recipe.chat import MISSING
from models.demo.recipe.sample import Picture, Sample, Split, Turn

SIDES = frozenset({"left", "right"})
RUN = scores.Run("2026-01-01", "c0ffee", 2, "python -m x", {}, "f00d", "seeds")


def side(rng, split, turns):
    truth = rng.choice(["left", "right"])
    pixels = np.full((8, 8, 3), rng.randrange(100), np.uint8)
    pixels[:, : 4 if truth == "left" else 8] = 255
    asked = rng.choice(["Which side?", "Where is it?"]) + (" Now?" if split is Split.NEW else "")
    return Sample((Picture(pixels),), (Turn("side", asked, truth, (truth,), SIDES),))


def talk(rng, split, turns):
    return Sample((), (Turn("talk", f"Hello {split}", "Hello.", ("hello",), frozenset({"hello"})),))


def answer(text):
    return Answer(text, tuple(text.encode()), (), ())


@pytest.fixture
def setting(monkeypatch, tmp_path):
    """Whom it asks looks at the files as a model that sees well would."""
    truths = {}
    for number in range(1000):
        for split in (Split.TEST, Split.NEW):
            one = question("side", number, draw("side", side, split, number))
            truths[one.files[0].data] = one.turn.truth[0]

    def says(one):
        if one.task == "talk":
            return "Hello."
        return truths.get(one.files[0].data, "left") if one.files else MISSING

    async def ask_all(url, asked, at_once=8, tell=None):
        return [answer(says(one)) for one in asked]

    monkeypatch.setattr(evaluate, "ask_all", ask_all)
    return evaluate.Setting(
        makers={"side": side, "talk": talk},
        aims={"side": 0.9, "elsewhere": 0.9},
        patterns=("EPD", "E/PD"),
        counts={Split.TEST: 40, Split.NEW: 30},
        checkpoint=tmp_path,
        run=RUN,
        url="http://127.0.0.1:1",
        save=tmp_path / "found.json",
    )


def test_every_task_is_asked_in_both_wordings_and_every_pattern(setting):
    found = evaluate.evaluate(setting)
    assert set(found.tasks) == {"side", "talk"}
    for splits in found.tasks.values():
        for split, count in (("test", 40), ("new", 30)):
            assert splits[split].count == count
            assert splits[split].right == {"EPD": count, "E/PD": count}
            assert splits[split].verbatim == {"EPD": count, "E/PD": count}
            assert splits[split].differing == 0
    assert found.aims == {"side": 0.9}
    assert found.run == RUN
    assert scores.load(setting.save) == found


def test_a_stopped_evaluation_goes_on_where_it_was(setting, tmp_path, monkeypatch):
    asking, rounds = evaluate.ask_all, []

    async def stopped(url, asked, at_once=8, tell=None):
        if len(rounds) == 5:
            raise KeyboardInterrupt
        rounds.append(asked[0].task)
        return await asking(url, asked)

    def asked_anew(setting):
        """Rounds of the eight; five at most."""
        rounds.clear()
        with contextlib.suppress(KeyboardInterrupt):
            evaluate.evaluate(setting)
        return len(rounds)

    setting = replace(setting, answers=tmp_path / "answers.jsonl")
    monkeypatch.setattr(evaluate, "ask_all", stopped)
    assert [asked_anew(setting) for _ in range(3)] == [5, 3, 0]
    assert scores.load(setting.save).tasks["side"]["test"].right == {"EPD": 40, "E/PD": 40}
    fewer = {Split.TEST: 39, Split.NEW: 29}
    assert asked_anew(replace(setting, counts=fewer)) == 5, "other questions"
    other = msgspec.structs.replace(RUN, checkpoint="another")
    assert asked_anew(replace(setting, run=other)) == 5, "another checkpoint"


def test_a_result_names_all_code_that_its_answers_were_given_by(setting, tmp_path):
    setting = replace(setting, answers=tmp_path / "answers.jsonl")
    later = msgspec.structs.replace(RUN, commit="beef", changed_files=0)
    assert evaluate.evaluate(setting).run.kept == []
    assert evaluate.evaluate(setting).run.kept == [], "the same code"
    found = evaluate.evaluate(replace(setting, run=later)).run
    assert (found.commit, found.kept) == ("beef", [scores.Code("c0ffee", 2)])
    unused = {Split.TEST: 39}
    assert evaluate.evaluate(replace(setting, run=later, counts=unused)).run.kept == []


def test_the_result_describes_the_run_as_it_began(monkeypatch):
    monkeypatch.setattr("sys.argv", ["evaluate", "--count", "9", "--tasks", "colour"])
    given = evaluate._parser().parse_args(["--count", "9", "--tasks", "colour"])
    setting = evaluate._setting(given)
    assert setting.run.command == "python -m models.demo.evaluate --count 9 --tasks colour"
    monkeypatch.setattr(scores, "_git", lambda *words: "a later commit")
    assert setting.run.commit != "a later commit"


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("", {"test": 200, "new": 200}),
        ("--count 9", {"test": 9, "new": 9}),
        ("--count 9 --new-count 5", {"test": 9, "new": 5}),
        ("--split new --new-count 5", {"new": 5}),
        ("--split test --new-count 5", {"test": 200}),
        ("--control --count 7", {"test": 7}),
    ],
)
def test_learned_and_new_wordings_have_their_counts(words, counts):
    assert evaluate._counts(evaluate._parser().parse_args(words.split())) == counts


def test_who_looks_changes_its_answers_and_asks_for_what_is_missing(setting):
    [(task, found)] = evaluate.control(setting).tasks.items()
    assert task == "side", "talk needs no media"
    assert (found.count, found.right) == (40, 40)
    assert found.noise_right < 30
    assert found.noise_told == 40, "it says left to any noise"
    assert found.noise_changed == 40 - found.noise_right
    assert (found.removed_right, found.removed_changed, found.removed_asks) == (0, 40, 40)
    assert found.pairs == found.pairs_changed == found.pairs_right == 40
    assert 0.5 <= found.chance < 0.8


def test_who_does_not_look_stays_at_chance(setting, monkeypatch):
    async def blind(url, asked, at_once=8, tell=None):
        return [answer("left") for _ in asked]

    monkeypatch.setattr(evaluate, "ask_all", blind)
    found = evaluate.control(setting).tasks["side"]
    assert found.right == found.noise_right == found.removed_right <= found.chance * 40
    assert found.noise_changed == found.pairs_changed == found.pairs_right == 0
    assert found.removed_asks == 0


def test_frozen_are_pairs_that_are_answered_rightly(setting, tmp_path, monkeypatch):
    seeing = evaluate.ask_all

    async def mostly(url, asked, at_once=8, tell=None):
        answers = await seeing(url, asked)
        both = zip(asked, answers, strict=True)
        return [answer("No.") if one.number < 8 else said for one, said in both]

    monkeypatch.setattr(evaluate, "ask_all", mostly)
    evaluate.freeze(setting, tmp_path / "frozen")
    one, other, *talked = frozen.read(tmp_path / "frozen")
    assert one.turn.question == other.turn.question
    assert one.turn.truth != other.turn.truth
    assert min(one.number, other.number) >= 8
    assert [t.task for t in talked] == ["talk", "talk"]
