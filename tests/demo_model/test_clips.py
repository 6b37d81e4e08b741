"""What is asked about clips is true of the frames that were drawn."""

import random
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
from PIL import Image

from models.demo.recipe import clip_wordings, clips
from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import COLOURS, shade
from models.demo.recipe.sample import Picture, Split, Wordings

SPLITS = list(Split)
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # across, down
WORDINGS = {
    name: wordings
    for name, wordings in vars(clip_wordings).items()
    if isinstance(wordings, Wordings)
}
_rng = random.Random(0)
SHADES = {name: np.array([shade(_rng, name) for _ in range(200)], float) for name in COLOURS}


@pytest.fixture
def grounds(monkeypatch):
    """The background of every clip, without grain in it or before it."""
    kept = []

    def noted(*arguments, **options):
        kept.append(background(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(clips, "background", noted)
    monkeypatch.setattr(clips, "finish", lambda rng, image: Picture(np.asarray(image)))
    monkeypatch.setattr(clips, "_grainy", lambda rng, frames: frames)
    return kept


def seen(clip):
    """The frames that a server would show the model."""
    total = len(clip.frames)
    return clip.frames[[index * total // 8 for index in range(8)]]


def called(rgb):
    far = {name: np.abs(shades - rgb).sum(axis=1).min() for name, shades in SHADES.items()}
    return min(far, key=far.get)


def middle(frame, ground):
    """Where that lies which is not background, as shares of the picture: across and down."""
    differs = np.abs(frame.astype(int) - ground).sum(axis=-1) > 40
    down, across = np.nonzero(differs)
    return np.array([across.mean() / frame.shape[1], down.mean() / frame.shape[0]])


def every_wording(pattern):
    parts = re.split(r"\[([^\[\]]*)\]", pattern)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return {"".join(chosen) for chosen in product(*choices)}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("maker", [clips.motion, clips.order])
def test_the_same_generator_draws_the_same_clip(maker, split):
    for seed in range(20):
        one, other = (maker(random.Random(seed), split, 3) for _ in range(2))
        assert one.turns == other.turns
        assert one.media[0].fps == other.media[0].fps
        np.testing.assert_array_equal(one.media[0].frames, other.media[0].frames)


@pytest.mark.parametrize("maker", [clips.motion, clips.order])
def test_frames_are_as_many_as_the_split_has(maker):
    rng = random.Random(1)
    assert {len(maker(rng, Split.TRAIN, 1).media[0].frames) for _ in range(20)} == {8}
    tested = {len(maker(rng, Split.TEST, 1).media[0].frames) for _ in range(60)}
    assert min(tested) >= 16
    assert max(tested) <= 32
    assert len(tested) > 5


@pytest.mark.parametrize("split", SPLITS)
def test_the_object_moves_as_the_answer_says(grounds, split):
    rng = random.Random(2)
    for _ in range(150):
        sample = clips.motion(rng, split, 3)
        turn = next(turn for turn in sample.turns if turn.choices == clips.ANY_WAY)
        frames, ground = seen(sample.media[0]), np.asarray(grounds[-1], int)
        moved = middle(frames[-1], ground) - middle(frames[0], ground)
        if turn.truth == ("not",):
            assert not moved.any()
            continue
        along, across = np.array(STEPS[turn.truth[0]]), np.abs(moved).argmin()
        assert (moved * along).sum() > 0.2
        assert abs(moved[across]) < 0.5 * np.abs(moved).max()


def test_every_way_is_as_likely():
    rng = random.Random(3)
    often = Counter(clips.motion(rng, Split.TEST, 1).turns[0].truth[0] for _ in range(400))
    assert set(often) == {*clips.WAYS, "not"}
    assert all(60 < often[way] < 130 for way in clips.WAYS)


def test_what_moves_is_what_differs_from_the_background(grounds):
    rng = random.Random(4)
    asked = 0
    while asked < 60:
        sample = clips.motion(rng, Split.TEST, 4)
        movers = [turn for turn in sample.turns if turn.task == "mover"]
        frame, ground = sample.media[0].frames[0].astype(int), np.asarray(grounds[-1], int)
        differs = np.abs(frame - ground).sum(axis=-1) > 40
        for turn in movers:
            assert called(np.median(frame[differs], axis=0)) == turn.truth[0]
            asked += 1


@pytest.mark.parametrize("split", SPLITS)
def test_colours_come_in_the_order_of_the_answer(grounds, split):
    rng = random.Random(5)
    for _ in range(80):
        sample = clips.order(rng, split, 4)
        frames = seen(sample.media[0]).astype(int)
        changes = np.abs(frames - frames[0]).sum(axis=-1).max(axis=0) > 24
        names = [called(np.median(frame[changes], axis=0)) for frame in frames]
        shown = list(dict.fromkeys(names))
        assert all(names.count(name) >= 2 for name in shown)
        told = {turn.answer: turn.truth for turn in sample.turns}
        assert told.pop(", then ".join(shown).capitalize() + ".") == tuple(shown)
        for place, name in {"first": shown[0], "second": shown[1], "last": shown[-1]}.items():
            told.pop(f"{name.capitalize()} comes {place}.", None)
        assert not told


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("maker", "task"), [(clips.motion, "motion"), (clips.order, "order")])
def test_answers_are_right_by_their_own_measure(maker, task, split):
    rng = random.Random(6)
    for turns in (1, 2, 3) * 40:
        asked = maker(rng, split, turns).turns
        assert 1 <= len(asked) <= turns
        assert all(turn.right(turn.answer) for turn in asked)
        if split is not Split.TRAIN:
            assert asked[0].task == task


@pytest.mark.parametrize("name", WORDINGS)
def test_held_out_wordings_are_never_trained_on(name):
    wordings = WORDINGS[name]
    learned = {text.lower() for each in wordings.learned for text in every_wording(each)}
    kept = {text.lower() for each in wordings.kept for text in every_wording(each)}
    assert len(wordings.learned) >= 12
    assert len(wordings.kept) >= 3
    assert not learned & kept


def test_an_object_beside_the_path_is_never_touched():
    rng = random.Random(7)
    ground = Image.new("RGB", (120, 100))
    laid = 0
    for _ in range(100):
        way = rng.choice(list(clips.WAYS))
        sprite = clips.cut(rng, "circle", "red", 24)
        other = clips.cut(rng, "square", "blue", 20)
        path = clips._path(rng, 120, 100, sprite, way, least=0.3)
        image = ground.copy()
        if not clips._put_beside(rng, image, other, path, sprite):
            continue
        laid += 1
        frames = clips._moved(rng, image, sprite, path, 8).astype(int)
        there = (np.asarray(image, int)[..., 2] > 40) & (np.asarray(image, int)[..., 0] < 90)
        assert (np.abs(frames[:, there] - frames[0, there]).max(axis=(1, 2)) < 60).all()
    assert laid > 30
