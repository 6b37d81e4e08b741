"""Emoji by name: one of them somewhere on a background, turned, leaning, brighter or darker.

The glyphs are the same in training and tests; how large, how far turned and on what they are
shown is not.
"""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
from PIL import Image

from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import RGB, finish
from models.demo.recipe.emoji_names import NAMES, ONE, SEVERAL, bare
from models.demo.recipe.sample import DATA, Picture, Sample, Split, Turn, Wordings, gathered

SOURCE = DATA / "emoji.npz"
PHRASES = (*ONE.values(), *SEVERAL.values())  # as PICTURES are in order: "a cat", "bread", "fries"
SHARES = {Split.TRAIN: (0.3, 0.95), Split.TEST: (0.27, 0.98), Split.NEW: (0.27, 0.98)}
TURNS = {Split.TRAIN: 25, Split.TEST: 32, Split.NEW: 32}  # degrees to either side

WHAT = Wordings(
    learned=(
        "What is this?",
        "What is it?",
        "What do you see?",
        "What [can you see|do you see] in the [picture|image]?",
        "What is shown [here|in the picture|in the image]?",
        "What does the [picture|image] show?",
        "What does this [picture|image|emoji] show?",
        "[Which|What] emoji is this?",
        "[Which|What] emoji do you see?",
        "[Which|What] emoji is in the [picture|image]?",
        "What is this emoji [of|called]?",
        "Name the emoji.",
        "Please name [the|this] emoji.",
        "Name what you see, please.",
        "Tell me what this is.",
        "What thing is this",
        "What is in the [picture|image]",
        "[Describe|Name] the [picture|image].",
        "What am I looking at?",
    ),
    kept=(
        "What thing do you see here?",
        "Tell me what this emoji shows.",
        "Which emoji is shown in this image?",
        "Please tell me what you see.",
        "Name what is in the picture.",
    ),
)

IS_IT = Wordings(
    learned=(
        "Is this {name}?",
        "Is it {name}?",
        "Is that {name}?",
        "Does the [picture|image] show {name}?",
        "Does this emoji show {name}?",
        "Do you see {name} here?",
        "Can you see {name} in the [picture|image]?",
        "Is {name} shown here?",
        "Is the emoji {name}?",
        "Tell me whether this is {name}.",
        "Am I looking at {name}?",
        "Would you call this {name}?",
    ),
    kept=(
        "Is what you see {name}?",
        "Does the emoji here show {name}?",
        "Tell me: is this {name}?",
    ),
)

ARE_THEY = Wordings(
    learned=(
        "Are these {name}?",
        "Are they {name}?",
        "Are those {name}?",
        "Does the [picture|image] show {name}?",
        "Does this emoji show {name}?",
        "Do you see {name} here?",
        "Can you see {name} in the [picture|image]?",
        "Are {name} shown here?",
        "Are there {name} in the [picture|image]?",
        "Tell me whether these are {name}.",
        "Am I looking at {name}?",
        "Would you call these {name}?",
    ),
    kept=(
        "Are {name} what you see?",
        "Does the emoji here show {name}?",
        "Tell me: are these {name}?",
    ),
)


def emoji(rng: random.Random, split: Split, turns: int) -> Sample:
    """One emoji. A second turn asks whether it is a given one."""
    drawn = rng.randrange(len(PHRASES))
    picture = _shown(rng, split, drawn)
    asked = [_what(rng, split, PHRASES[drawn]), _whether(rng, split, PHRASES[drawn])][:turns]
    rng.shuffle(asked)
    return Sample((picture,), tuple(asked))


def _what(rng: random.Random, split: Split, phrase: str) -> Turn:
    said = _said(phrase)
    answer = f"{said[0].upper()}{said[1:]}."
    return Turn("emoji", WHAT.ask(rng, split), answer, (bare(phrase),), frozenset(NAMES))


def _whether(rng: random.Random, split: Split, phrase: str) -> Turn:
    guess = phrase if rng.random() < 0.5 else rng.choice(PHRASES)
    word = "yes" if guess == phrase else "no"
    wordings = ARE_THEY if guess in SEVERAL.values() else IS_IT
    question = wordings.ask(rng, split, name=guess)
    answer = f"{word.capitalize()}, {_said(phrase)}."
    return Turn("emoji check", question, answer, (word,), frozenset({"yes", "no"}))


def _said(phrase: str) -> str:
    return f"they are {phrase}" if phrase in SEVERAL.values() else f"it is {phrase}"


@cache
def _glyphs() -> tuple[tuple[Image.Image, ...], ...]:
    """Every emoji in the size it is kept in, and in half of it."""
    with np.load(gathered(SOURCE)) as kept:
        if tuple(kept["names"]) != NAMES:
            raise SystemExit(f"{SOURCE} holds other emoji: run gather_pictures again")
        whole = [Image.fromarray(pixels) for pixels in kept["pixels"]]
    return tuple((glyph, glyph.reduce(2)) for glyph in whole)


@cache
def _mean(drawn: int) -> RGB:
    """The colour that is most of an emoji, roughly."""
    pixels = np.asarray(_glyphs()[drawn][0], np.float64).reshape(-1, 4)
    red, green, blue = np.average(pixels[:, :3], axis=0, weights=pixels[:, 3])
    return round(red), round(green), round(blue)


@cache
def _unknown(split: Split) -> tuple[tuple[Image.Image, ...], ...]:
    with np.load(gathered(SOURCE)) as kept:
        pixels = kept["unknown" if split is Split.TRAIN else "unknown_kept"]
    whole = [Image.fromarray(one) for one in pixels]
    return tuple((glyph, glyph.reduce(2)) for glyph in whole)


def unknown(rng: random.Random, split: Split) -> Picture:
    """An emoji that the model is not to know; tests show other ones."""
    return _placed(rng, split, rng.choice(_unknown(split)), ())


def _shown(rng: random.Random, split: Split, drawn: int) -> Picture:
    return _placed(rng, split, _glyphs()[drawn], (_mean(drawn),))


def _placed(
    rng: random.Random, split: Split, glyphs: tuple[Image.Image, ...], avoid: tuple[RGB, ...]
) -> Picture:
    short = rng.randint(112, 168)
    width, height = rng.choice(((short, short), (short, short), (short * 4 // 3, short)))
    if rng.random() < 0.3:
        width, height = height, width
    image = background(rng, split, width, height, avoid=avoid)
    side = min(width, height) * rng.uniform(*SHARES[split])
    glyph = _turned(rng, split, glyphs, side)
    box = glyph.getbbox() or (0, 0, *glyph.size)
    x = _corner(rng, box[0], box[2], width)
    y = _corner(rng, box[1], box[3], height)
    image.paste(glyph, (x, y), glyph)
    return finish(rng, image)


def _turned(
    rng: random.Random, split: Split, glyphs: tuple[Image.Image, ...], side: float
) -> Image.Image:
    """The emoji in a square that holds it at any of these turns."""
    whole, half = glyphs
    glyph = half if side < whole.width * 0.6 else whole
    turn = math.radians(rng.uniform(-TURNS[split], TURNS[split]))
    if rng.random() < 0.25:
        turn = 0.0
    lean = rng.uniform(-0.12, 0.12)
    room = math.ceil(side * (abs(math.cos(turn)) + abs(math.sin(turn)) + abs(lean))) + 2
    scale = glyph.width / side
    cos, sin = math.cos(turn) * scale, math.sin(turn) * scale
    a, b, d, e = cos - lean * sin, sin + lean * cos, -sin, cos
    c = glyph.width / 2 - (a + b) * room / 2
    f = glyph.height / 2 - (d + e) * room / 2
    shown = glyph.transform(
        (room, room), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR
    )
    return _lit(rng, shown)


def _lit(rng: random.Random, glyph: Image.Image) -> Image.Image:
    """Half the time brighter or darker by up to a sixth."""
    if rng.random() < 0.5:
        return glyph
    light = rng.uniform(0.84, 1.16)
    colours = [min(255, round(level * light)) for level in range(256)]
    return glyph.point(colours * 3 + list(range(256)))


def _corner(rng: random.Random, low: int, high: int, length: int) -> int:
    """Where a square goes of which what lies from low to high is to be seen whole."""
    first, last = -low, length - high
    return rng.randint(first, last) if first <= last else (first + last) // 2
