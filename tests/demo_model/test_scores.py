"""Counting: what is right, what is the same in every pattern, what is mistaken for what."""

import msgspec
import pytest

from models.demo import scores
from models.demo.asking import Answer
from models.demo.recipe.sample import Turn

COLOURS = frozenset({"red", "green", "blue"})


def turn(truth):
    return Turn("colour", "Which colour?", f"It is {truth}.", (truth,), COLOURS)


def answer(text, *ids):
    return Answer(text, ids or tuple(map(ord, text)), (1, 2), ())


def test_other_words_are_as_good():
    turns = [turn("red"), turn("red"), turn("red"), turn("red")]
    said = ["Red!", "The circle is red.", "It is red or green.", "I do not know."]
    assert scores.right(turns, [answer(text) for text in said]) == 2


def test_a_tally_counts_by_pattern_and_finds_what_differs():
    turns = [turn("red"), turn("green"), turn("blue")]
    folded = [answer("red"), answer("green"), answer("red")]
    apart = [answer("red"), answer("blue"), answer("red")]
    found = scores.tally(turns, {"EPD": folded, "E/P/D": apart})
    assert found.right == {"EPD": 2, "E/P/D": 1}
    assert found.differing == 1
    assert found.accuracy == pytest.approx(1 / 3), "of the pattern where it is lowest"


def test_word_for_word_is_stricter():
    turns = [turn("red"), turn("green"), turn("blue")]
    folded = [answer("It is red."), answer("It is green."), answer("Blue.")]
    apart = [answer("It is red."), answer("it is green."), answer("It is blue")]
    found = scores.tally(turns, {"EPD": folded, "E/P/D": apart})
    assert found.right == {"EPD": 3, "E/P/D": 3}
    assert found.verbatim == {"EPD": 2, "E/P/D": 1}
    assert found.word_for_word == pytest.approx(1 / 3), "of the pattern where it is lowest"


def test_an_answer_may_name_no_choice():
    turns = [turn("red"), turn("red"), Turn("word", "Read it.", "It says TAP.", ("TAP",))]
    said = [answer("It is green."), answer("I can't see."), answer("It says TOP.")]
    assert scores.names_a_choice(turns, said) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--count 9 --control --save models/x.json", "--count 9 --control --save models/x.json"),
        ("--pattern E/PD --answers answers.jsonl --count 9", "--pattern E/PD --count 9"),
        ("--answers=answers.jsonl --control", "--control"),
        ("--save /somewhere/else.json --count 9", "--count 9"),
        ("--save=/somewhere/else.json --control", "--control"),
        ("--save ~/else.json", ""),
        ("--save ../../../../../else.json", ""),
        (f"--save {scores.ROOT}/models/x.json", "--save models/x.json"),
    ],
)
def test_a_command_names_nothing_outside_of_the_repository(words, told):
    assert scores.command("m", words.split()) == f"python -m m {told}".rstrip()


def test_a_maker_that_asks_about_several_things_has_a_tally_for_each():
    beeps = Turn("beeps", "How many?", "Two.", ("two",), frozenset({"one", "two"}))
    turns = [turn("red"), beeps, turn("green"), beeps]
    said = [answer("red"), answer("one"), answer("green"), answer("two")]
    found = scores.by_task("tone", turns, {"EPD": said})
    assert {task: (one.count, one.right["EPD"]) for task, one in found.items()} == {
        "beeps": (2, 1),
        "colour": (2, 2),
    }


def test_a_maker_of_one_task_gives_it_its_name():
    found = scores.by_task("new colour", [turn("red")], {"EPD": [answer("red")]})
    assert list(found) == ["new colour"]


def test_equal_words_of_unequal_tokens_differ():
    found = scores.tally([turn("red")], {"EPD": [answer("red", 1)], "E/PD": [answer("red", 2)]})
    assert found.differing == 1


def test_the_most_common_mistakes_come_first_and_few_are_named():
    turns = [turn("red")] * 12
    said = ["green"] * 4 + ["blue"] * 2 + ["red"] + ["A", "B", "C", "D", "E"]
    found = scores.mistakes(turns, [answer(text) for text in said])
    assert found[0] == scores.Mistake("red", "green", 4)
    assert found[1] == scores.Mistake("red", "blue", 2)
    assert len(found) == 5
    assert found[2].told in "ABCDE", "what was said, where no choice was named"


def test_changed_counts_other_tokens():
    before = [answer("red"), answer("green")]
    assert scores.changed(before, [answer("red"), answer("blue")]) == 1


def test_a_result_is_read_as_it_was_saved(tmp_path):
    run = scores.Run("2026-01-01", "c0ffee", 0, "python -m x", {"cores": 2}, "f00", "seeds")
    run = msgspec.structs.replace(run, kept=[scores.Code("beef", 1)])
    control = scores.Control(0.5, 10, 9, 5, 7, 8, 0, 10, 9, 4, 4, 3)
    tally = scores.Tally(3, {"EPD": 2}, {"EPD": 1}, 0, [scores.Mistake("red", "green", 1)])
    for result in (
        scores.Evaluation(run, {"colour": 0.98}, {"colour": {"test": tally}}),
        scores.Controls(run, "EPD", {"colour": control}),
        scores.Comparison(run, "EPD", 200, 200, 1e-5, {"colour": 10}),
        scores.Agreement(run, {"vllm": "1"}, scores.Agreed(9, 8), scores.Agreed(3, 3), 1e-6),
        scores.Speakers(run, "EPD", {"A": scores.Heard(4, 3, 2, 1)}),
    ):
        scores.save(result, tmp_path / "found" / "result.json")
        assert scores.load(tmp_path / "found" / "result.json") == result
