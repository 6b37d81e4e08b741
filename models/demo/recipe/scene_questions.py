"""Questions about shapes that lie on one picture, each with its true answer.

A question here is ``ask(rng, split, things) -> Turn | None``: None where it cannot be asked of
these things, or would not be clear. Nothing here draws.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.demo.recipe.canvas import COLOURS, SHAPES, an, plural
from models.demo.recipe.sample import Split, Turn
from models.demo.recipe.scene_wordings import (
    AT_END,
    COLOUR_OF,
    COLOUR_OF_ONLY,
    COUNT,
    IS_COLOUR,
    IS_THERE,
    PLACE,
    SHAPE_OF,
    SHAPE_OF_ONLY,
    WHAT_IS_IT,
    WHERE,
    WHETHER,
    WHICH_IS,
)
from models.demo.recipe.vocabulary import NUMBERS

MOST = 6  # that are ever counted
SIDES = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
ENDS = {"left": "on the left", "right": "on the right", "above": "on top", "below": "at the bottom"}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}

ANY_COLOUR = frozenset(COLOURS)
ANY_SHAPE = frozenset(SHAPES)
ANY_NUMBER = frozenset(NUMBERS)
YES_OR_NO = frozenset({"yes", "no"})


@dataclass(frozen=True)
class Thing:
    """A shape on a picture: the middle and the longer side of its box, in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    size: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


Ask = Callable[[random.Random, Split, Sequence[Thing]], Turn | None]


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def spelled(rng: random.Random, colour: str) -> str:
    """A colour's name as a question may spell it; answers say grey."""
    return "gray" if colour == "grey" and rng.random() < 0.5 else colour


def _alone(things: Sequence[Thing], part: str) -> list[Thing]:
    """The things whose shape, colour or name no other has."""
    often = Counter(getattr(thing, part) for thing in things)
    return [thing for thing in things if often[getattr(thing, part)] == 1]


def ask_colour(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """What colour is the circle?"""
    found = _alone(things, "shape")
    if not found:
        return None
    thing = rng.choice(found)
    what = f"the {thing.shape}"
    if len(things) == 1 and rng.random() < 0.5:
        question = COLOUR_OF_ONLY.ask(rng, split)
    else:
        names = {"what": what, "What": capital(what), "a_what": an(thing.shape)}
        question = COLOUR_OF.ask(rng, split, **names)
    answer = f"The {thing.shape} is {thing.colour}."
    return Turn("colour", question, answer, (thing.colour,), ANY_COLOUR)


def ask_which(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Which shape is red?"""
    found = _alone(things, "colour")
    if not found:
        return None
    thing = rng.choice(found)
    question = WHICH_IS.ask(rng, split, colour=spelled(rng, thing.colour))
    answer = f"The {thing.shape} is {thing.colour}."
    return Turn("colour", question, answer, (thing.shape,), ANY_SHAPE)


def ask_is_colour(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Is the circle red? Half of the times it is not, and often another thing is."""
    found = _alone(things, "shape")
    if not found:
        return None
    thing = rng.choice(found)
    truth = rng.choice(["yes", "no"])
    colour = thing.colour
    if truth == "no":
        shown = [other.colour for other in things if other.colour != thing.colour]
        others = [other for other in COLOURS if other != thing.colour]
        colour = rng.choice(shown if shown and rng.random() < 0.5 else others)
    what = f"the {thing.shape}"
    names = {"what": what, "What": capital(what), "colour": spelled(rng, colour)}
    answer = f"{capital(truth)}, {what} is {thing.colour}."
    return Turn("colour", IS_COLOUR.ask(rng, split, **names), answer, (truth,), YES_OR_NO)


def ask_shape(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """What shape is the red one?"""
    found = _alone(things, "colour")
    if not found:
        return None
    thing = rng.choice(found)
    if len(things) == 1 and rng.random() < 0.6:
        question = SHAPE_OF_ONLY.ask(rng, split)
    else:
        thing_word = rng.choice(["thing", "object", "figure", "one"])
        what = f"the {spelled(rng, thing.colour)} {thing_word}"
        question = SHAPE_OF.ask(rng, split, what=what, What=capital(what))
    return Turn("shape", question, f"It is {an(thing.shape)}.", (thing.shape,), ANY_SHAPE)


def ask_what(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """What is in the picture? Only where there is one thing."""
    if len(things) != 1:
        return None
    thing = things[0]
    truth = (thing.colour, thing.shape)
    answer = f"{capital(an(thing.name))}."
    return Turn("shape", WHAT_IS_IT.ask(rng, split), answer, truth, ANY_COLOUR | ANY_SHAPE)


def ask_is_there(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Is there a circle? Not of a rectangle where there is a square, which is one too."""
    there = sorted({thing.shape for thing in things})
    truth = rng.choice(["yes", "no"])
    if truth == "yes":
        shape = rng.choice(there)
    else:
        shape = rng.choice([other for other in SHAPES if other not in there])
        if {shape, *there} >= {"square", "rectangle"}:
            return None
    question = IS_THERE.ask(rng, split, a_what=an(shape))
    answer = f"Yes, there is {an(shape)}." if truth == "yes" else f"No, there isn't {an(shape)}."
    return Turn("shape", question, answer, (truth,), YES_OR_NO)


def count_of(rng: random.Random, split: Split, number: int, one: str, many: str) -> Turn:
    """How many there are, as was counted elsewhere."""
    there = f"There is one {one}." if number == 1 else f"There are {NUMBERS[number]} {many}."
    question = COUNT.ask(rng, split, things=many.replace("grey", spelled(rng, "grey")))
    return Turn("count", question, there, (NUMBERS[number],), ANY_NUMBER)


def ask_count(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """How many shapes, circles, red shapes or red circles?"""
    thing = rng.choice(things)
    kind = rng.randrange(4)
    alike = [
        other
        for other in things
        if (kind in (0, 2) or other.shape == thing.shape)
        and (kind in (0, 1) or other.colour == thing.colour)
    ]
    if len(alike) > MOST:
        return None
    colour = f"{thing.colour} " if kind >= 2 else ""
    shape = thing.shape if kind in (1, 3) else "shape"
    return count_of(rng, split, len(alike), colour + shape, colour + plural(shape))


def side(one: Thing, other: Thing) -> str | None:
    """Where the one lies, seen from the other; None where that is not plain to see."""
    right, down = one.x - other.x, one.y - other.y
    near = (one.size + other.size) / 2
    if abs(right) >= near and abs(down) < abs(right) / 3:
        return "right" if right > 0 else "left"
    if abs(down) >= near and abs(right) < abs(down) / 3:
        return "below" if down > 0 else "above"
    return None


def _pair(rng: random.Random, things: Sequence[Thing]) -> tuple[Thing, Thing, str] | None:
    if len(things) != 2:
        return None
    one, other = rng.sample(list(things), 2)
    where = side(one, other)
    return None if where is None or one.name == other.name else (one, other, where)


def _called(rng: random.Random, one: Thing, other: Thing) -> tuple[str, str]:
    """Two things by their shapes, or with their colours too where the shapes leave it open."""
    if one.shape != other.shape and rng.random() < 0.7:
        return f"the {one.shape}", f"the {other.shape}"
    return f"the {one.name}", f"the {other.name}"


def ask_where(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Where is the circle, seen from the square?"""
    if (found := _pair(rng, things)) is None:
        return None
    one, other, where = found
    first, second = _called(rng, one, other)
    question = WHERE.ask(rng, split, one=first, other=second)
    answer = f"{capital(first)} is {SIDES[where]} {second}."
    return Turn("position", question, answer, (where,), frozenset(SIDES))


def ask_whether(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Is the circle left of the square? If not, it is on the opposite side."""
    if (found := _pair(rng, things)) is None:
        return None
    one, other, where = found
    first, second = _called(rng, one, other)
    truth = rng.choice(["yes", "no"])
    asked = SIDES[where if truth == "yes" else OPPOSITE[where]]
    names = {"one": first, "One": capital(first), "other": second, "side": asked}
    answer = f"{capital(truth)}, {first} is {SIDES[where]} {second}."
    return Turn("position", WHETHER.ask(rng, split, **names), answer, (truth,), YES_OR_NO)


def ask_end(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Which shape is on the left?"""
    found = _pair(rng, things)
    if found is None or found[0].shape == found[1].shape:
        return None
    one, _, where = found
    question = AT_END.ask(rng, split, end=ENDS[where])
    answer = f"The {one.shape} is {ENDS[where]}."
    return Turn("position", question, answer, (one.shape,), ANY_SHAPE)


PLACES = {  # by column and row of nine fields
    (0, 0): "at the top left",
    (1, 0): "at the top",
    (2, 0): "at the top right",
    (0, 1): "on the left",
    (1, 1): "in the middle",
    (2, 1): "on the right",
    (0, 2): "at the bottom left",
    (1, 2): "at the bottom",
    (2, 2): "at the bottom right",
}
NONE = "no"  # the word that decides where something is absent


def bare_place(place: str) -> str:
    return place.removeprefix("at the ").removeprefix("on the ").removeprefix("in the ")


ANY_PLACE = frozenset({*map(bare_place, PLACES.values()), NONE})


def place_of(rng: random.Random, split: Split, what: str, place: str) -> Turn:
    """Where in the picture something is."""
    question = PLACE.ask(rng, split, what=f"the {what}")
    truth = (bare_place(place),)
    return Turn("place", question, f"The {what} is {place}.", truth, ANY_PLACE)


def absent_shape(rng: random.Random, things: Sequence[Thing]) -> str:
    """One that is not there, nor could be said to be."""
    there = {thing.shape for thing in things}
    if there & {"square", "rectangle"}:
        there |= {"square", "rectangle"}
    return rng.choice([shape for shape in SHAPES if shape not in there])


def ask_absent_count(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """How many stars? None; or red stars, where there are red things and stars."""
    shape, colour = absent_shape(rng, things), ""
    if things and rng.random() < 0.5:
        thing, other = rng.choice(things), rng.choice(things)
        free = [c for c in COLOURS if c not in {one.colour for one in things}]
        pairs = [(thing.shape, other.colour), (shape, thing.colour), ("shape", rng.choice(free))]
        names = {(one.shape, one.colour) for one in things}
        shape, colour = rng.choice([pair for pair in pairs if pair not in names])
    many = f"{colour} {plural(shape)}".strip()
    question = COUNT.ask(rng, split, things=many.replace("grey", spelled(rng, "grey")))
    return Turn("absent", question, f"There are no {many}.", (NONE,), ANY_NUMBER | {NONE})


def ask_absent_colour(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """What colour is the star, where there is none?"""
    shape = absent_shape(rng, things)
    names = {"what": f"the {shape}", "What": f"The {shape}", "a_what": an(shape)}
    question = COLOUR_OF.ask(rng, split, **names)
    return Turn("absent", question, f"There is no {shape}.", (NONE,), ANY_COLOUR | {NONE})


def ask_absent_shape(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Which shape is red, where nothing is?"""
    colour = rng.choice([c for c in COLOURS if c not in {thing.colour for thing in things}])
    if rng.random() < 0.6:
        question = WHICH_IS.ask(rng, split, colour=spelled(rng, colour))
    else:
        word = rng.choice(["thing", "object", "figure", "one"])
        what = f"the {spelled(rng, colour)} {word}"
        question = SHAPE_OF.ask(rng, split, what=what, What=capital(what))
    return Turn("absent", question, f"No shape is {colour}.", (NONE,), ANY_SHAPE | {NONE})


def ask_absent_place(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn | None:
    """Where is the star, or where is it, seen from the circle, where there is none?"""
    shape = absent_shape(rng, things)
    if things and rng.random() < 0.5:
        other = f"the {rng.choice(things).shape}"
        question = WHERE.ask(rng, split, one=f"the {shape}", other=other)
        choices = frozenset(SIDES) | {NONE}
    else:
        question, choices = PLACE.ask(rng, split, what=f"the {shape}"), ANY_PLACE
    return Turn("absent", question, f"There is no {shape}.", (NONE,), choices)


ABSENT: tuple[Ask, ...] = (
    ask_absent_count,
    ask_absent_count,
    ask_absent_colour,
    ask_absent_shape,
    ask_absent_place,
)

EVERY: tuple[Ask, ...] = (
    *ABSENT[1:],
    ask_colour,
    ask_which,
    ask_is_colour,
    ask_shape,
    ask_what,
    ask_is_there,
    ask_count,
    ask_count,
    ask_where,
    ask_where,
    ask_whether,
    ask_end,
)
