"""Shapes and backgrounds: inside, apart, of the colour they are called, and the same each time."""

import random
from itertools import combinations

import numpy as np
import pytest

from models.demo.recipe import backgrounds, textures
from models.demo.recipe.backgrounds import NEAREST, background
from models.demo.recipe.canvas import (
    COLOURS,
    SHAPES,
    an,
    apart,
    cut,
    finish,
    layout,
    plural,
    shade,
    smallest,
)
from models.demo.recipe.sample import Split


def test_shades_of_two_names_never_meet():
    rng = random.Random(1)
    shades = {name: np.array([shade(rng, name) for _ in range(400)], float) for name in COLOURS}
    for one, other in combinations(COLOURS, 2):
        between = shades[one][:, None] - shades[other][None]
        nearest = np.sqrt((between**2 * (2, 4, 3)).sum(axis=-1)).min() / 3
        assert nearest > 10, (one, other, nearest)


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ("circle", 0.76, 0.82),
        ("oval", 0.6, 0.82),
        ("square", 0.76, 1.0),
        ("rectangle", 0.6, 1.0),
        ("diamond", 0.48, 0.6),
        ("triangle", 0.4, 0.55),
        ("star", 0.24, 0.42),
        ("heart", 0.55, 0.78),
        ("cross", 0.38, 0.68),
    ],
)
def test_every_shape_fills_its_box_as_that_shape_does(shape, least, most):
    rng = random.Random(2)
    for _ in range(40):
        sprite = cut(rng, shape, "red", 60)
        assert max(sprite.width, sprite.height) == 60
        filled = np.asarray(sprite.rim[1] if sprite.rim else sprite.mask).mean() / 255
        assert least <= filled <= most
        long, short = max(sprite.mask.size), min(sprite.mask.size)
        if shape in ("circle", "square"):
            assert long - short <= 1
        if shape in ("rectangle", "oval"):
            assert long / short > 1.45


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_places_lie_inside_and_apart(count):
    rng = random.Random(3)
    for _ in range(60):
        width, height = rng.randint(112, 300), rng.randint(112, 200)
        places = layout(rng, width, height, count)
        assert len(places) == count
        for place in places:
            assert place.size >= smallest(width, height) * 0.89
            assert place.size / 2 <= place.x <= width - place.size / 2
            assert place.size / 2 <= place.y <= height - place.size / 2
        for one, other in combinations(places, 2):
            far = max(abs(one.x - other.x), abs(one.y - other.y))
            assert far > (one.size + other.size) / 2 + 2


@pytest.mark.parametrize("split", list(Split))
def test_backgrounds_keep_clear_of_what_lies_on_them(split):
    rng = random.Random(4)
    for number in range(150):
        avoid = [shade(rng, rng.choice(COLOURS)) for _ in range(rng.randint(1, 3))]
        with backgrounds.only(("plain", "pattern")[number % 2]):
            image = background(rng, split, 70, 50, avoid)
        assert image.size == (70, 50)
        for tone in {tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()}:
            assert min(apart(tone, colour) for colour in avoid) > NEAREST - 4


@pytest.mark.parametrize("split", list(Split))
def test_little_of_a_texture_is_close_to_what_lies_on_it(split):
    rng = random.Random(4)
    near = []
    for _ in range(60):
        avoid = [shade(rng, rng.choice(COLOURS)) for _ in range(rng.randint(1, 3))]
        with backgrounds.only("texture"):
            image = background(rng, split, 90, 70, avoid)
        assert image.size == (90, 70)
        near.append(backgrounds._near(image, avoid))
    assert sum(share > 0.2 for share in near) <= 6


def test_training_and_tests_share_no_slope_of_noise():
    learned, kept = textures.SLOPES[True], textures.SLOPES[False]
    assert all(high < low or other < first for low, other in learned for first, high in kept)


@pytest.mark.parametrize("split", list(Split))
def test_kinds_of_backgrounds_are_held_out(split, monkeypatch):
    drawn = set()
    for kinds, named in ((backgrounds.LEARNED, "learned"), (backgrounds.KEPT, "kept")):
        for kind, weights in kinds.items():

            def noted(rng, width, height, weights=weights, named=named):
                drawn.add(named)
                return weights(rng, width, height)

            monkeypatch.setitem(kinds, kind, noted)
    rng = random.Random(5)
    for _ in range(60):
        background(rng, split, 40, 40)
    assert drawn == {"learned" if split is Split.TRAIN else "kept"}


def test_weights_stay_weights():
    rng = random.Random(6)
    for kind, weights in (backgrounds.LEARNED | backgrounds.KEPT).items():
        for _ in range(10):
            drawn = weights(rng, 61, 47)
            assert drawn.shape == (47, 61), kind
            assert drawn.min() >= 0, kind
            assert drawn.max() <= 1, kind


def test_the_same_seed_draws_the_same():
    def drawn(seed):
        rng = random.Random(seed)
        sprite = cut(rng, rng.choice(SHAPES), "blue", 40)
        image = background(rng, Split.TRAIN, 120, 90, [sprite.rgb])
        sprite.paste(image, 60, 45)
        return finish(rng, image).pixels

    for seed in range(20):
        assert np.array_equal(drawn(seed), drawn(seed))
    assert not np.array_equal(drawn(1), drawn(2))


def test_names_read_well():
    assert an("oval") == "an oval"
    assert an("orange star") == "an orange star"
    assert an("red oval") == "a red oval"
    assert plural("cross") == "crosses"
    assert plural("circle") == "circles"


@pytest.mark.parametrize("split", list(Split))
def test_finding_13_a_page_wider_than_a_sheet_of_noise_is_filled(split):
    side = textures.SIDE
    for seed in range(20):
        for size in ((side + 96, side - 8), (side // 4, side + 1), (side, side)):
            drawn = textures.noise(random.Random(seed), split, *size)
            assert drawn.size == size
            assert min(np.asarray(drawn)[-1].std(axis=0)) > 0, "the last row is not blank"
