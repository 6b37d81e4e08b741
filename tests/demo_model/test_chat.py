"""What is said without media has one true answer, and what can't be answered is refused."""

import random
import re
from itertools import product

import numpy as np
import pytest

from models.demo.recipe import beyond, chat, clips, scenes, smalltalk, systems, unsent
from models.demo.recipe.sample import RATE, Sample, Sound, Split, Turn, Wordings, told
from models.demo.recipe.vocabulary import NUMBERS

SPLITS = list(Split)
MAKERS = {"talk": chat.talk, "refuse": chat.refuse, "nothing": chat.nothing}
WORDINGS = {
    **{f"{topic.answer}": topic.wordings for topic in smalltalk.TOPICS},
    **{
        name: value
        for module in (smalltalk, beyond, unsent, systems)
        for name, value in vars(module).items()
        if isinstance(value, Wordings)
    },
}


def silence(rng, split, turns):
    turn = Turn("tone", "Is it high?", "No.", ("no",), frozenset({"yes", "no"}))
    return Sample((Sound(np.zeros(RATE, np.float32)),), (turn,))


@pytest.fixture(autouse=True)
def drawn_media(monkeypatch):
    """Media that need no data files."""
    pictures = chat.Sense((scenes.colour,), beyond.WITH_PICTURE, unsent.TO_HEAR)
    moving = chat.Sense((clips.motion,), beyond.WITH_CLIP, unsent.TO_HEAR)
    sounds = chat.Sense((silence,), beyond.WITH_SOUND, unsent.TO_SEE)
    monkeypatch.setattr(chat, "SENSES", (pictures, moving, sounds))


def every_wording(pattern):
    parts = re.split(r"\[([^\[\]]*)\]", pattern)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return {"".join(chosen) for chosen in product(*choices)}


def plain(text):
    return text.lower().strip(" ?.!")


def numbers_in(text):
    digits = {str(number): word for number, word in enumerate(NUMBERS)}
    words = [digits.get(word, word) for word in re.findall(r"\w+", text.lower())]
    return [NUMBERS.index(word) for word in words if word in NUMBERS]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", MAKERS)
def test_the_same_generator_draws_the_same_conversation(task, split):
    for seed in range(30):
        one, other = (MAKERS[task](random.Random(seed), split, 3) for _ in range(2))
        assert one.turns == other.turns
        assert len(one.media) == len(other.media)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", MAKERS)
def test_the_first_turn_is_of_the_makers_own_task(task, split):
    rng = random.Random(1)
    for turns in (1, 2, 3) * 30:
        asked = MAKERS[task](rng, split, turns).turns
        assert 1 <= len(asked) <= turns
        assert all(turn.right(turn.answer) for turn in asked)
        if turns == 1 or split is not Split.TRAIN:
            assert asked[0].task == task


def test_each_fixed_answer_has_its_own_mark():
    answers = {topic.answer for topic in smalltalk.TOPICS} | {chat.REFUSAL, chat.MISSING}
    marks = {told(answer, chat.MARKS) for answer in answers}
    assert () not in marks
    assert len(marks) == len(answers)


@pytest.mark.parametrize("with_media", [False, True])
def test_a_question_has_one_answer(with_media):
    """Whatever the split and the maker, the same words are never answered in two ways."""
    rng = random.Random(2)
    answers = {}
    for split in SPLITS:
        for task, maker in MAKERS.items():
            for _ in range(100 if with_media else 500):
                sample = maker(rng, split, 1)
                if bool(sample.media) != with_media:
                    continue
                turn = sample.turns[0]
                answer = answers.setdefault(plain(turn.question), (task, turn.truth))
                assert answer == (task, turn.truth), turn.question


def test_numbers_and_opposites_are_right():
    rng = random.Random(3)
    pairs = {frozenset(pair) for pair in smalltalk.OPPOSITES}
    found = {"after": 0, "before": 0, "more": 0, "opposite": 0, "count": 0}
    for _ in range(1500):
        turn = chat.talk(rng, rng.choice(SPLITS), 1).turns[0]
        asked, said = numbers_in(turn.question), numbers_in(turn.answer)
        if "opposite of" in turn.answer:
            found["opposite"] += 1
            assert frozenset(turn.truth) in pairs
            assert turn.truth[0] in turn.question
        elif " comes after " in turn.answer:
            found["after"] += 1
            assert said == [asked[-1] + 1, asked[-1]]
        elif " comes before " in turn.answer:
            found["before"] += 1
            assert said == [asked[-1] - 1, asked[-1]]
        elif " is more than " in turn.answer:
            found["more"] += 1
            assert said == sorted(asked[-2:], reverse=True) or said == sorted(asked, reverse=True)
        elif len(said) > 1:
            found["count"] += 1
            assert said == list(range(1, asked[-1] + 1))
    assert all(count > 30 for count in found.values()), found


def test_no_word_is_in_two_pairs_of_opposites():
    words = [word for pair in smalltalk.OPPOSITES for word in pair]
    assert len(words) == len(set(words))


def test_there_is_much_that_is_beyond():
    rng = random.Random(4)
    asked = {plain(beyond.alone(rng, Split.TRAIN)) for _ in range(3000)}
    assert len(asked) > 1500
    learned = [wording for kind in beyond.ALONE for wording in kind.learned]
    assert len(learned) >= 150


@pytest.mark.parametrize("name", beyond.WORDS)
def test_held_out_words_are_never_trained_on(name):
    words = beyond.WORDS[name]
    assert not set(words.learned) & set(words.kept)


@pytest.mark.parametrize("name", WORDINGS)
def test_held_out_wordings_are_never_trained_on(name):
    wordings = WORDINGS[name]
    learned = {plain(text) for each in wordings.learned for text in every_wording(each)}
    kept = {plain(text) for each in wordings.kept for text in every_wording(each)}
    assert len(wordings.learned) >= 12
    assert len(wordings.kept) >= 3
    assert not learned & kept


@pytest.mark.parametrize("kind", range(len(beyond.ALONE)))
def test_held_out_wordings_beyond_the_model_are_never_trained_on(kind):
    wordings = beyond.ALONE[kind]
    learned = {plain(text) for each in wordings.learned for text in every_wording(each)}
    kept = {plain(text) for each in wordings.kept for text in every_wording(each)}
    assert kept
    assert not learned & kept


def test_refusals_come_with_every_kind_of_media():
    rng = random.Random(5)
    kinds = set()
    for _ in range(200):
        sample = chat.refuse(rng, Split.NEW, 2)
        assert sample.turns[0].answer == chat.REFUSAL
        kinds.add(tuple(type(each).__name__ for each in sample.media))
        if sample.media:
            assert sample.turns[1].task != "refuse"
    assert kinds == {(), ("Picture",), ("Clip",), ("Sound",)}


def test_what_was_not_sent_is_asked_for():
    rng = random.Random(7)
    for _ in range(100):
        assert chat.nothing(rng, Split.TEST, 1).turns[0].answer == chat.MISSING


def test_other_makers_questions_are_asked_without_media():
    others = unsent._others()
    rng = random.Random(6)
    asked = [unsent.ask(wordings, rng, split) for wordings in others for split in SPLITS * 20]
    assert len(others) > 30
    assert not any("{" in question or "[" in question for question in asked)
