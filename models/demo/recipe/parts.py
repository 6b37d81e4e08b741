"""Parts of tasks, to measure and to freeze apart. Not for training."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.demo.recipe import scenes, unknown
from models.demo.recipe.backgrounds import on
from models.demo.recipe.sample import Maker, Sample, Split, Turn

MANY = {"five", "six"}


def _where(fits: Callable[[Turn], bool], maker: Maker) -> Maker:
    """The maker's samples of which every turn fits."""

    def draw(rng: random.Random, split: Split, turns: int) -> Sample:
        while True:
            sample = maker(rng, split, turns)
            if all(map(fits, sample.turns)):
                return sample

    return draw


def _is_few(turn: Turn) -> bool:
    return not MANY & {*turn.truth}


def _has_no_unknown_word(turn: Turn) -> bool:
    return turn.answer != unknown.NEW_WORD


count_to_four = _where(_is_few, scenes.count)

PARTS: dict[str, Maker] = {
    "count_to_four": count_to_four,
    "count_to_four_on_texture": on("texture", count_to_four),
    "count_on_texture": on("texture", scenes.count),
    "position_on_texture": on("texture", scenes.position),
    "unknown_texture": unknown.scenery,
    "unknown_noise": _where(_has_no_unknown_word, unknown.unknown_sound),
}
FROZEN = ("count_on_texture", "position_on_texture", "unknown_texture")  # kept for the tests
