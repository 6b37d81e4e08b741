"""Held-out wordings are never trained on, whichever task's list the words are in."""

import importlib
import random
import re
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path

import pytest

from models.demo.recipe import beyond, digits, sample, smalltalk, systems, unsent
from models.demo.recipe.sample import Split, Wordings

RECIPE = Path(sample.__file__).parent


def wordings_in(value):
    """Those that a value is or holds."""
    if isinstance(value, Wordings):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from wordings_in(each)
    elif isinstance(value, dict):
        yield from wordings_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from wordings_in([getattr(value, field.name) for field in fields(value)])


def all_wordings():
    """Of every module of the recipe, each once, under the name where it was found first."""
    found = {}
    for file in sorted(RECIPE.glob("*.py")):
        module = importlib.import_module(f"models.demo.recipe.{file.stem}")
        for name, value in vars(module).items():
            for wordings in wordings_in(value):
                found.setdefault(id(wordings), (f"{file.stem}.{name}", wordings))
    return list(found.values())


def expanded(wording):
    parts = re.split(r"\[([^\[\]]*)\]", wording)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return {"".join(chosen) for chosen in product(*choices)}


def plain(text):
    """Without what makes no other question of it: names, their articles, case, marks, synonyms."""
    text = re.sub(r"\{\w+\}", "_", text.lower())
    text = re.sub(r"\b(?:(?:an?|the) )?_(?: _)*", "_", text)
    text = re.sub(r"\b(?:image|photo)(s?)\b", r"picture\1", text)
    text = re.sub(r"\bvideo\b", "clip", text).replace("color", "colour")
    return text.strip(" ?.!")


ALL = all_wordings()
LEARNED = {
    plain(text): name
    for name, wordings in ALL
    for wording in wordings.learned
    for text in expanded(wording)
}


def test_the_same_question_is_known_in_other_clothes():
    assert plain("Name the color of the {colour} {shape}.") == plain("name the colour of {what}")
    assert plain("What is in this Photo") == plain("What is in this image?")
    assert plain("Is {one} left of {other}?") != plain("Is {one} right of {other}?")
    assert expanded("[Which|What] [digit|number]?") == {
        *("Which digit?", "Which number?", "What digit?", "What number?"),
    }


def test_wordings_are_found_wherever_a_module_holds_them():
    found = {id(wordings) for _, wordings in ALL}
    held = [*beyond.ALONE, *(topic.wordings for topic in smalltalk.TOPICS)]
    for wordings in (digits.WHICH, systems.SYSTEMS, unsent.PLAIN, unsent.TO_SEE, *held):
        assert id(wordings) in found
    assert len(ALL) >= 100


@pytest.mark.parametrize(
    "wordings", [each for _, each in ALL], ids=[f"{name}-{at}" for at, (name, _) in enumerate(ALL)]
)
def test_a_held_out_wording_is_in_no_training_list(wordings):
    for wording in wordings.kept:
        for text in expanded(wording):
            assert plain(text) not in LEARNED, (text, LEARNED[plain(text)])


def test_a_held_out_question_about_missing_media_is_never_drawn_in_training():
    rng = random.Random(1)

    def drawn(split, count):
        asked = [unsent.question(rng, split) for _ in range(count)]
        asked += [
            unsent.ask(wordings, rng, split)
            for wordings in (unsent.TO_HEAR, unsent.TO_SEE)
            for _ in range(count // 4)
        ]
        return {plain(question) for question in asked}

    assert not drawn(Split.TRAIN, 6000) & drawn(Split.NEW, 1500)
