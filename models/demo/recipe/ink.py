"""Ink on paper: two colours that can be told apart, and a mask painted with one on the other.

What is written (a digit, a word) is not known here; a mask says where the ink is.
"""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageStat

from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import finish
from models.demo.recipe.sample import Picture, Split

Colour = tuple[int, int, int]

BLACK: Colour = (0, 0, 0)
WHITE: Colour = (255, 255, 255)


def lightness(colour: Colour) -> float:
    """How bright an eye takes a colour to be, 0 to 255."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def page(rng: random.Random, split: Split, size: tuple[int, int]) -> tuple[Image.Image, Colour]:
    """Something to write on, and a colour that can be read on it. Four times in ten it is black
    and white, three times one even colour, else what the split has for backgrounds."""
    kind = rng.random()
    if kind < 0.25:
        return _sheet(rng, size, WHITE), BLACK
    if kind < 0.4:
        return _sheet(rng, size, BLACK), WHITE
    if kind < 0.7:
        paper = _colour(rng)
        return _sheet(rng, size, paper), _readable(rng, paper)
    image = background(rng, split, *size, calm=True)
    red, green, blue = (round(part) for part in ImageStat.Stat(image.reduce(8)).mean)
    return image, _readable(rng, (red, green, blue))


def _readable(rng: random.Random, paper: Colour, least: float = 95.0) -> Colour:
    """Any colour that is so much lighter or darker than the paper."""
    while True:
        ink = _colour(rng)
        if abs(lightness(ink) - lightness(paper)) >= least:
            return ink


def _colour(rng: random.Random) -> Colour:
    """Any colour, the lightest and the darkest as likely as those between."""
    low, high = sorted((rng.randrange(-60, 316), rng.randrange(-60, 316)))
    red, green, blue = (min(255, max(0, rng.randint(low, high))) for _ in range(3))
    return red, green, blue


def _sheet(rng: random.Random, size: tuple[int, int], paper: Colour) -> Image.Image:
    """Paper of one colour, or, one time in four, of shades close to it."""
    if rng.random() < 0.75:
        return Image.new("RGB", size, paper)
    corners = [[min(255, max(0, c + rng.randint(-24, 24))) for c in paper] for _ in range(4)]
    shades = Image.fromarray(np.array(corners, np.uint8).reshape(2, 2, 3))
    return shades.resize(size, Image.Resampling.BILINEAR)


def painted(rng: random.Random, paper: Image.Image, ink: Colour, mask: Image.Image) -> Picture:
    """The paper with ink where the mask (of the same size, "L") is bright."""
    paper.paste(ink, mask=mask)
    return finish(rng, paper)
