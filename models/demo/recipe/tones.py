"""Tones: high and low ones, rows of beeps, and tones that rise or fall.

Tests hear timbres that training does not. No noise is added here and no silence put around.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from models.demo.recipe.sample import RATE, Split

Wave = NDArray[np.float32]
Phase = NDArray[np.float64]  # [samples], in turns

LOW, HIGH = (120.0, 350.0), (900.0, 2800.0)  # Hz; between them nobody is asked
TOP = 7500.0  # Hz; no overtone goes beyond


def _overtones(phase: Phase, pitch: float, gains: dict[int, float]) -> Wave:
    wave = np.zeros(len(phase), dtype=np.float32)
    for number, gain in gains.items():
        if number * pitch < TOP:
            turns = (number * phase % 1.0).astype(np.float32)
            wave += np.float32(gain) * np.sin(np.float32(2 * np.pi) * turns)
    return wave


def _sine(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {1: 1.0})


def _triangle(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {1: 1.0, 3: -1 / 9, 5: 1 / 25, 7: -1 / 49})


def _square(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {number: 1 / number for number in (1, 3, 5, 7, 9)})


def _reed(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {1: 1.0, 2: 0.25, 3: 0.4, 4: 0.1})


def _saw(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {number: 1 / number for number in range(1, 8)})


def _organ(phase: Phase, pitch: float) -> Wave:
    return _overtones(phase, pitch, {1: 1.0, 2: 0.45, 4: 0.2})


Timbre = Callable[[Phase, float], Wave]
LEARNED: tuple[Timbre, ...] = (_sine, _sine, _triangle, _square, _reed)
KEPT: tuple[Timbre, ...] = (_saw, _organ)


def timbre(rng: random.Random, split: Split) -> Timbre:
    return rng.choice(LEARNED if split is Split.TRAIN else KEPT)


def between(rng: random.Random, bounds: tuple[float, float]) -> float:
    """A pitch, every interval alike."""
    return math.exp(rng.uniform(*(math.log(bound) for bound in bounds)))


def steady(rng: random.Random, split: Split, pitch: float) -> Wave:
    """One tone of 0.4 to 1.6 s; some tremble by up to 3 %, some die away like a string."""
    time = np.arange(round(rng.uniform(0.4, 1.6) * RATE)) / RATE
    phase = pitch * time
    if rng.random() < 0.25:
        rate, depth = rng.uniform(4, 7), rng.uniform(0.005, 0.03)
        phase = phase + pitch * depth / (2 * np.pi * rate) * np.sin(2 * np.pi * rate * time)
    wave = _soft_ends(timbre(rng, split)(phase, pitch), rng.uniform(0.005, 0.05))
    if rng.random() < 0.3:
        wave = wave * np.exp(-time * rng.uniform(2, 6)).astype(np.float32)
    return wave


def row(rng: random.Random, split: Split, count: int) -> Wave:
    """So many beeps of one kind, 0.1 to 0.3 s each, as far from each other."""
    long, gap = rng.uniform(0.1, 0.3), rng.uniform(0.14, 0.35)
    pitch = between(rng, (220, 2600))
    time = np.arange(round(long * RATE)) / RATE
    beep = _soft_ends(timbre(rng, split)(pitch * time, pitch), 0.008)
    pieces = [beep]
    for _ in range(count - 1):
        pieces += [np.zeros(round(gap * rng.uniform(0.92, 1.1) * RATE), np.float32), beep]
    return np.concatenate(pieces)


def glide(rng: random.Random, split: Split, rises: bool) -> Wave:
    """A tone that goes up or down by 0.8 to 2.5 octaves in 0.4 to 1.6 s."""
    octaves = rng.uniform(0.8, 2.5)
    start = between(rng, (180, 2900 / 2**octaves))
    seconds = rng.uniform(0.4, 1.6)
    time = np.linspace(0, 1, round(seconds * RATE))
    held = rng.choice((0.0, 0.0, rng.uniform(0, 0.25)))  # at either end, of the whole
    way = ((time - held) / (1 - 2 * held)).clip(0, 1)
    pitch = start * 2 ** (octaves * (way if rises else 1 - way))
    phase = np.cumsum(pitch) / RATE
    return _soft_ends(timbre(rng, split)(phase, start * 2**octaves), 0.02)


def _soft_ends(wave: Wave, seconds: float) -> Wave:
    """Without the clicks of a sudden start and stop."""
    count = min(round(seconds * RATE), len(wave) // 2)
    ramp = np.linspace(0, 1, count, dtype=np.float32)
    wave[:count] *= ramp
    wave[len(wave) - count :] *= ramp[::-1]
    return wave
