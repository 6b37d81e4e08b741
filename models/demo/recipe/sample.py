"""What the model learns from and is tested on: media, and questions about them with true answers.

A maker draws one sample from a random generator: ``maker(rng, split, turns) -> Sample``. The same
generator state gives the same sample. ``split`` decides what may be used: fonts, voices, digits,
backgrounds and wordings that are kept for ``TEST`` never occur in ``TRAIN``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parents[1] / "data"
RATE = 16_000  # of every sound, in samples a second


class Split(StrEnum):
    TRAIN = "train"
    TEST = "test"  # media that were kept out, asked about in wordings that were learned
    NEW = "new"  # media that were kept out, asked about in wordings that were kept out too


@dataclass(frozen=True, eq=False)
class Picture:
    pixels: NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True, eq=False)
class Clip:
    frames: NDArray[np.uint8]  # [frames, height, width, 3]
    fps: float


@dataclass(frozen=True, eq=False)
class Sound:
    wave: NDArray[np.float32]  # [samples] at RATE, within -1 and 1


Media = Picture | Clip | Sound


@dataclass(frozen=True)
class Turn:
    """A question and its true answer. What decides are the words ``truth``, in their order, among
    those that it is chosen from; an answer in other words is as good. Without choices the words
    in capitals decide."""

    task: str
    question: str
    answer: str
    truth: tuple[str, ...]
    choices: frozenset[str] = frozenset()

    def right(self, answer: str) -> bool:
        return told(answer, self.choices) == self.truth


@dataclass(frozen=True, eq=False)
class Sample:
    media: tuple[Media, ...]
    turns: tuple[Turn, ...]  # of one conversation, all about these media
    system: str = ""
    sent: tuple[int, ...] = ()  # the turn that each medium comes with; empty: all with the first

    def sent_with(self, turn: int) -> list[int]:
        """The numbers of the media that come with a turn."""
        sent = self.sent or (0,) * len(self.media)
        return [number for number, when in enumerate(sent) if when == turn]


Maker = Callable[[random.Random, Split, int], Sample]


def told(answer: str, choices: frozenset[str]) -> tuple[str, ...]:
    """The words (or names of several words) of an answer that were there to choose from."""
    if not choices:
        return tuple(re.findall(r"\b[A-Z]{2,}\b", answer))
    longest_first = sorted(choices, key=lambda name: (-len(name), name))
    names = "|".join(re.escape(name) for name in longest_first)
    return tuple(re.findall(rf"\b(?:{names})\b", answer.lower()))


@dataclass(frozen=True)
class Wordings:
    """Ways to ask. ``{...}`` in them are filled by name; ``[a|b]`` is one of two or more. Some
    learned ones lack an end mark, and some of these a capital, on purpose: so people type."""

    learned: Sequence[str]
    kept: Sequence[str]

    def ask(self, rng: random.Random, split: Split, **names: str) -> str:
        wording = rng.choice(self.kept if split is Split.NEW else self.learned)
        while (found := re.search(r"\[([^\[\]]*)\]", wording)) is not None:
            chosen = rng.choice(found.group(1).split("|"))
            wording = wording[: found.start()] + chosen + wording[found.end() :]
        return wording.format(**names)


def gathered(file: Path) -> Path:
    """A file of the data folder; where it is not there, what makes it is told."""
    if not file.is_file():
        makers = {"speech.npz": "gather_speech", "photos.zip": "gather_photos"}
        by = makers.get(file.name, "gather_pictures")
        raise SystemExit(
            f"models/demo/data/{file.name} is not there: run python -m models.demo.{by}"
        )
    return file
