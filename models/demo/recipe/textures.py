"""Busy backgrounds: photographs, and noise with a spectrum like theirs.

Training and tests use different photographs, different slopes of the spectrum and different kinds
of texture. Nothing here knows what is drawn on a texture.
"""

from __future__ import annotations

import io
import math
import random
import zipfile
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.demo.recipe.sample import DATA, Split, gathered

SOURCE = DATA / "photos.zip"
SIDE = 384  # of a sheet of noise that textures are cut from
SHEETS = 20  # of noise, for each split
# Slopes of amplitude over frequency: photographs are near 1. Tests lie between those of training.
SLOPES = {True: ((0.55, 0.75), (0.95, 1.2), (1.5, 2.1)), False: ((0.8, 0.9), (1.25, 1.45))}
Pixels = NDArray[np.uint8]  # [height, width, 3]


def texture(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    kinds = LEARNED if split is Split.TRAIN else KEPT
    (draw,) = rng.choices(list(kinds), list(kinds.values()))
    return draw(rng, split, width, height)


def photo(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """A part of a photograph, mirrored half of the times, in somewhat other light."""
    whole = rng.choice(_photos(split is Split.TRAIN))
    scale = min(whole.width / width, whole.height / height) * rng.uniform(0.3, 1.0)
    wide, high = width * scale, height * scale
    left, top = rng.uniform(0, whole.width - wide), rng.uniform(0, whole.height - high)
    box = (left, top, left + wide, top + high)
    image = whole.resize((width, height), Image.Resampling.BILINEAR, box)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _lit(rng, image, 0.25)


def noise(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """Coloured noise whose spectrum falls as a power of the frequency."""
    return _lit(rng, _piece(rng, rng.choice(_sheets(split is Split.TRAIN)), width, height), 0.5)


def _white(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """Every pixel another colour."""
    return _lit(rng, _piece(rng, _static(), width, height), 0.5)


def _marble(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """Veins: a wave bent by noise."""
    piece = np.asarray(_piece(rng, rng.choice(_sheets(True)[-SHEETS // 3 :]), width, height))
    turn = rng.uniform(0, math.pi)
    along = np.arange(width) * math.cos(turn) + np.arange(height)[:, None] * math.sin(turn)
    bent = along * (2 * math.pi / rng.uniform(20, 70))
    bent = bent[..., None] + piece / rng.uniform(9, 24)
    return _lit(rng, Image.fromarray(((np.sin(bent) + 1) * 110 + 15).astype(np.uint8)), 0.6)


def _cells(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """A mosaic: every pixel has the colour of the nearest of some points."""
    count = rng.randint(18, 60)
    numbers = np.random.default_rng(rng.getrandbits(32))
    points = numbers.random((count, 2)) * (width, height)
    x = (np.arange(width)[:, None] - points[:, 0]) ** 2
    y = (np.arange(height)[:, None] - points[:, 1]) ** 2
    nearest = (y[:, None] + x[None]).argmin(-1)
    colours = numbers.integers(30, 226, 3) + numbers.integers(-50, 51, (count, 3))
    return Image.fromarray(colours.clip(0, 255).astype(np.uint8)[nearest])


def _streaks(rng: random.Random, split: Split, width: int, height: int) -> Image.Image:
    """Long and thin, as in wood, fur or grass."""
    coarse = _piece(rng, _static(), max(4, width // rng.randint(10, 30)), height)
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        image = image.resize((height, width)).transpose(Image.Transpose.ROTATE_90)
    return _lit(rng, image, 0.6)


def _piece(rng: random.Random, sheet: Image.Image, width: int, height: int) -> Image.Image:
    """Somewhere out of it, sometimes enlarged."""
    scale = min(rng.choice((1.0, 1.0, rng.uniform(0.4, 1.0))), SIDE / max(width, height))
    wide, high = width * scale, height * scale
    left, top = rng.uniform(0, max(SIDE - wide, 0)), rng.uniform(0, max(SIDE - high, 0))
    if scale == 1.0:
        return sheet.crop((round(left), round(top), round(left) + width, round(top) + height))
    box = (left, top, min(left + wide, SIDE), min(top + high, SIDE))
    return sheet.resize((width, height), Image.Resampling.BILINEAR, box)


def _lit(rng: random.Random, image: Image.Image, most: float) -> Image.Image:
    """With other contrast and lightness of every channel, by up to ``most``, and some swapped."""
    bands = list(image.split())
    if rng.random() < most:
        rng.shuffle(bands)
    shared, shift = rng.uniform(1 - most, 1 + most / 2), rng.uniform(-90, 90) * most
    for at, band in enumerate(bands):
        gain = shared * rng.uniform(1 - most / 3, 1 + most / 3)
        middle = 128 + shift + rng.uniform(-60, 60) * most
        bands[at] = band.point(((LEVELS * gain) + middle).clip(0, 255).astype(np.uint8).tolist())
    return Image.merge("RGB", bands)


LEVELS = np.arange(256, dtype=np.float32) - 128


@cache
def _photos(learned: bool) -> tuple[Image.Image, ...]:
    side = "learned/" if learned else "kept/"
    with zipfile.ZipFile(gathered(SOURCE)) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(side))
        return tuple(Image.open(io.BytesIO(archive.read(n))).convert("RGB") for n in names)


@cache
def _static() -> Image.Image:
    numbers = np.random.default_rng(19)
    return Image.fromarray(numbers.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


@cache
def _sheets(learned: bool) -> tuple[Image.Image, ...]:
    """The steepest (smoothest) ones last."""
    numbers = np.random.default_rng(23 if learned else 29)
    slopes = []
    for at in range(SHEETS):
        low, high = SLOPES[learned][at % len(SLOPES[learned])]
        slopes.append(numbers.uniform(low, high))
    return tuple(_sheet(numbers, slope) for slope in sorted(slopes))


def _sheet(numbers: np.random.Generator, slope: float) -> Image.Image:
    """Three channels, more or less alike, of mean 128."""
    rate = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    rate[0, 0] = np.inf
    white = numbers.normal(size=(4, SIDE, SIDE))
    waves = np.fft.irfft2(np.fft.rfft2(white) * rate**-slope, (SIDE, SIDE))
    waves /= waves.std(axis=(1, 2), keepdims=True)
    shared = numbers.uniform(0, 0.95)  # how much the channels have in common
    mixed = waves[0] * shared + waves[1:] * math.sqrt(1 - shared**2)
    pixels = 128 + mixed * numbers.uniform(25, 62)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())


Kind = Callable[[random.Random, Split, int, int], Image.Image]
LEARNED: dict[Kind, int] = {photo: 9, noise: 8, _white: 1, _marble: 2}  # and how often
KEPT: dict[Kind, int] = {photo: 2, noise: 2, _cells: 1, _streaks: 1}
