"""What shapes lie on: one tone, a pattern of two tones, or a texture (noise or a photograph).

Some patterns and textures are drawn in training, others only where the model is tested. No tone
comes near a colour that is to be avoided, and little of a texture does, so that whatever is drawn
on a background can be seen.
"""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageStat

from models.demo.recipe.canvas import RGB, apart
from models.demo.recipe.sample import Maker, Sample, Split
from models.demo.recipe.textures import texture

GROUNDS = ("plain", "pattern", "texture")
OFTEN = {True: (0.22, 0.36, 0.42), False: (0.2, 0.4, 0.4)}  # in training, and in tests
NEAREST = 60.0  # that a tone may come to a colour it is to differ from, as ``apart`` measures
Weights = NDArray[np.floating]  # [height, width], from 0 to 1: how much of the second tone


_only: list[str] = []  # kinds that are asked for, the last one counts


@contextmanager
def only(ground: str) -> Iterator[None]:
    """Every background is of this kind meanwhile."""
    _only.append(ground)
    try:
        yield
    finally:
        _only.pop()


def on(ground: str, maker: Maker) -> Maker:
    """The maker, with every background of this kind."""

    def draw(rng: random.Random, split: Split, turns: int) -> Sample:
        with only(ground):
            return maker(rng, split, turns)

    return draw


def background(
    rng: random.Random,
    split: Split,
    width: int,
    height: int,
    avoid: Sequence[RGB] = (),
    plain: bool = False,
    calm: bool = False,
) -> Image.Image:
    """A background that the split allows; ``plain`` asks for one even tone, ``calm`` for little
    contrast, so that a word can be read on it."""
    (ground,) = rng.choices(GROUNDS, OFTEN[split is Split.TRAIN])
    if _only:
        ground = _only[-1]
    elif plain:
        ground = "plain"
    match ground:
        case "plain":
            return Image.new("RGB", (width, height), _tone(rng, avoid))
        case "pattern":
            return _pattern(rng, split, width, height, avoid)
    return _textured(rng, split, width, height, avoid, calm)


def _pattern(
    rng: random.Random, split: Split, width: int, height: int, avoid: Sequence[RGB]
) -> Image.Image:
    kind = rng.choice(list(LEARNED if split is Split.TRAIN else KEPT))
    weights = (LEARNED | KEPT)[kind](rng, width, height)
    first, second = _tones(rng, avoid)
    mixed = Image.fromarray((weights * 255).astype(np.uint8))
    mixed.putpalette(np.linspace(first, second, 256).round().astype(np.uint8).tobytes())
    return mixed.convert("RGB")


def _textured(
    rng: random.Random, split: Split, width: int, height: int, avoid: Sequence[RGB], calm: bool
) -> Image.Image:
    """A texture of which little is close to a colour to be avoided. Where none of some is like
    that, a tone that differs covers most of it."""
    most = rng.choice((0.04, 0.1, 0.1, 0.2))
    for _ in range(2):
        image = texture(rng, split, width, height)
        if calm:
            image = _calmed(rng, image)
        if _near(image, avoid) <= most:
            return image
    tone = Image.new("RGB", (width, height), _tone(rng, avoid))
    return Image.blend(image, tone, rng.uniform(0.55, 0.8))


def _calmed(rng: random.Random, image: Image.Image) -> Image.Image:
    """Nothing lighter or darker than the mean by much."""
    red, green, blue = (round(part) for part in ImageStat.Stat(image.reduce(8)).mean)
    mean = Image.new("RGB", image.size, (red, green, blue))
    return Image.blend(mean, image, rng.uniform(0.25, 0.45))


def _near(image: Image.Image, avoid: Sequence[RGB]) -> float:
    """The share of the picture that is close to the colour to which most is."""
    if not avoid:
        return 0.0
    pixels = np.asarray(image.reduce(6), np.float32).reshape(-1, 1, 3)
    colours = np.array(sorted(set(avoid)), np.float32)
    square = ((pixels - colours) ** 2) @ np.array([2, 4, 3], np.float32)
    return float((square < (NEAREST * 3) ** 2).mean(axis=0).max())


def _tone(rng: random.Random, avoid: Sequence[RGB]) -> RGB:
    """One tone: often white, else light, dark, muted or (seldom) strong."""
    best, best_gap = (255, 255, 255), -1.0
    for _ in range(60):
        tone = _any_tone(rng)
        gap = min((apart(tone, colour) for colour in avoid), default=255.0)
        if gap >= NEAREST:
            return tone
        if gap > best_gap:
            best, best_gap = tone, gap
    return best


def _any_tone(rng: random.Random) -> RGB:
    kind = rng.random()
    if kind < 0.2:
        return 255, 255, 255
    if kind < 0.25:
        return 0, 0, 0
    if kind < 0.5:
        saturation, value = rng.uniform(0, 0.22), rng.uniform(0.85, 1)
    elif kind < 0.65:
        saturation, value = rng.uniform(0, 0.5), rng.uniform(0.05, 0.3)
    elif kind < 0.9:
        saturation, value = rng.uniform(0, 0.4), rng.uniform(0.3, 0.9)
    else:
        saturation, value = rng.uniform(0.5, 1), rng.uniform(0.5, 1)
    red, green, blue = colorsys.hsv_to_rgb(rng.random(), saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def _tones(rng: random.Random, avoid: Sequence[RGB]) -> tuple[RGB, RGB]:
    """Two tones that do not differ much; neither they nor those between are to be avoided."""
    first = _tone(rng, avoid)
    for _ in range(12):
        step = rng.uniform(14, 56)
        red, green, blue = (
            min(255, max(0, round(part + rng.uniform(-1, 1) * step))) for part in first
        )
        second = red, green, blue
        if all(_clear(first, second, colour) for colour in avoid):
            return first, second
    return first, first


def _clear(first: RGB, second: RGB, colour: RGB) -> bool:
    """Whether the colour is far from the second tone and from those between it and the first."""
    for part in (0.25, 0.5, 0.75, 1.0):
        red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
        if apart((red, green, blue), colour) < NEAREST:
            return False
    return True


@cache
def _noise() -> NDArray[np.float32]:
    return np.random.default_rng(11).random((512, 512), dtype=np.float32)


def _grid(width: int, height: int, angle: float) -> Weights:
    """How far along a direction every pixel lies, in pixels."""
    x = np.arange(width, dtype=np.float32) * math.cos(angle)
    y = np.arange(height, dtype=np.float32) * math.sin(angle)
    return x[None, :] + y[:, None]


def _gradient(rng: random.Random, width: int, height: int) -> Weights:
    along = _grid(width, height, rng.uniform(0, 2 * math.pi))
    return (along - along.min()) / np.ptp(along)


def _specks(rng: random.Random, width: int, height: int) -> Weights:
    top, left = rng.randrange(512 - height), rng.randrange(512 - width)
    return _noise()[top : top + height, left : left + width]


def _stripes(rng: random.Random, width: int, height: int) -> Weights:
    angle = rng.choice([0.0, math.pi / 2, rng.uniform(0, math.pi)])
    wave = np.sin(_grid(width, height, angle) * (2 * math.pi / rng.uniform(8, 40)))
    return (wave > 0).astype(np.float32) if rng.random() < 0.5 else (wave + 1) / 2


def _blobs(rng: random.Random, width: int, height: int) -> Weights:
    cells = rng.randint(3, 7), rng.randint(3, 7)
    coarse = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, cells, dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(smooth, dtype=np.float32) / 255


def _horizon(rng: random.Random, width: int, height: int) -> Weights:
    along = _grid(width, height, math.pi / 2 + rng.uniform(-0.2, 0.2))
    return (along > height * rng.uniform(0.3, 0.7)).astype(np.float32)


def _glow(rng: random.Random, width: int, height: int) -> Weights:
    x = (np.arange(width, dtype=np.float32) - width * rng.uniform(0.2, 0.8)) / width
    y = (np.arange(height, dtype=np.float32) - height * rng.uniform(0.2, 0.8)) / height
    far = np.sqrt(x[None, :] ** 2 + y[:, None] ** 2)
    return far / far.max()


def _checks(rng: random.Random, width: int, height: int) -> Weights:
    cell = rng.randint(7, 24)
    across = np.arange(width) // cell
    down = np.arange(height) // cell
    return ((across[None, :] + down[:, None]) % 2).astype(np.float32)


def _waves(rng: random.Random, width: int, height: int) -> Weights:
    bend = np.sin(np.arange(height, dtype=np.float32) * (2 * math.pi / rng.uniform(40, 120)))
    x = np.arange(width, dtype=np.float32)[None, :] + bend[:, None] * rng.uniform(5, 14)
    wave = (np.sin(x * (2 * math.pi / rng.uniform(12, 36))) + 1) / 2
    return wave.T[:height, :width] if width == height and rng.random() < 0.5 else wave


def _paper(rng: random.Random, width: int, height: int) -> Weights:
    return _blobs(rng, width, height) * 0.6 + _specks(rng, width, height) * 0.4


Kind = Callable[[random.Random, int, int], Weights]
LEARNED: dict[str, Kind] = {
    "gradient": _gradient,
    "specks": _specks,
    "stripes": _stripes,
    "blobs": _blobs,
    "horizon": _horizon,
}
KEPT: dict[str, Kind] = {"glow": _glow, "checks": _checks, "waves": _waves, "paper": _paper}
