"""How examples are chosen and made small; that the packaged ones are whole is tests/unit's."""

import dataclasses

import numpy as np
import pytest

from models.demo import examples
from models.demo.recipe.sample import Clip, Picture, Sample, Sound, Split, Turn


def shades(rng, split, turns):
    assert (split, turns) == (Split.TEST, 1)
    level = rng.randrange(4)
    turn = Turn("shade", f"Is {level} shown?", "Yes.", ("yes",), frozenset({"yes", "no"}))
    return Sample((Picture(np.full((40, 20, 3), level, np.uint8)),), (turn,))


@pytest.fixture
def pick(monkeypatch):
    monkeypatch.setitem(examples.MAKERS, "shades", shades)
    return examples.Pick("shades", "Which?", "Yes.", (("a", "a shade"),), about="2")


@pytest.mark.parametrize("level", range(4))
def test_the_sample_that_fits_is_chosen_and_asked_about_in_the_picks_words(pick, tmp_path, level):
    made = examples.example(dataclasses.replace(pick, about=f"{level} "), tmp_path)
    assert (made.question, made.truth, made.choices) == ("Which?", ("yes",), ("no", "yes"))
    [item] = made.media
    assert (item.file, item.about, item.kind) == ("a.png", "a shade", "image")
    assert (tmp_path / "a.png").stat().st_size
    assert set(item.small.frames[0]) == {level}


def test_the_same_pick_gives_the_same_files(pick, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        folder.mkdir()
        examples.example(dataclasses.replace(pick, which=3), folder)
    assert (first / "a.png").read_bytes() == (again / "a.png").read_bytes()


def test_what_is_shown_keeps_its_shape():
    tall = examples.small(Picture(np.zeros((300, 150, 3), np.uint8)))
    assert (tall.width, tall.height, len(tall.frames)) == (14, 28, 1)
    assert len(tall.frames[0]) == 14 * 28 * 3


def test_of_a_clip_some_frames_are_shown_the_first_and_the_last_among_them():
    frames = np.arange(31, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 48, 48, 3), np.uint8)
    small = examples.small(Clip(frames, 8.0))
    assert len(small.frames) == 8
    assert (set(small.frames[0]), set(small.frames[-1])) == ({0}, {30})


def test_of_a_sound_the_loudness_is_shown():
    wave = np.concatenate([np.zeros(16000), np.full(16000, 0.25)]).astype(np.float32)
    small = examples.small(Sound(wave))
    assert len(small.wave) == 76
    assert (small.wave[0], small.wave[-1]) == (0.0, 1.0)
    assert set(examples.small(Sound(np.zeros(16000, np.float32))).wave) == {0.0}
