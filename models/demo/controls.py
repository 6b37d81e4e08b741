"""Does the model look and listen? Noise in the media's place, other media, none at all.

Pure: makes questions and counts; asks nobody.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from models.demo.asking import draw
from models.demo.recipe.sample import Clip, Maker, Media, Picture, Sample, Sound, Split, Turn

LOUDNESS = 0.1  # of noise: root of the mean square, about that of speech
FEW = 10  # samples of one set of choices, too few to count what is common among them
LOOKED_AT = 20  # samples, to see whether all have media
DRAWN_FOR_A_PAIR = 25  # samples at most, until their question comes twice


def needs_media(task: str, maker: Maker) -> bool:
    """Whether it is always asked about media: what is refused is refused with them and without."""
    return all(draw(task, maker, Split.TEST, number).media for number in range(LOOKED_AT))


def noise(media: Media, rng: random.Random) -> Media:
    """Of the same kind and size, and with nothing in it."""
    draws = np.random.default_rng(rng.getrandbits(32))
    match media:
        case Picture(pixels):
            return Picture(draws.integers(0, 256, pixels.shape, np.uint8))
        case Clip(frames, fps):
            return Clip(draws.integers(0, 256, frames.shape, np.uint8), fps)
        case Sound(wave):
            made = draws.normal(0, LOUDNESS, wave.shape).clip(-1, 1)
            return Sound(made.astype(np.float32))


def blinded(task: str, number: int, sample: Sample) -> Sample:
    """The same question with noise for media; always the same noise."""
    rng = random.Random(f"noise:{task}:{number}")
    return replace(sample, media=tuple(noise(one, rng) for one in sample.media))


def pairs(task: str, maker: Maker, split: Split, count: int) -> Iterator[tuple[int, int]]:
    """Numbers of samples that are asked the same, word for word, and whose true answers differ.

    So what is true of the one medium is wrong of the other, and only the media can tell. No sample
    is in two pairs. Fewer pairs than ``count`` come where questions are too many to meet again.
    """
    waiting: dict[tuple[str, str], list[tuple[int, Turn]]] = defaultdict(list)
    found = 0
    for number in range(count * DRAWN_FOR_A_PAIR):
        if found == count:
            return
        sample = draw(task, maker, split, number)
        turn = sample.turns[-1]
        others = waiting[turn.question, sample.system]
        other = next((one for one in others if one[1].truth != turn.truth), None)
        if other is None:
            others.append((number, turn))
            continue
        others.remove(other)
        found += 1
        yield other[0], number


def chance(turns: Sequence[Turn]) -> float:
    """What the best guesser is right in who knows all true answers' frequencies, and no media.

    It always says what is true most often among the questions with the same choices; where these
    are few, it picks one of the choices.
    """
    by_choices: dict[frozenset[str], Counter[tuple[str, ...]]] = defaultdict(Counter)
    for turn in turns:
        by_choices[turn.choices][turn.truth] += 1
    right = 0.0
    for choices, truths in by_choices.items():
        if choices and truths.total() < FEW:
            right += truths.total() / len(choices)
        else:
            right += truths.most_common(1)[0][1]
    return right / len(turns) if turns else 0.0
