"""Spoken words: a clip of a word by a voice that the split allows, in a room and on a line.

The clips are those of ``data/speech.npz``. ``say`` changes speed, loudness, band, echo and noise
and puts silence around; it computes no spectrum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.demo.recipe.sample import DATA, RATE, Split, gathered
from models.demo.recipe.vocabulary import NUMBERS

SPEECH = DATA / "speech.npz"
DIGITS = NUMBERS
_WORDS = """
    yes no stop go up down left right cat dog bird fish house water happy music
    hello goodbye pencil flower apple window garden monkey
"""
WORDS = tuple(_WORDS.split())

# Words that the model is to say it does not know. None sounds like a known one.
_UNKNOWN = """
    table orange summer winter bottle doctor yellow purple kitchen jacket bridge paper
    mountain river coffee sugar butter market engine ticket hammer silver dinner letter
    camera village picture train school juice bread chair spoon horse rabbit tiger
    elephant computer telephone hospital library banana potato tomato important beautiful
    tomorrow yesterday animal family country question answer problem together machine
    station travel island carpet pocket basket
"""
_UNKNOWN_KEPT = """
    umbrella bicycle chocolate newspaper sandwich holiday blanket cabbage dragon cotton signal
    minute teacher castle beach truck
"""
UNKNOWN = tuple(_UNKNOWN.split())
UNKNOWN_KEPT = tuple(_UNKNOWN_KEPT.split())

Wave = NDArray[np.float32]


def mu_law(wave: Wave) -> NDArray[np.uint8]:
    """A sound within -1 and 1 in 8 bits a sample, finer where it is quiet."""
    level = np.sign(wave) * np.log1p(255 * np.abs(wave)) / np.log(256)
    return np.round((level + 1) * 127.5).astype(np.uint8)


@cache
def _levels() -> Wave:
    """What each of the 256 bytes of ``mu_law`` stands for."""
    level = np.arange(256) / 127.5 - 1
    return (np.sign(level) * (256 ** np.abs(level) - 1) / 255).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Speech:
    waves: NDArray[np.uint8]
    starts: NDArray[np.int64]
    speakers: list[str]  # of every clip
    learned: dict[str, list[int]]  # word to its clips by voices that may be learned from
    kept: dict[str, list[int]]

    def clip(self, number: int) -> Wave:
        return _levels()[self.waves[self.starts[number] : self.starts[number + 1]]]


@cache
def speech(path: Path = SPEECH) -> Speech:
    """Every clip, read once in a process."""
    with np.load(gathered(path)) as data:
        kept = data["kept"]
        words = [str(name) for name in data["words"]]
        sets: tuple[dict[str, list[int]], ...] = ({}, {})
        for clip, (word, voice) in enumerate(zip(data["word"], data["voice"], strict=True)):
            sets[int(kept[voice])].setdefault(words[word], []).append(clip)
        speakers = [str(data["voices"][voice]) for voice in data["voice"]]
        return Speech(data["waves"], data["starts"], speakers, *sets)


def say(rng: random.Random, split: Split, word: str) -> Wave:
    """The word as one of the split's voices says it, 0.5 to 3 s long."""
    store = speech()
    clip = rng.choice((store.learned if split is Split.TRAIN else store.kept)[word])
    wave = store.clip(clip)
    # what is learned from is changed more: few speakers have to stand for many
    slowest, fastest = (0.74, 1.34) if split is Split.TRAIN else (0.88, 1.14)
    wave = _faster(wave, rng.uniform(slowest, fastest))
    if rng.random() < 0.25:
        wave = _echoed(rng, wave)
    wave = with_noise(rng, with_silence(rng, wave))
    if rng.random() < 0.2:
        wave = _telephoned(rng, wave)
    return levelled(rng, wave)


def say_unknown(rng: random.Random, split: Split) -> Wave:
    """A word that the model is not to know; tests have other words, by other voices."""
    return say(rng, split, rng.choice(UNKNOWN if split is Split.TRAIN else UNKNOWN_KEPT))


def with_silence(rng: random.Random, wave: Wave) -> Wave:
    """Some before and after it, so that all is 0.5 to 3 s long (or as long as the sound)."""
    before, after = (round(rng.uniform(0.1, 0.8) * RATE) for _ in range(2))
    after = min(after, max(3 * RATE - before - len(wave), 0))
    return np.pad(wave, (before, max(after, RATE // 2 - before - len(wave))))


def with_noise(rng: random.Random, wave: Wave) -> Wave:
    """Mostly with something in the background, from 28 to 60 dB below the loudest."""
    noise = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.3:
        return wave
    return wave + _background(rng, noise, len(wave)) * np.float32(10 ** rng.uniform(-3, -1.4))


def levelled(rng: random.Random, wave: Wave) -> Wave:
    """Of any loudness that people record at."""
    loudest = 10 ** rng.uniform(-1.1, -0.05)
    return (wave * np.float32(loudest / np.abs(wave).max())).astype(np.float32)


def _faster(wave: Wave, factor: float) -> Wave:
    """Speed and pitch together, as a tape does."""
    places = np.arange(0, len(wave) - 1, factor)
    return np.interp(places, np.arange(len(wave)), wave).astype(np.float32)


def _echoed(rng: random.Random, wave: Wave) -> Wave:
    """With one to three later, quieter copies."""
    copies = [(round(rng.uniform(0.012, 0.12) * RATE), rng.uniform(0.1, 0.4))]
    copies += [(copies[0][0] * n, copies[0][1] / n**2) for n in range(2, rng.randint(2, 4))]
    out = np.pad(wave, (0, copies[-1][0]))
    for delay, gain in copies:
        out[delay : delay + len(wave)] += np.float32(gain) * wave
    return out


def _background(rng: random.Random, noise: np.random.Generator, count: int) -> Wave:
    """White or brownish noise or a mains hum, of about unit level."""
    kind = rng.random()
    if kind < 0.2:
        time = np.arange(count, dtype=np.float32) / RATE
        mains = np.float32(2 * np.pi * rng.choice((50, 60, 100, 120)))
        return np.sin(mains * time) + np.float32(0.4) * np.sin(3 * mains * time)
    white = noise.standard_normal(count, dtype=np.float32)
    if kind < 0.6:
        return white
    width = rng.choice((4, 8, 16))  # a running mean leaves the low frequencies
    summed = np.cumsum(white)
    soft = np.empty_like(white)
    soft[:width] = summed[:width]
    soft[width:] = summed[width:] - summed[:-width]
    return soft / np.float32(width**0.5)


def _telephoned(rng: random.Random, wave: Wave) -> Wave:
    """Only what a narrow line lets through."""
    size = 1 << (len(wave) - 1).bit_length()
    spectrum = np.fft.rfft(wave, size)
    low, high = rng.uniform(80, 350), rng.uniform(3000, 6000)
    bins = np.arange(len(spectrum)) * (RATE / size)
    spectrum[(bins < low) | (bins > high)] = 0
    return np.fft.irfft(spectrum, size)[: len(wave)].astype(np.float32)
