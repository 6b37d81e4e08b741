"""Two or three pictures in one request: which one has something, and what each of them shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from models.demo.recipe.canvas import COLOURS, SHAPES, an
from models.demo.recipe.sample import Sample, Split, Turn, Wordings
from models.demo.recipe.scene_questions import (
    ANY_COLOUR,
    ANY_NUMBER,
    ANY_SHAPE,
    NONE,
    YES_OR_NO,
    Thing,
    absent_shape,
    capital,
    spelled,
)
from models.demo.recipe.scenes import Kind, scattered, some_shapes
from models.demo.recipe.vocabulary import NUMBERS

ORDER = ("first", "second", "third")

WHICH = Wordings(
    learned=[
        "[Which|What] [picture|image] has {what}?",
        "which [picture|image] has {what}",
        "[Which|What] [picture|image] shows {what}?",
        "In which [picture|image] is {what}?",
        "In which [picture|image|photo] do you see {what}?",
        "Which of the [pictures|images|photos] [has|shows] {what}?",
        "Where is {what}, in [which|what] [picture|image]?",
        "Where do you see {what}?",
        "Where is {what}?",
        "[Name|Tell me] the [picture|image] that [has|shows] {what}.",
        "Please tell me which [picture|image] [has|shows] {what}.",
        "[Can|Could] you tell me which [picture|image] [has|shows] {what}?",
        "{What} is in one of the [pictures|images]. Which one?",
        "One [picture|image] shows {what}. Which one?",
        "[Find|Look for] {what}. Which [picture|image] is it [in|on]?",
    ],
    kept=[
        "Which one of the pictures shows {what}?",
        "Please say in which [picture|image] you see {what}.",
        "{What} is in which picture?",
        "Tell me in which image {what} is.",
    ],
)
SHOWN = Wordings(
    learned=[
        "What is [in|on] {which}?",
        "what is [in|on] {which}",
        "What do you see [in|on] {which}?",
        "What does {which} show?",
        "What can you see in {which}?",
        "What is [shown|drawn] in {which}?",
        "Describe {which}.",
        "Please describe {which}.",
        "Tell me what {which} shows.",
        "Tell me what you see in {which}.",
        "Look at {which}. What is it?",
        "Look at {which}. What do you see?",
        "[Can|Could] you tell me what is in {which}?",
    ],
    kept=[
        "Please tell me what you see in {which}.",
        "Describe what {which} shows.",
        "In {which}, what do you see?",
        "Say what is in {which}.",
    ],
)
COLOUR_IN = Wordings(
    learned=[
        "[What|Which] [colour|color] is the [shape|object|figure] in {which}?",
        "what [colour|color] is the [shape|object] in {which}",
        "What is the [colour|color] of the [shape|object|figure] in {which}?",
        "[What|Which] [colour|color] does the [shape|object] in {which} have?",
        "[Name|Tell me|Say] the [colour|color] of the shape in {which}.",
        "Please [name|tell me] the [colour|color] of the [shape|object] in {which}.",
        "Look at {which}. What [colour|color] is the [shape|object]?",
        "In {which}, what [colour|color] is the [shape|object]?",
        "[What|Which] [colour|color] do you see in {which}?",
        "Tell me what [colour|color] the shape in {which} is.",
        "[Can|Could] you tell me the [colour|color] of the shape in {which}?",
        "In which [colour|color] is the shape in {which} drawn?",
    ],
    kept=[
        "Look at {which} and name the [colour|color] of the shape.",
        "The shape in {which}: what [colour|color] is it?",
        "In {which}, which [colour|color] does the figure have?",
    ],
)
SAME = Wordings(
    learned=[
        "Are both [pictures|images] of the same {part}?",
        "are both [pictures|images] of the same {part}",
        "Do both [pictures|images] show the same {part}?",
        "Do the [two pictures|pictures|two images|images] show the same {part}?",
        "Is it the same {part} in both [pictures|images]?",
        "Is the {part} the same in both [pictures|images]?",
        "Do you see the same {part} in both [pictures|images]?",
        "Is the {part} in the first picture the same as in the second?",
        "Tell me if both [pictures|images] show the same {part}.",
        "Please tell me if the {part} is the same in both [pictures|images].",
        "Does the second [picture|image] show the same {part} as the first?",
        "Do both have the same {part}?",
    ],
    kept=[
        "Is the {part} in both pictures the same?",
        "Do the first and the second picture show the same {part}?",
        "Tell me if you see the same {part} in the two images.",
    ],
)
HOW_MANY = Wordings(
    learned=[
        "How many [pictures|images|photos] are there?",
        "how many [pictures|images] are there",
        "How many [pictures|images|photos] do you see?",
        "How many [pictures|images] [did|do] I [send|show] you?",
        "How many [pictures|images]?",
        "Count the [pictures|images|photos].",
        "Please count the [pictures|images].",
        "Tell me how many [pictures|images] there are.",
        "Tell me the number of [pictures|images].",
        "What is the number of [pictures|images]?",
        "[Can|Could] you count the [pictures|images]?",
        "How many [pictures|images] [can|do] you see here?",
    ],
    kept=[
        "Please tell me how many pictures you see.",
        "Count how many images you see.",
        "Could you tell me the number of images?",
    ],
)

Pictures = Sequence[Sequence[Thing]]  # what each of them shows
Ask = Callable[[random.Random, Split, Pictures], Turn | None]


def _which(
    rng: random.Random, split: Split, shown: Pictures, part: str, what: Callable[[Thing], str]
) -> Turn | None:
    """In which picture something is that no other has."""
    alike = [{getattr(thing, part) for thing in things} for things in shown]
    found = [
        (place, thing)
        for place, things in enumerate(shown)
        for thing in things
        if sum(getattr(thing, part) in every for every in alike) == 1
    ]
    if not found:
        return None
    place, thing = rng.choice(found)
    name = what(thing)
    question = WHICH.ask(rng, split, what=name, What=capital(name))
    return Turn(
        "pictures", question, f"The {ORDER[place]} picture.", (ORDER[place],), frozenset(ORDER)
    )


def ask_shape(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """Which picture has the circle? Not of rectangles where a square, which is one, is about."""
    every = {thing.shape for things in shown for thing in things}
    if every >= {"square", "rectangle"}:
        return None
    the = rng.random() < 0.5
    return _which(
        rng, split, shown, "shape", lambda thing: f"the {thing.shape}" if the else an(thing.shape)
    )


def ask_colour(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """Which picture has something red?"""
    words = rng.choice(["a {} shape", "the {} shape", "something {}", "a {} object", "the {} one"])

    def what(thing: Thing) -> str:
        colour = spelled(rng, thing.colour)
        article = an(colour).split()[0]
        return words.replace("a {}", article + " {}").format(colour)

    return _which(rng, split, shown, "colour", what)


def ask_name(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """Which picture has the red circle?"""
    the = rng.random() < 0.5

    def what(thing: Thing) -> str:
        name = f"{spelled(rng, thing.colour)} {thing.shape}"
        return f"the {name}" if the else an(name)

    return _which(rng, split, shown, "name", what)


def _one(rng: random.Random, shown: Pictures) -> tuple[Thing, str] | None:
    """The thing of a picture that has only one, and how that picture is called."""
    alone = [place for place, things in enumerate(shown) if len(things) == 1]
    if not alone:
        return None
    place = rng.choice(alone)
    last = place == len(shown) - 1 and rng.random() < 0.15
    order = "last" if last else ORDER[place]
    noun = rng.choice(["picture", "picture", "image"])
    called = f"{noun} {NUMBERS[place + 1]}" if rng.random() < 0.1 else f"the {order} {noun}"
    return shown[place][0], called


def ask_shown(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """What is in the first picture?"""
    if (found := _one(rng, shown)) is None:
        return None
    thing, which = found
    truth = (thing.colour, thing.shape)
    answer = f"{capital(an(thing.name))}."
    question = SHOWN.ask(rng, split, which=which)
    return Turn("pictures", question, answer, truth, ANY_COLOUR | ANY_SHAPE)


def ask_colour_in(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """What colour is the shape in the second picture?"""
    if (found := _one(rng, shown)) is None:
        return None
    thing, which = found
    answer = f"The {thing.shape} is {thing.colour}."
    question = COLOUR_IN.ask(rng, split, which=which)
    return Turn("pictures", question, answer, (thing.colour,), ANY_COLOUR)


def ask_same(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """Do both pictures show the same shape, or the same colour?"""
    if len(shown) != 2 or any(len(things) != 1 for things in shown):
        return None
    (one,), (other,) = shown
    if rng.random() < 0.5:
        part, same = "shape", one.shape == other.shape
        yes = f"Yes, both pictures show {an(one.shape)}."
        no = "No, the shapes are different."
    else:
        part, same = rng.choice(["colour", "color"]), one.colour == other.colour
        yes, no = f"Yes, both shapes are {one.colour}.", "No, the colours are different."
    question = SAME.ask(rng, split, part=part)
    return Turn("pictures", question, yes if same else no, ("yes" if same else "no",), YES_OR_NO)


def ask_how_many(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """How many pictures are there?"""
    number = NUMBERS[len(shown)]
    question = HOW_MANY.ask(rng, split)
    return Turn("pictures", question, f"There are {number} pictures.", (number,), ANY_NUMBER)


def ask_absent(rng: random.Random, split: Split, shown: Pictures) -> Turn | None:
    """Which picture has the star, where none has?"""
    shape = absent_shape(rng, [thing for things in shown for thing in things])
    name = f"the {shape}" if rng.random() < 0.5 else an(shape)
    question = WHICH.ask(rng, split, what=name, What=capital(name))
    return Turn("pictures", question, f"There is no {shape}.", (NONE,), frozenset(ORDER) | {NONE})


ASKS: dict[Ask, int] = {  # and how often each is asked
    ask_shape: 30,
    ask_colour: 20,
    ask_name: 15,
    ask_shown: 20,
    ask_colour_in: 8,
    ask_same: 12,
    ask_how_many: 2,
    ask_absent: 6,
}


def _kinds(rng: random.Random, ask: Ask) -> list[list[Kind]]:
    """What the pictures are to show: mostly one thing each, sometimes alike in a part."""
    many = 2 if ask is ask_same or rng.random() < 0.55 else 3
    shapes, colours = some_shapes(rng, many), rng.sample(COLOURS, many)
    if ask in (ask_colour, ask_colour_in, ask_shown) or rng.random() < 0.2:
        shapes = rng.choices(SHAPES, k=many)
    if ask in (ask_shape, ask_colour_in, ask_shown) or rng.random() < 0.2:
        colours = rng.choices(COLOURS, k=many)
    if ask is ask_same:  # half of the pairs are alike in either part
        shapes[1] = rng.choice([shapes[0], shapes[1]])
        colours[1] = rng.choice([colours[0], colours[1]])
    if ask is ask_name and many == 3:  # neither the shape nor the colour tells by itself
        shapes[1], colours[2] = shapes[0], colours[0]
    kinds = [[kind] for kind in zip(shapes, colours, strict=True)]
    if ask in (ask_shape, ask_colour, ask_name) and rng.random() < 0.25:
        more = some_shapes(rng, many, but=shapes), rng.choices(COLOURS, k=many)
        for things, kind in zip(kinds, zip(*more, strict=True), strict=True):
            things.append(kind)
    return kinds


def pictures(rng: random.Random, split: Split, turns: int) -> Sample:
    """Two or three pictures, each of one or two shapes, and questions that need all of them."""
    ask = rng.choices(list(ASKS), list(ASKS.values()))[0]
    every: list[Turn] = []
    while not every:
        drawn = [scattered(rng, split, kinds) for kinds in _kinds(rng, ask)]
        shown = [things for _, things in drawn]
        first = ask(rng, split, shown)
        every = [] if first is None else [first]
    told = {(ask, every[0].answer)}
    for _ in range(4 * (turns - 1)):
        if len(every) == turns:
            break
        ask = rng.choices(list(ASKS), list(ASKS.values()))[0]
        turn = ask(rng, split, shown)
        if turn is not None and (ask, turn.answer) not in told:
            told.add((ask, turn.answer))
            every.append(turn)
    return Sample(tuple(picture for picture, _ in drawn), tuple(every))
