"""Parts of tasks hold what their names say."""

import random

from models.demo.recipe import parts
from models.demo.recipe.sample import Split
from models.demo.recipe.unknown import CANT_TELL


def drawn(part, count=40):
    rng = random.Random(3)
    return [parts.PARTS[part](rng, Split.TEST, 1).turns[0] for _ in range(count)]


def test_a_count_to_four_has_no_more():
    truths = {turn.truth for turn in drawn("count_to_four")}
    assert truths >= {("one",), ("two",), ("three",), ("four",)}
    assert not truths & {("five",), ("six",)}


def test_finding_13_textures_are_named_as_unknown_or_without_what_is_asked_for():
    turns = drawn("unknown_texture")
    assert all(turn.task == "unknown picture" for turn in turns)
    assert any(turn.answer == CANT_TELL for turn in turns)


def test_every_frozen_part_is_a_part():
    assert {*parts.FROZEN} <= {*parts.PARTS}
