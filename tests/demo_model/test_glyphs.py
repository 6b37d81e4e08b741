"""Digits, emoji and words: true answers, what is held out stays out, and everything can be read."""

import random
import re
import zipfile

import numpy as np
import pytest

from models.demo.recipe import digits, emoji, ink, words
from models.demo.recipe.emoji_names import NAMES
from models.demo.recipe.sample import Split, told
from models.demo.recipe.vocabulary import KEPT, LEARNED, LETTERS

ASKED = [
    digits.WHICH,
    digits.IS_IT,
    emoji.WHAT,
    emoji.IS_IT,
    emoji.ARE_THEY,
    words.SAYS,
    words.DOES_IT,
    words.LETTER,
    words.LENGTH,
]
MAKERS = {
    "digit": (digits.digit, digits.SOURCE),
    "emoji": (emoji.emoji, emoji.SOURCE),
    "word": (words.word, words.SOURCE),
}


def gathered(path):
    if not path.exists():
        pytest.skip(f"{path.name} is not gathered: python -m models.demo.gather_pictures")


@pytest.mark.parametrize("wordings", ASKED)
def test_held_out_wordings_are_never_trained_on(wordings):
    assert len(wordings.learned) >= 12
    assert 3 <= len(wordings.kept) <= 5
    rng = random.Random(1)
    names = {"name": "a cat", "word": "CAT", "place": "first"}
    learned = {wordings.ask(rng, Split.TRAIN, **names) for _ in range(3000)}
    kept = {wordings.ask(rng, Split.NEW, **names) for _ in range(50)}
    assert not learned & kept
    assert not any(mark in asked for asked in learned | kept for mark in "[]{}|")


def test_every_emoji_name_is_unique():
    for phrase, name in zip(emoji.PHRASES, NAMES, strict=True):
        turn = emoji._what(random.Random(1), Split.TRAIN, phrase)
        assert turn.truth == (name,)
        assert turn.right(turn.answer)
        assert told(turn.answer, frozenset(NAMES)) == (name,)
    assert len(set(NAMES)) == len(NAMES)


def test_grammar_follows_the_thing():
    rng = random.Random(1)
    said = {p: emoji._what(rng, Split.TRAIN, p).answer for p in emoji.PHRASES}
    assert said["a cat"] == "It is a cat."
    assert said["an owl"] == "It is an owl."
    assert said["bread"] == "It is bread."
    assert said["grapes"] == "They are grapes."
    assert digits._which(rng, Split.TRAIN, "eight").answer == "It is an eight."
    assert digits._which(rng, Split.TRAIN, "one").answer == "It is a one."


def test_checks_are_true_both_ways():
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        for turn, name in (
            (digits._whether(rng, Split.TRAIN, "eight"), "an eight"),
            (emoji._whether(rng, Split.TRAIN, "an owl"), "an owl"),
            (words._whether(rng, Split.TRAIN, "CAT"), "CAT"),
        ):
            asked_for_it = re.search(rf"\b(?:{name}|digit eight)\b", turn.question) is not None
            assert turn.truth == (("yes",) if asked_for_it else ("no",)), turn
            assert turn.right(turn.answer)
            seen.add((turn.task, turn.truth))
    assert len(seen) == 6


def test_held_out_words_are_not_drawn_for_training():
    assert len(LEARNED) > 1200
    assert len(KEPT) > 200
    assert not set(LEARNED) & set(KEPT)
    assert all(len(word) in LETTERS and word.isalpha() and word.islower() for word in KEPT)
    rng = random.Random(1)
    assert not {words._letters(rng) for _ in range(20_000)} & set(KEPT)
    with pytest.raises(ValueError, match="kept for tests"):
        words.new_word(rng, Split.TRAIN, 1)


def test_senseless_letters_that_begin_alike_are_drawn_in_capitals():
    rng = random.Random(1)
    assert {words._cased(rng, "lxq") for _ in range(50)} == {"LXQ"}
    assert {words._cased(rng, "lamp") for _ in range(50)} == {"LAMP", "Lamp", "lamp"}


def test_letters_and_their_number_are_those_of_the_word():
    rng = random.Random(1)
    letters = {words._letter(rng, Split.TRAIN, "CABLE").answer for _ in range(40)}
    assert letters == {
        "The first letter is C.",
        "The second letter is A.",
        "The last letter is E.",
    }
    assert all(words._letter(rng, Split.TRAIN, "AA").truth == ("a",) for _ in range(5))
    turn = words._length(rng, Split.TRAIN, "CABLE")
    assert (turn.answer, turn.truth) == ("It has five letters.", ("five",))


@pytest.mark.parametrize("split", list(Split))
def test_ink_differs_from_any_page(split):
    for seed in range(120):
        paper, colour = ink.page(random.Random(seed), split, (80, 64))
        shades = np.asarray(paper, float).reshape(-1, 3) @ (0.299, 0.587, 0.114)
        assert abs(shades.mean() - ink.lightness(colour)) > 80, seed


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("split", list(Split))
def test_samples_are_the_same_each_time_and_their_answers_right(name, split):
    maker, source = MAKERS[name]
    gathered(source)
    tasks = set()
    for seed in range(40):
        turns = 1 + seed % 3
        one, same = (
            maker(random.Random(seed), split, turns),
            maker(random.Random(seed), split, turns),
        )
        assert np.array_equal(one.media[0].pixels, same.media[0].pixels)
        assert one.turns == same.turns
        assert 1 <= len(one.turns) <= turns
        assert all(turn.right(turn.answer) for turn in one.turns)
        height, width, _ = one.media[0].pixels.shape
        assert 56 <= height <= 480
        assert 56 <= width <= 480
        assert np.ptp(one.media[0].pixels.astype(int)) > 60
        tasks |= {one.turns[0].task} if turns == 1 else set()
    assert tasks == {name}


def forget():
    digits._digits.cache_clear()
    words._faces.cache_clear()


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Threes and fonts to learn from, sevens and another font for the tests."""
    monkeypatch.setattr(digits, "SOURCE", tmp_path / "mnist.npz")
    monkeypatch.setattr(words, "SOURCE", tmp_path / "fonts.zip")
    pixels = np.zeros((2, 28, 28), np.uint8)
    pixels[:, 6:22, 10:18] = 255
    np.savez(
        digits.SOURCE,
        train_pixels=pixels,
        train_labels=np.array([3, 3], np.uint8),
        test_pixels=pixels[:1],
        test_labels=np.array([7], np.uint8),
    )
    with zipfile.ZipFile(words.SOURCE, "w") as archive:
        for path in ("learned/Two.ttf", "kept/Three.ttf", "learned/One.ttf"):
            archive.writestr(path, path)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("split", list(Split))
def test_digits_and_fonts_are_those_that_the_split_allows(split):
    train = split is Split.TRAIN
    assert digits._digits(split)[1].tolist() == ([3, 3] if train else [7])
    drawn = {digits.digit(random.Random(seed), split, 1).turns[0].truth for seed in range(10)}
    assert drawn == {("three",) if train else ("seven",)}
    faces = [b"learned/One.ttf", b"learned/Two.ttf"] if train else [b"kept/Three.ttf"]
    assert list(words._faces(split)) == faces


def test_tests_draw_the_digits_of_mnists_test_set():
    gathered(digits.SOURCE)
    pixels, labels = digits._digits(Split.TRAIN)
    other, marks = digits._digits(Split.TEST)
    assert pixels.shape == (60_000, 28, 28)
    assert other.shape == (10_000, 28, 28)
    assert np.bincount(labels).tolist()[:3] == [5923, 6742, 5958]
    assert np.bincount(marks).tolist()[:3] == [980, 1135, 1032]


def test_tests_draw_in_families_that_training_never_sees():
    gathered(words.SOURCE)
    with zipfile.ZipFile(words.SOURCE) as archive:
        folders = {"learned": set(), "kept": set()}
        for path in archive.namelist():
            folder, face = path.split("/")
            folders[folder].add(re.split(r"[-_.]", face)[0])
    assert len(folders["learned"]) >= 25
    assert len(folders["kept"]) >= 8
    assert not folders["learned"] & folders["kept"]
    assert not set(words._faces(Split.TRAIN)) & set(words._faces(Split.NEW))


def test_half_of_the_words_of_tests_are_new():
    gathered(words.SOURCE)
    drawn = [
        words.word(random.Random(seed), Split.TEST, 1).turns[0].truth[0].lower()
        for seed in range(200)
    ]
    new = sum(word in KEPT for word in drawn)
    assert 70 < new < 130
    assert all(word in KEPT or word in LEARNED for word in drawn)
    only = [words.new_word(random.Random(s), Split.NEW, 1).turns[0].truth[0] for s in range(40)]
    assert all(word.lower() in KEPT for word in only)
