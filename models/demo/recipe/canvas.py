"""Coloured shapes on a picture: what every drawn task is made of.

    rgb = shade(rng, "red")                       # a red, never quite the same one
    sprite = cut(rng, "star", "red", size=40)     # a shape cut out in a colour, drawn once
    image = background(rng, split, 160, 120, avoid=[sprite.rgb])   # from backgrounds.py
    sprite.paste(image, x=80, y=60)               # centre; as often as wished (frames of a clip)
    picture = finish(rng, image)                  # grain, and pixels

``draw_object`` is the short way for one shape. ``layout`` finds places that do not overlap. Nothing
here knows questions.
"""

from __future__ import annotations

import colorsys
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from models.demo.recipe.sample import Picture

RGB = tuple[int, int, int]

# Every colour is one or more boxes of hue (degrees), saturation and value (per cent), wide enough
# for the common names of style sheets and with gaps between them so that nobody would disagree.
_BOXES: dict[str, tuple[tuple[int, int, int, int, int, int], ...]] = {
    "red": ((-6, 5, 84, 100, 82, 100),),
    "green": ((96, 144, 55, 100, 42, 88), (112, 136, 80, 100, 88, 100)),
    "blue": ((206, 241, 68, 100, 58, 100),),
    "yellow": ((49, 60, 72, 100, 92, 100),),
    "orange": ((23, 38, 84, 100, 92, 100),),
    "purple": ((266, 287, 55, 90, 48, 92), (287, 302, 70, 100, 42, 60)),
    "pink": ((324, 350, 24, 56, 96, 100),),
    "brown": (*[(19, 30, 58, 88, 36, 56)] * 5, (0, 10, 68, 76, 56, 64)),  # seldom the reddish one
    "black": ((0, 360, 0, 20, 0, 10),),
    "white": ((0, 360, 0, 3, 96, 100),),
    "grey": ((0, 360, 0, 4, 42, 70),),
}
COLOURS = tuple(_BOXES)
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "rectangle", "oval")


def shade(rng: random.Random, colour: str) -> RGB:
    """One of the shades that bear the name."""
    h0, h1, s0, s1, v0, v1 = rng.choice(_BOXES[colour])
    hue = rng.uniform(h0, h1) % 360 / 360
    red, green, blue = colorsys.hsv_to_rgb(
        hue, rng.uniform(s0, s1) / 100, rng.uniform(v0, v1) / 100
    )
    return round(red * 255), round(green * 255), round(blue * 255)


def apart(one: RGB, other: RGB) -> float:
    """How far two colours are from each other, from 0 to 255, about as an eye would weigh it."""
    red, green, blue = (a - b for a, b in zip(one, other, strict=True))
    return math.sqrt(2 * red * red + 4 * green * green + 3 * blue * blue) / 3


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def an(words: str) -> str:
    """The words with their article: a red circle, an oval."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _ring(count: int, start: float = 0.0) -> list[tuple[float, float]]:
    turns = [start + 2 * math.pi * step / count for step in range(count)]
    return [(math.cos(turn), math.sin(turn)) for turn in turns]


@cache
def _circle() -> NDArray[np.float64]:
    return np.array(_ring(44))


@cache
def _heart() -> NDArray[np.float64]:
    turn = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    height = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
    return np.stack([16 * np.sin(turn) ** 3, -height], axis=1)


def _star(inner: float) -> NDArray[np.float64]:
    ring = _ring(10, start=-math.pi / 2)
    reach = (1.0, inner)
    return np.array([(x * reach[i % 2], y * reach[i % 2]) for i, (x, y) in enumerate(ring)])


def _cross(arm: float) -> NDArray[np.float64]:
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    points = list(quarter)
    for _ in range(3):  # the next arm is this one turned by a quarter
        quarter = [(-y, x) for x, y in quarter]
        points += quarter
    return np.array(points)


def _triangle(rng: random.Random) -> NDArray[np.float64]:
    apex = rng.uniform(-0.25, 0.25) if rng.random() < 0.8 else rng.choice([-1.0, 1.0])
    tall = rng.uniform(1.5, 2.1)
    points = np.array([(apex, -tall / 2), (1, tall / 2), (-1, tall / 2)])
    return -points if rng.random() < 0.2 else points


def _polygon(rng: random.Random, shape: str) -> tuple[NDArray[np.float64], float]:
    """Corners in any scale, and by how many degrees they may be turned."""
    flat = rng.uniform(1.85, 2.5)  # a picture's own stretching must not undo it
    stretch = (flat, 1.0) if rng.random() < 0.5 else (1.0, flat)
    match shape:
        case "circle":
            return _circle(), 0
        case "oval":
            return _circle() * stretch, 14
        case "square":
            return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], dtype=np.float64), 7
        case "rectangle":
            return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * stretch, 9
        case "diamond":
            narrow = rng.uniform(0.62, 0.95)
            return np.array([(0, -1), (narrow, 0), (0, 1), (-narrow, 0)]), 7
        case "triangle":
            return _triangle(rng), 12
        case "star":
            return _star(rng.uniform(0.38, 0.48)), 36
        case "heart":
            return _heart(), 14
        case "cross":
            return _cross(rng.uniform(0.26, 0.4)), 9
    raise ValueError(f"no shape is called {shape!r}")


def corners(rng: random.Random, shape: str) -> NDArray[np.float64]:
    """The shape's outline [points, 2], y downwards, in a box around 0 whose longer side is 1."""
    points, most = _polygon(rng, shape)
    angle = math.radians(rng.uniform(-most, most))
    turn = np.array([(math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))])
    points = points @ turn
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) / (high - low).max()


@dataclass(frozen=True, eq=False)
class Sprite:
    """A shape cut out: where it covers, and in what colour. ``rim`` is what lies below it and
    looks out as a thin edge."""

    shape: str
    colour: str
    rgb: RGB
    mask: Image.Image
    rim: tuple[RGB, Image.Image] | None = None

    @property
    def width(self) -> int:
        return self.mask.width

    @property
    def height(self) -> int:
        return self.mask.height

    def paste(self, image: Image.Image, x: float, y: float) -> None:
        """Draw it with the middle of its box at x, y."""
        corner = round(x - self.width / 2), round(y - self.height / 2)
        if self.rim is not None:
            image.paste(self.rim[0], corner, self.rim[1])
        image.paste(self.rgb, corner, self.mask)


def cut(rng: random.Random, shape: str, colour: str, size: float, rgb: RGB | None = None) -> Sprite:
    """A sprite whose box has ``size`` pixels along its longer side."""
    rgb = rgb or shade(rng, colour)
    points = corners(rng, shape)
    finer = 4 if size < 48 else 3 if size < 96 else 2  # drawn larger and reduced: soft edges
    width, height = (max(2, round(side * size)) for side in np.ptp(points, axis=0))
    scaled = points * ((width * finer - 1), (height * finer - 1)) / np.ptp(points, axis=0)
    path = (scaled - scaled.min(axis=0)).ravel().tolist()
    mask = Image.new("L", (width * finer, height * finer))
    pen = ImageDraw.Draw(mask)
    pen.polygon(path, fill=255)
    rim = None
    if size >= 28 and rng.random() < 0.2:
        dark = rng.choice([0.0, 0.55])
        red, green, blue = (round(part * dark) for part in rgb)
        rim = (red, green, blue), mask.reduce(finer)
        thick = max(1, round(size * rng.uniform(0.03, 0.055) * finer))
        pen.polygon(path, outline=0, width=thick)
    return Sprite(shape, colour, rgb, mask.reduce(finer), rim)


def draw_object(
    rng: random.Random, image: Image.Image, shape: str, colour: str, x: float, y: float, size: float
) -> Sprite:
    """Cut a shape and paste it; whoever draws the background looks that it differs."""
    sprite = cut(rng, shape, colour, size)
    sprite.paste(image, x, y)
    return sprite


@dataclass(frozen=True)
class Place:
    x: float
    y: float
    size: float


def smallest(width: int, height: int) -> float:
    """The size below which nothing is drawn: a ninth of the side of a square as large."""
    return math.sqrt(width * height) / 9


def layout(
    rng: random.Random, width: int, height: int, count: int, largest: float = 0.62
) -> list[Place]:
    """Places for some shapes, wholly inside and with a gap between any two boxes. The sizes go
    from the smallest to ``largest`` of a shape's share of the picture."""
    side = min(width, height)
    most = min(math.sqrt(width * height / count) * largest, side * 0.8)
    least = smallest(width, height)
    alike = rng.random() < 0.4  # all of about one size, or each of its own
    one = rng.uniform(least, most)
    while True:
        low, high = (one * 0.9, one) if alike else (least, most)
        sizes = [rng.uniform(low, high) for _ in range(count)]
        for _ in range(3):
            places = _placed(rng, width, height, sorted(sizes, reverse=True))
            if places is not None:
                return places
        most, one = max(least, most * 0.85), max(least, one * 0.85)


def _placed(
    rng: random.Random, width: int, height: int, sizes: Sequence[float]
) -> list[Place] | None:
    gap = max(3.0, min(width, height) / 40)
    places: list[Place] = []
    for size in sizes:
        half = size / 2 + 1
        for _ in range(30):
            x, y = rng.uniform(half, width - half), rng.uniform(half, height - half)
            if all(
                max(abs(x - other.x), abs(y - other.y)) >= (size + other.size) / 2 + gap
                for other in places
            ):
                places.append(Place(x, y, size))
                break
        else:
            return None
    return places


@cache
def _grain() -> NDArray[np.int16]:
    noise = np.random.default_rng(7).normal(0, 64, (512, 512, 3))
    return noise.clip(-200, 200).astype(np.int16)


def finish(rng: random.Random, image: Image.Image) -> Picture:
    """The picture's pixels; a third of them with grain, some blurred or from a JPEG, as cameras
    and encoders leave them."""
    spoiled = rng.random()
    if spoiled < 0.06:
        image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.4, 1.0)))
    elif spoiled < 0.14:
        image = _jpeg(image, rng.randint(35, 90))
    pixels = np.asarray(image, dtype=np.uint8)
    if rng.random() >= 0.33:
        return Picture(pixels)
    height, width, _ = pixels.shape
    top, left = rng.randrange(512 - height), rng.randrange(512 - width)
    grain = _grain()[top : top + height, left : left + width]
    strength = rng.choice([2, 4, 8, 12])  # of 64
    grainy = pixels + (grain * strength >> 6)
    return Picture(grainy.clip(0, 255).astype(np.uint8))


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")
