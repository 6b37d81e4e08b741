"""Questions of samples: always the same ones, in the form that clients send."""

import random

import numpy as np
import pytest

from models.demo.asking import draw, question, questions
from models.demo.recipe.sample import Picture, Sample, Sound, Split, Turn


def shade(rng, split, turns):
    level = rng.randrange(256)
    asked = "New?" if split is Split.NEW else "Known?"
    turn = Turn("shade", asked, f"{level}.", (str(level),), frozenset(map(str, range(256))))
    return Sample((Picture(np.full((8, 8, 3), level, np.uint8)),), (turn,))


def test_a_sample_is_the_same_whenever_it_is_drawn():
    first = draw("shade", shade, Split.TEST, 7)
    random.seed(1)
    again = draw("shade", shade, Split.TEST, 7)
    assert np.array_equal(first.media[0].pixels, again.media[0].pixels)
    assert first.turns == again.turns
    others = {draw("shade", shade, Split.TEST, number).turns[0].truth for number in range(20)}
    assert len(others) > 10
    assert draw("other", shade, Split.TEST, 7).turns != first.turns


def test_known_and_new_wordings_are_about_the_same_media():
    known, new = (draw("shade", shade, split, 3) for split in (Split.TEST, Split.NEW))
    assert known.turns[0].truth == new.turns[0].truth
    assert known.turns[0].question != new.turns[0].question


def test_only_one_question_may_be_asked():
    def twice(rng, split, turns):
        sample = shade(rng, split, turns)
        return Sample(sample.media, sample.turns * 2)

    with pytest.raises(AssertionError, match="asks 2 times"):
        draw("twice", twice, Split.TEST, 0)


def test_a_message_has_the_media_first_in_their_order():
    turn = Turn("both", "What is it?", "One.", ("one",), frozenset({"one", "two"}))
    media = (Picture(np.zeros((8, 8, 3), np.uint8)), Sound(np.zeros(1600, np.float32)))
    system, user = question("both", 0, Sample(media, (turn,), "Be short.")).messages
    assert system == {"role": "system", "content": "Be short."}
    assert [part["type"] for part in user["content"]] == ["image_url", "audio_url", "text"]
    assert user["content"][-1]["text"] == "What is it?"


def test_without_media_the_words_stay():
    [one] = questions("shade", shade, Split.TEST, [0])
    [user] = one.without_media().messages
    assert user == {"role": "user", "content": "Known?"}
    assert one.files, "the question itself keeps them"
