"""Shapes on one picture: colours, shapes, counting, and where one lies, seen from another."""

from __future__ import annotations

import random
from collections.abc import Sequence

from models.demo.recipe import scene_questions as questions
from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import (
    COLOURS,
    SHAPES,
    Place,
    cut,
    finish,
    layout,
    plural,
    shade,
    smallest,
)
from models.demo.recipe.sample import Picture, Sample, Split, Turn
from models.demo.recipe.scene_questions import MOST, Ask, Thing

Kind = tuple[str, str]  # shape and colour


def measure(rng: random.Random) -> tuple[int, int]:
    """Width and height of a picture: small or middling, upright, square or broad."""
    side = rng.choice([rng.randint(112, 168), rng.randint(140, 220)])
    aspect = rng.choice([1.0, rng.uniform(0.75, 1.33), rng.uniform(0.6, 1.67)])
    wide = aspect**0.5
    return round(side * wide), round(side / wide)


def some_shapes(rng: random.Random, count: int, but: Sequence[str] = ()) -> list[str]:
    """Different shapes, never both square and rectangle: every square is a rectangle."""
    left = [shape for shape in SHAPES if shape not in but]
    for one, other in (("square", "rectangle"), ("rectangle", "square")):
        if one in but and other in left:
            left.remove(other)
    chosen = rng.sample(left, count + 1)
    if {"square", "rectangle"} <= set(chosen):
        chosen.remove(rng.choice(["square", "rectangle"]))
    return chosen[:count]


def draw(
    rng: random.Random,
    split: Split,
    kinds: Sequence[Kind],
    measures: tuple[int, int],
    places: Sequence[Place],
) -> tuple[Picture, list[Thing]]:
    """A picture with these shapes at these places, in any order."""
    alike = {colour: shade(rng, colour) for _, colour in kinds} if rng.random() < 0.5 else {}
    sprites = [
        cut(rng, shape, colour, place.size, alike.get(colour))
        for (shape, colour), place in zip(kinds, places, strict=True)
    ]
    image = background(rng, split, *measures, avoid=[sprite.rgb for sprite in sprites])
    things = []
    for sprite, place in zip(sprites, places, strict=True):
        sprite.paste(image, place.x, place.y)
        things.append(Thing(sprite.shape, sprite.colour, place.x, place.y, place.size))
    return finish(rng, image), things


def scattered(
    rng: random.Random, split: Split, kinds: Sequence[Kind]
) -> tuple[Picture, list[Thing]]:
    measures = measure(rng)
    places = layout(rng, *measures, len(kinds))
    rng.shuffle(places)  # they come largest first, which must tell nothing
    return draw(rng, split, kinds, measures, places)


def asked(
    rng: random.Random, split: Split, turns: int, first: Turn, things: Sequence[Thing]
) -> tuple[Turn, ...]:
    """The first turn, and others about the same things, no two alike."""
    every = [first]
    for _ in range(4 * (turns - 1)):
        if len(every) == turns:
            break
        turn = rng.choice(questions.EVERY)(rng, split, things)
        if turn is not None and turn.answer not in {other.answer for other in every}:
            every.append(turn)
    return tuple(every)


def _sample(
    rng: random.Random,
    split: Split,
    turns: int,
    ask: Ask,
    drawn: tuple[Picture, list[Thing]],
) -> Sample:
    picture, things = drawn
    first = ask(rng, split, things)
    while first is None:  # a question that draws what it asks about, and drew something unclear
        first = ask(rng, split, things)
    return Sample((picture,), asked(rng, split, turns, first, things))


def colour(rng: random.Random, split: Split, turns: int) -> Sample:
    """The colour of one shape, alone or among others; or the shape of one colour."""
    count = rng.choice([1, 1, 2, 3, 4])
    kinds = list(zip(some_shapes(rng, count), rng.choices(COLOURS, k=count), strict=True))
    ask: Ask = rng.choices(
        [questions.ask_colour, questions.ask_which, questions.ask_is_colour], [6, 3, 1]
    )[0]
    if ask is questions.ask_which:
        colours = rng.sample(COLOURS, count)
        kinds = [(shape, other) for (shape, _), other in zip(kinds, colours, strict=True)]
    return _sample(rng, split, turns, ask, scattered(rng, split, kinds))


def shape(rng: random.Random, split: Split, turns: int) -> Sample:
    """The shape of the one thing that there is, or of the one in a colour."""
    ask: Ask = rng.choices(
        [questions.ask_shape, questions.ask_what, questions.ask_is_there], [6, 3, 1]
    )[0]
    count = 1 if ask is questions.ask_what else rng.choice([1, 1, 2, 3, 4])
    kinds = list(zip(some_shapes(rng, count), rng.sample(COLOURS, count), strict=True))
    return _sample(rng, split, turns, ask, scattered(rng, split, kinds))


def count(rng: random.Random, split: Split, turns: int) -> Sample:
    """How many there are of something: from one to six, alone or among other things."""
    number = rng.randint(1, MOST)
    others = rng.choice([0, 0, rng.randint(1, 3), rng.randint(1, 5)])
    one_shape, one_colour = rng.choice(SHAPES), rng.choice(COLOURS)
    colours = rng.sample([other for other in COLOURS if other != one_colour], 3)
    shapes = some_shapes(rng, 3, but=[one_shape])
    asked_for = rng.choices(["shapes", "shape", "colour", "both"], [3, 4, 3, 2])[0]
    match asked_for:
        case "shapes":
            kinds = [(rng.choice(shapes), rng.choice(colours)) for _ in range(number)]
            names = "shape", "shapes"
        case "shape":
            mixed = rng.choice([[one_colour], colours])
            kinds = [(one_shape, rng.choice(mixed)) for _ in range(number)]
            kinds += [
                (rng.choice(shapes), rng.choice([one_colour, *colours])) for _ in range(others)
            ]
            names = one_shape, plural(one_shape)
        case "colour":
            mixed = rng.choice([[one_shape], shapes])
            kinds = [(rng.choice(mixed), one_colour) for _ in range(number)]
            kinds += [
                (rng.choice([one_shape, *shapes]), rng.choice(colours)) for _ in range(others)
            ]
            names = f"{one_colour} shape", f"{one_colour} shapes"
        case _:
            kinds = [(one_shape, one_colour)] * number
            for _ in range(others):
                other = rng.choice(shapes), rng.choice([one_colour, *colours])
                kinds.append(rng.choice([other, (one_shape, rng.choice(colours))]))
            names = f"{one_colour} {one_shape}", f"{one_colour} {plural(one_shape)}"
    picture, things = scattered(rng, split, kinds)
    first = questions.count_of(rng, split, number, *names)
    return Sample((picture,), asked(rng, split, turns, first, things))


def absent(rng: random.Random, split: Split, turns: int) -> Sample:
    """Something that is not on the picture, asked about as if it were."""
    count = rng.choice([1, 1, 2, 3, 4])
    kinds = list(zip(some_shapes(rng, count), rng.choices(COLOURS, k=count), strict=True))
    return _sample(rng, split, turns, rng.choice(questions.ABSENT), scattered(rng, split, kinds))


def place(rng: random.Random, split: Split, turns: int) -> Sample:
    """One shape in one of nine fields, alone or beside others, and where it is."""
    width, height = measure(rng)
    field = rng.choice(list(questions.PLACES))
    most = min(width, height) * 0.42
    size = rng.uniform(smallest(width, height), most)
    x, y = (_within(rng, at, long, size) for at, long in zip(field, (width, height), strict=True))
    places = [Place(x, y, size)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        for _ in range(12):
            other = rng.uniform(smallest(width, height), most)
            half = other / 2 + 1
            x, y = rng.uniform(half, width - half), rng.uniform(half, height - half)
            if all(
                max(abs(x - one.x), abs(y - one.y)) >= (other + one.size) / 2 + 4 for one in places
            ):
                places.append(Place(x, y, other))
                break
    shapes = some_shapes(rng, len(places))
    kinds = list(zip(shapes, rng.choices(COLOURS, k=len(places)), strict=True))
    picture, things = draw(rng, split, kinds, (width, height), places)
    what = things[0].shape if rng.random() < 0.7 else things[0].name
    first = questions.place_of(rng, split, what, questions.PLACES[field])
    return Sample((picture,), asked(rng, split, turns, first, things))


def _within(rng: random.Random, field: int, long: int, size: float) -> float:
    """A middle that lies clearly in the first, second or third part of a length."""
    half = size / 2 + 1
    match field:
        case 0:
            return rng.uniform(half, max(half, long * 0.32))
        case 1:
            return rng.uniform(long * 0.44, long * 0.56)
    return rng.uniform(min(long - half, long * 0.68), long - half)


def pair(rng: random.Random, width: int, height: int, where: str) -> tuple[Place, Place]:
    """Two places, the first to the side ``where`` of the second and not much beside it."""
    across = where in ("left", "right")
    long, short = (width, height) if across else (height, width)
    largest = min(0.45 * long, 0.75 * short)
    least = smallest(width, height)
    while True:
        small, large = rng.uniform(least, largest), rng.uniform(least, largest)
        near, far = rng.uniform(small / 2 + 1, long - large / 2), 0.0
        if near + (small + large) / 2 + 4 < long - large / 2 - 1:
            far = rng.uniform(near + (small + large) / 2 + 4, long - large / 2 - 1)
        beside = [rng.uniform(size / 2 + 1, short - size / 2 - 1) for size in (small, large)]
        if far and abs(beside[0] - beside[1]) < 0.32 * (far - near):
            break
    places = []
    for along, off, size in ((near, beside[0], small), (far, beside[1], large)):
        places.append(Place(along, off, size) if across else Place(off, along, size))
    first, second = places if where in ("left", "above") else reversed(places)
    return first, second


def position(rng: random.Random, split: Split, turns: int) -> Sample:
    """Two shapes, and on which side of the one the other lies; or which lies on a side."""
    width, height = measure(rng)
    places = pair(rng, width, height, rng.choice(list(questions.SIDES)))
    colours = rng.choices(COLOURS, k=2)
    shapes = some_shapes(rng, 2)
    ask: Ask = rng.choices(
        [questions.ask_where, questions.ask_end, questions.ask_whether], [6, 3, 1]
    )[0]
    if ask is not questions.ask_end and rng.random() < 0.1:  # told apart by colour alone
        shapes, colours = [shapes[0]] * 2, rng.sample(COLOURS, 2)
    kinds = list(zip(shapes, colours, strict=True))
    return _sample(rng, split, turns, ask, draw(rng, split, kinds, (width, height), places))
