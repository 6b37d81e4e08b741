"""Ink on paper: two colours that can be told apart, and a mask painted with one on the other.

What is written (a digit, a word) is not known here; a mask says where the ink is.
"""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from models.demo.recipe.canvas import finish
from models.demo.recipe.sample import Picture

Colour = tuple[int, int, int]

BLACK: Colour = (0, 0, 0)
WHITE: Colour = (255, 255, 255)


def lightness(colour: Colour) -> float:
    """How bright an eye takes a colour to be, 0 to 255."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def two_colours(rng: random.Random, apart: float = 90.0) -> tuple[Colour, Colour]:
    """Ink and paper: often black and white, else any two whose lightness is ``apart``."""
    kind = rng.random()
    if kind < 0.2:
        return BLACK, WHITE
    if kind < 0.35:
        return WHITE, BLACK
    while True:
        ink, paper = _colour(rng), _colour(rng)
        if abs(lightness(ink) - lightness(paper)) >= apart:
            return ink, paper


def _colour(rng: random.Random) -> Colour:
    bits = rng.getrandbits(24)
    return bits & 255, bits >> 8 & 255, bits >> 16


def sheet(rng: random.Random, size: tuple[int, int], paper: Colour) -> Image.Image:
    """Paper of one colour, or, one time in three, of shades close to it."""
    if rng.random() < 0.67:
        return Image.new("RGB", size, paper)
    corners = [[min(255, max(0, c + rng.randint(-24, 24))) for c in paper] for _ in range(4)]
    shades = Image.fromarray(np.array(corners, np.uint8).reshape(2, 2, 3))
    return shades.resize(size, Image.Resampling.BILINEAR)


def painted(rng: random.Random, paper: Image.Image, ink: Colour, mask: Image.Image) -> Picture:
    """The paper with ink where the mask (of the same size, "L") is bright."""
    paper.paste(ink, mask=mask)
    return finish(rng, paper)
