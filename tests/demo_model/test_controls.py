"""Controls: noise that has the media's form, pairs that differ only in their media, chance."""

import random
from collections import Counter

import numpy as np
import pytest

from models.demo import controls
from models.demo.asking import draw
from models.demo.recipe.sample import Clip, Picture, Sample, Sound, Split, Turn

SIDES = frozenset({"left", "right"})


def side(rng, split, turns):
    truth = rng.choice(["left", "right"])
    asked = rng.choice(["Which side?", "Left or right?", "Where is it?"])
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, : 4 if truth == "left" else 8] = 255
    return Sample((Picture(pixels),), (Turn("side", asked, truth, (truth,), SIDES),))


def turn(truth, choices=SIDES):
    return Turn("side", "Where?", truth, (truth,), frozenset(choices))


@pytest.mark.parametrize(
    ("media", "values"),
    [
        (Picture(np.zeros((30, 40, 3), np.uint8)), lambda m: m.pixels),
        (Clip(np.zeros((4, 20, 20, 3), np.uint8), 2.0), lambda m: m.frames),
        (Sound(np.zeros(16000, np.float32)), lambda m: m.wave),
    ],
)
def test_noise_has_the_form_of_what_it_replaces(media, values):
    made = controls.noise(media, random.Random(1))
    assert type(made) is type(media)
    assert values(made).shape == values(media).shape
    assert values(made).dtype == values(media).dtype
    assert values(made).std() > 0.05
    same, other = (controls.noise(media, random.Random(seed)) for seed in (1, 2))
    assert np.array_equal(values(made), values(same))
    assert not np.array_equal(values(made), values(other))
    if isinstance(media, Clip):
        assert made.fps == media.fps


def test_blinded_keeps_the_question_and_always_gives_the_same_noise():
    sample = draw("side", side, Split.TEST, 4)
    one, again = (controls.blinded("side", 4, sample) for _ in range(2))
    assert one.turns == sample.turns
    assert np.array_equal(one.media[0].pixels, again.media[0].pixels)
    assert not np.array_equal(one.media[0].pixels, sample.media[0].pixels)


def test_pairs_ask_the_same_and_differ_in_what_is_true():
    found = list(controls.pairs("side", side, Split.TEST, 30))
    assert len(found) == 30
    for numbers in found:
        one, other = (draw("side", side, Split.TEST, number).turns[0] for number in numbers)
        assert one.question == other.question
        assert one.truth != other.truth
    assert max(Counter(number for pair in found for number in pair).values()) == 1


def test_no_pairs_where_no_question_comes_twice():
    def unlike(rng, split, turns):
        return Sample((), (Turn("unlike", str(rng.random()), "x", ("x",)),))

    assert not list(controls.pairs("unlike", unlike, Split.TEST, 5))


def test_chance_is_the_most_frequent_truth():
    assert controls.chance([turn("left")] * 30 + [turn("right")] * 10) == 0.75


def test_chance_is_reckoned_for_each_set_of_choices():
    colours = {"red", "green", "blue", "grey"}
    turns = [turn("left")] * 20 + [turn("right")] * 20
    turns += [turn(colour, colours) for colour in colours for _ in range(10)]
    assert controls.chance(turns) == pytest.approx((20 + 10) / 80)


def test_chance_is_one_of_the_choices_where_samples_are_few():
    assert controls.chance([turn("red", {"red", "green", "blue", "grey"})]) == 0.25
    assert controls.chance([]) == 0


def test_what_is_asked_with_and_without_media_does_not_need_them():
    def refuse(rng, split, turns):
        sample = side(rng, split, turns)
        return sample if rng.random() < 0.5 else Sample((), sample.turns)

    assert controls.needs_media("side", side)
    assert not controls.needs_media("refuse", refuse)
