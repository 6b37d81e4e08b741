"""What is asked about shapes is true of the pixels that were drawn."""

import random
import re
from collections import Counter, deque
from functools import cache
from itertools import product

import numpy as np
import pytest

from models.demo.recipe import scene_wordings, scenes, several
from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import COLOURS, SHAPES, plural, shade
from models.demo.recipe.sample import Picture, Split, Wordings
from models.demo.recipe.scene_questions import Thing, side
from models.demo.recipe.vocabulary import NUMBERS

ONE_PICTURE = [scenes.colour, scenes.shape, scenes.count, scenes.position]
EVERY = [*ONE_PICTURE, several.pictures]
WORDINGS = {
    f"{module.__name__.rsplit('.', 1)[1]}.{name}": wordings
    for module in (scene_wordings, several)
    for name, wordings in vars(module).items()
    if isinstance(wordings, Wordings)
}
_rng = random.Random(0)
SHADES = {name: np.array([shade(_rng, name) for _ in range(200)], float) for name in COLOURS}


@pytest.fixture
def drawn(monkeypatch):
    """What every call of ``draw`` put on its picture: (pixels, things), on one plain tone each."""
    kept = []
    draw = scenes.draw

    def even(rng, split, width, height, avoid):
        return background(rng, split, width, height, avoid, plain=True)

    def noted(*arguments):
        picture, things = draw(*arguments)
        kept.append((picture.pixels, things))
        return picture, things

    monkeypatch.setattr(scenes, "background", even)
    monkeypatch.setattr(scenes, "finish", lambda rng, image: Picture(np.asarray(image)))
    monkeypatch.setattr(scenes, "draw", noted)
    return kept


def called(pixels):
    """The name of the colour that most of these pixels are nearest to."""
    middle = np.median(pixels, axis=0)
    far = {name: np.abs(shades - middle).sum(axis=1).min() for name, shades in SHADES.items()}
    return min(far, key=far.get)


def patches(pixels):
    """The pixels of every connected part that is not background: [([x, y], colour)]."""
    left = (np.abs(pixels.astype(int) - pixels[0, 0]).sum(axis=-1) > 24).T
    found = []
    while left.any():
        start = tuple(np.argwhere(left)[0])
        left[start] = False
        part, queue = [], deque([start])
        while queue:
            x, y = queue.popleft()
            part.append((x, y))
            for step in product((-1, 0, 1), repeat=2):
                near = x + step[0], y + step[1]
                inside = 0 <= near[0] < left.shape[0] and 0 <= near[1] < left.shape[1]
                if inside and left[near]:
                    left[near] = False
                    queue.append(near)
        where = np.array(part)
        found.append((where, called(pixels[where[:, 1], where[:, 0]])))
    return found


@pytest.mark.parametrize("maker", EVERY, ids=lambda maker: maker.__name__)
def test_things_are_where_and_what_they_are_said_to_be(maker, drawn):
    rng = random.Random(11)
    for _ in range(12):
        maker(rng, Split.TRAIN, 1)
    for pixels, things in drawn:
        found = patches(pixels)
        assert len(found) == len(things)
        for where, colour in found:
            middle = (where.min(axis=0) + where.max(axis=0) + 1) / 2
            thing = min(things, key=lambda thing: abs(np.array((thing.x, thing.y)) - middle).sum())
            assert np.abs(np.array((thing.x, thing.y)) - middle).max() <= 2 + thing.size * 0.1
            size = np.ptp(where, axis=0).max() + 1  # less where a dark rim lies on a dark tone
            assert thing.size * 0.7 <= size <= thing.size + 2
            assert thing.colour == colour


def test_counts_are_those_of_the_patches(drawn):
    rng = random.Random(12)
    kinds = Counter()
    for _ in range(120):
        turn = scenes.count(rng, Split.TRAIN, 1).turns[0]
        pixels, things = drawn[-1]
        number = NUMBERS.index(turn.truth[0])
        assert 1 <= number <= 6
        words = turn.answer.removesuffix(".").split()
        colour = next((word for word in words if word in COLOURS), None)
        shape = next((s for s in SHAPES if s in words or plural(s) in words), None)
        kinds[colour is not None, shape is not None] += 1
        if shape is None:
            counted = [found for _, found in patches(pixels) if colour in (None, found)]
            assert len(counted) == number
        else:
            counted = [t for t in things if t.shape == shape and colour in (None, t.colour)]
            assert len(counted) == number
    assert len(kinds) == 4


def test_sides_are_those_of_the_patches(drawn):
    rng = random.Random(13)
    asked = Counter()
    for _ in range(100):
        turn = scenes.position(rng, Split.TRAIN, 1).turns[0]
        pixels, things = drawn[-1]
        shapes = re.findall("|".join(SHAPES), turn.answer)
        colours = re.findall("|".join(COLOURS), turn.answer)
        if len(shapes) == 1:  # The circle is on the left.
            one = next(thing for thing in things if thing.shape == shapes[0])
            other = next(thing for thing in things if thing is not one)
        elif colours:
            one, other = (
                next(t for t in things if (t.colour, t.shape) == name)
                for name in zip(colours, shapes, strict=True)
            )
        else:
            one, other = (next(t for t in things if t.shape == shape) for shape in shapes)
        middles = [where.mean(axis=0) for where, _ in patches(pixels)]
        ends = [min(middles, key=lambda at, t=t: abs(at - (t.x, t.y)).sum()) for t in (one, other)]
        right, down = ends[0] - ends[1]
        words = {
            (True, True): "right",
            (True, False): "left",
            (False, True): "below|bottom",
            (False, False): "above|top",
        }
        across = bool(abs(right) > abs(down))
        assert re.search(words[across, bool((right if across else down) > 0)], turn.answer)
        assert turn.truth[0] != "no" or not re.search(turn.answer[4:-1], turn.question)
        asked[turn.truth[0] if turn.truth[0] not in SHAPES else "end"] += 1
    assert set(asked) == {"left", "right", "above", "below", "end", "yes", "no"}


def test_a_side_is_named_only_where_it_is_clear():
    square = Thing("square", "red", 50, 50, 20)
    assert side(Thing("circle", "red", 90, 55, 20), square) == "right"
    assert side(Thing("circle", "red", 45, 10, 20), square) == "above"
    assert side(Thing("circle", "red", 90, 80, 20), square) is None  # as much below as right
    assert side(Thing("circle", "red", 62, 51, 20), square) is None  # beside, but not clear of it


def hinted(words):
    """The shapes and colours that are named there."""
    words = words.lower().replace("gray", "grey").replace("crosses", "cross")
    return [name for name in COLOURS + SHAPES if re.search(rf"\b{name}s?\b", words)]


def fitting(things, names):
    return [t for t in things if all(name in (t.colour, t.shape) for name in names)]


@pytest.mark.parametrize("maker", ONE_PICTURE, ids=lambda maker: maker.__name__)
def test_later_turns_are_true_of_the_same_things(maker, drawn):
    rng = random.Random(16)
    asked = Counter()
    for _ in range(100):
        turns = maker(rng, Split.TRAIN, 5).turns
        _, things = drawn[-1]
        for turn in turns[1:]:
            meant = fitting(things, hinted(turn.question))
            asked[turn.task] += 1
            if turn.task == "position":
                assert len(things) == 2
            elif turn.task == "count":
                assert turn.truth == (NUMBERS[len(meant)],)
            elif turn.truth[0] in ("yes", "no"):
                assert bool(meant) == (turn.truth[0] == "yes")
            else:  # nothing else may be meant
                assert len(meant) == 1
                assert set(turn.truth) <= {meant[0].colour, meant[0].shape}
    assert set(asked) >= {"colour", "shape", "count"}


@pytest.mark.parametrize("maker", [scenes.colour, scenes.shape], ids=lambda maker: maker.__name__)
def test_colours_and_shapes_are_those_of_one_thing(maker, drawn):
    rng = random.Random(14)
    for _ in range(150):
        turn = maker(rng, Split.TRAIN, 1).turns[0]
        _, things = drawn[-1]
        colours = [name for name in turn.truth if name in COLOURS]
        shapes = [name for name in turn.truth if name in SHAPES]
        meant = fitting(things, hinted(turn.question))
        if turn.truth == ("no",):
            assert not meant
        elif turn.truth == ("yes",):
            assert meant
        else:
            assert len(meant) == 1
            assert colours in ([], [meant[0].colour])
            assert shapes in ([], [meant[0].shape])


def test_the_picture_that_is_named_is_the_only_one(drawn):
    rng = random.Random(15)
    kinds = Counter()
    for _ in range(250):
        before = len(drawn)
        sample = several.pictures(rng, Split.TRAIN, 1)
        shown = [things for _, things in drawn[before:]][-len(sample.media) :]
        turn = sample.turns[0]
        question, names = turn.question.lower(), hinted(turn.question)
        if turn.truth[0] in several.ORDER:
            having = [place for place, things in enumerate(shown) if fitting(things, names)]
            assert names
            assert having == [several.ORDER.index(turn.truth[0])]
        elif turn.answer.startswith("There is no"):
            assert not any(fitting(things, names) for things in shown)
        elif turn.truth[0] in ("yes", "no"):
            part = "shape" if "shape" in question else "colour"
            (one,), (other,) = shown
            assert (getattr(one, part) == getattr(other, part)) == (turn.truth[0] == "yes")
        elif turn.truth[0] in NUMBERS:
            assert turn.truth[0] == NUMBERS[len(sample.media)]
        else:
            places = {"first": 0, "second": 1, "third": 2, "last": -1}
            places |= {"one": 0, "two": 1, "three": 2}
            place = next(places[word] for word in re.findall(r"\w+", question) if word in places)
            (thing,) = shown[place]
            assert set(turn.truth) <= {thing.colour, thing.shape}
        kinds[turn.truth[0] in several.ORDER, turn.truth[0] in ("yes", "no")] += 1
    assert len(kinds) == 3


@pytest.mark.parametrize("maker", EVERY, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("split", list(Split))
def test_samples_are_sound(maker, split):
    for seed in range(60):
        sample = maker(random.Random(seed), split, 3)
        again = maker(random.Random(seed), split, 3)
        assert sample.turns == again.turns
        for one, other in zip(sample.media, again.media, strict=True):
            assert np.array_equal(one.pixels, other.pixels)
            assert one.pixels.dtype == np.uint8
            assert 80 <= min(one.pixels.shape[:2]) <= max(one.pixels.shape[:2]) <= 300
        assert 1 <= len(sample.turns) <= 3
        assert sample.turns[0].task == maker.__name__
        for turn in sample.turns:
            assert turn.right(turn.answer)
            assert not re.search(r"[\[\]{}|]|  ", turn.question + turn.answer)
        assert len(maker(random.Random(seed), split, 1).turns) == 1


@pytest.mark.parametrize("maker", EVERY, ids=lambda maker: maker.__name__)
def test_held_out_wordings_are_asked_in_the_new_exam_only(maker, monkeypatch):
    def ask(self, rng, split, **names):
        return f"{'kept' if split is Split.NEW else 'learned'} {rng.random()}"

    monkeypatch.setattr(Wordings, "ask", ask)
    for split in Split:
        for seed in range(20):
            turns = maker(random.Random(seed), split, 3).turns
            expected = "kept" if split is Split.NEW else "learned"
            assert {turn.question.split()[0] for turn in turns} == {expected}


def spelled_out(wordings):
    every = set()
    for wording in wordings:
        parts = re.split(r"\[([^\[\]]*)\]", wording)
        options = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
        every |= {"".join(chosen) for chosen in product(*options)}
    return every


@pytest.mark.parametrize("name", list(WORDINGS))
def test_wordings_are_many_and_none_is_both_trained_on_and_held_out(name):
    wordings = WORDINGS[name]
    assert len(wordings.learned) >= 12
    assert 3 <= len(wordings.kept) <= 5
    learned = {re.sub(r"\W+", " ", way).lower() for way in spelled_out(wordings.learned)}
    kept = {re.sub(r"\W+", " ", way).lower() for way in spelled_out(wordings.kept)}
    assert not learned & kept
    assert {word for way in kept for word in way.split()} <= learned_words()


@cache
def learned_words():
    """Of all questions here: a held-out wording is new as a whole, not in its words."""
    ways = {way for wordings in WORDINGS.values() for way in spelled_out(wordings.learned)}
    return {word for way in ways for word in re.sub(r"\W+", " ", way).lower().split()}
