"""Handwritten digits: one of MNIST's, in some ink on some paper, and which one it is.

Training draws from MNIST's training set alone, tests from its test set alone.
"""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.demo.recipe import ink
from models.demo.recipe.sample import DATA, Picture, Sample, Split, Turn, Wordings, gathered
from models.demo.recipe.vocabulary import NUMBERS

SOURCE = DATA / "mnist.npz"
FRAME = 28  # pixels a side of what MNIST holds; the digit itself fills about 20 of them

WHICH = Wordings(
    learned=(
        "Which [digit|number] is this?",
        "What [digit|number] is this?",
        "[Which|What] [digit|number] is [shown|written] here?",
        "[Which|What] [digit|number] do you see?",
        "[Which|What] [digit|number] is in the [picture|image]?",
        "[Which|What] handwritten digit is [this|shown]?",
        "[Which|What] number did somebody write",
        "Read the [digit|number].",
        "Name the [digit|number], please.",
        "Please [read|name] this [handwritten |]digit.",
        "Tell me [which|what] digit this is.",
        "Can you read this [digit|number]?",
        "[Which|What] digit was written by hand?",
        "Look at the [digit|number]. Which one is it?",
        "Handwritten digit: which one",
    ),
    kept=(
        "Which digit can you see in this picture?",
        "Please tell me what number is written.",
        "Read this handwritten number, please.",
        "Which digit did somebody write here?",
        "Name the number that is shown here.",
    ),
)

IS_IT = Wordings(
    learned=(
        "Is this a {name}?",
        "Is this digit a {name}?",
        "Is the number a {name}?",
        "Does the [picture|image] show a {name}?",
        "Is it a {name}?",
        "Can you see a {name} here?",
        "Did somebody write a {name}?",
        "Is a {name} written here?",
        "Would you read this as a {name}?",
        "Is that the digit {name}?",
        "Tell me whether this is a {name}.",
        "Is the [digit|number] in the [picture|image] a {name}?",
    ),
    kept=(
        "Is the digit here a {name}?",
        "Can this number be a {name}?",
        "Tell me: is it a {name}?",
    ),
)


def digit(rng: random.Random, split: Split, turns: int) -> Sample:
    """One handwritten digit. A second turn asks whether it is a given one."""
    pixels, labels = _digits(split)
    drawn = rng.randrange(len(labels))
    name = NUMBERS[labels[drawn]]
    picture = _written(rng, split, pixels[drawn])
    asked = [_which(rng, split, name), _whether(rng, split, name)][:turns]
    rng.shuffle(asked)
    return Sample((picture,), tuple(asked))


@cache
def _digits(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """MNIST's pixels [digits, 28, 28], bright on dark, and labels [digits]."""
    part = "train" if split is Split.TRAIN else "test"
    with np.load(gathered(SOURCE)) as mnist:
        return mnist[f"{part}_pixels"], mnist[f"{part}_labels"]


def _which(rng: random.Random, split: Split, name: str) -> Turn:
    answer = f"It is {article(name)} {name}."
    return Turn("digit", WHICH.ask(rng, split), answer, (name,), frozenset(NUMBERS))


def _whether(rng: random.Random, split: Split, name: str) -> Turn:
    said = name if rng.random() < 0.5 else rng.choice(NUMBERS)
    word = "yes" if said == name else "no"
    question = IS_IT.ask(rng, split, name=said).replace(f"a {said}", f"{article(said)} {said}")
    answer = f"{word.capitalize()}, it is {article(name)} {name}."
    return Turn("digit check", question, answer, (word,), frozenset({"yes", "no"}))


def article(name: str) -> str:
    return "an" if name[0] in "aeiou" and name != "one" else "a"


def _written(rng: random.Random, split: Split, pixels: NDArray[np.uint8]) -> Picture:
    """The digit as MNIST has it, enlarged; or anywhere in a picture, turned and leaning a little,
    35 to 95 % of the picture high, in any two colours."""
    if rng.random() < 0.15:
        side = rng.choice((56, 84, 112, 140, 168))
        return _as_it_is(rng, pixels, side)
    short = rng.randint(112, 168)
    width, height = rng.choice(((short, short), (short, short), (short * 4 // 3, short)))
    if rng.random() < 0.3:
        width, height = height, width
    share = rng.uniform(0.35, 0.95)
    scale = share * min(width, height) / 20
    mask = _placed(rng, Image.fromarray(pixels), (width, height), scale)
    paper, colour = ink.page(rng, split, (width, height))
    return ink.painted(rng, paper, colour, mask)


def _as_it_is(rng: random.Random, pixels: NDArray[np.uint8], side: int) -> Picture:
    """White on black, or black on white, the whole frame."""
    shown = Image.fromarray(pixels if rng.random() < 0.7 else 255 - pixels)
    how = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BICUBIC))
    return Picture(np.asarray(shown.resize((side, side), how).convert("RGB")))


def _placed(
    rng: random.Random, frame: Image.Image, size: tuple[int, int], scale: float
) -> Image.Image:
    """A mask of this size with the frame in it, ``scale`` times as large and wholly inside."""
    left, top, right, bottom = frame.getbbox() or (0, 0, FRAME, FRAME)
    turn = math.radians(rng.uniform(-12, 12))
    lean = rng.uniform(-0.15, 0.15)
    cos, sin = math.cos(turn) / scale, math.sin(turn) / scale
    # from the picture to the frame: turn back, then straighten
    a, b, d, e = cos + lean * -sin, sin + lean * cos, -sin, cos
    width, height = size
    reach = scale * max(right - left, bottom - top) * 0.58  # a little more than half: it is turned
    x = _within(rng, reach, width)
    y = _within(rng, reach, height)
    c = (left + right) / 2 - a * x - b * y
    f = (top + bottom) / 2 - d * x - e * y
    return frame.transform(
        size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BICUBIC
    )


def _within(rng: random.Random, reach: float, length: int) -> float:
    """Where the middle of something may be that reaches this far to either side."""
    return rng.uniform(reach, length - reach) if reach < length / 2 else length / 2
