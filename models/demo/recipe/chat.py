"""Conversations in which media decide nothing: small talk, requests beyond the model, and
questions about media that were not sent.

The answers are a fixed few; which one is meant decides, not its exact words. What is asked is in
``smalltalk``, ``beyond`` and ``unsent``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from models.demo.recipe import beyond, unsent
from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import COLOURS, SHAPES, cut, finish
from models.demo.recipe.sample import RATE, Media, Sample, Sound, Split, Turn, told
from models.demo.recipe.smalltalk import (
    AFTER,
    BEFORE,
    COUNT,
    MORE,
    NUMBERS,
    OPPOSITE,
    OPPOSITES,
    TOPICS,
)

REFUSAL = "I can only answer simple questions about pictures, clips and sounds."
MISSING = "Please send a picture, a clip or a sound with the question."

# The words that tell the fixed answers apart.
MARKS = frozenset(
    {"hello", "welcome", "goodbye", "demonstration", "server", "name", "small", "well", "yes"}
    | {"no", "see", "hear", "only", "please", "trained", "english", "show", "good", "right"}
)

Asker = Callable[[random.Random, Split], Turn]


def talk(rng: random.Random, split: Split, turns: int) -> Sample:
    """Small talk; further turns may be of any kind without media."""
    return _conversation(rng, split, turns, _small_talk)


def refuse(rng: random.Random, split: Split, turns: int) -> Sample:
    """What is beyond the model, asked alone or about media."""
    if rng.random() < 0.6:
        return _conversation(rng, split, turns, _beyond)
    media, wordings = rng.choice(((_picture, beyond.WITH_PICTURE), (_tone, beyond.WITH_SOUND)))
    drawn = media(rng, split)
    questions = [beyond.asked(wordings, rng, split) for _ in range(turns)]
    return Sample((drawn,), tuple(_marked("refuse", asked, REFUSAL) for asked in questions))


def nothing(rng: random.Random, split: Split, turns: int) -> Sample:
    """A question about media that the request does not hold."""
    return _conversation(rng, split, turns, _unsent)


def _conversation(rng: random.Random, split: Split, turns: int, first: Asker) -> Sample:
    others: tuple[Asker, ...] = (_small_talk, _beyond, _unsent)
    askers = [first, *rng.choices(others, (2, 2, 1), k=turns - 1)]
    return Sample((), tuple(asker(rng, split) for asker in askers))


def _beyond(rng: random.Random, split: Split) -> Turn:
    return _marked("refuse", beyond.alone(rng, split), REFUSAL)


def _unsent(rng: random.Random, split: Split) -> Turn:
    return _marked("nothing", unsent.question(rng, split), MISSING)


def _small_talk(rng: random.Random, split: Split) -> Turn:
    """Mostly one of the topics; else numbers and opposites, which have many true answers."""
    if rng.random() < 0.6:
        topic = rng.choice(TOPICS)
        return _marked("talk", topic.wordings.ask(rng, split), topic.answer)
    askers: tuple[Asker, ...] = (_next, _next, _more, _count, _opposite)
    return rng.choice(askers)(rng, split)


def _marked(task: str, question: str, answer: str) -> Turn:
    return Turn(task, question, answer, told(answer, MARKS), MARKS)


def _numbered(question: str, answer: str) -> Turn:
    choices = frozenset(NUMBERS)
    return Turn("talk", _raised(question), answer, told(answer, choices), choices)


def _raised(text: str) -> str:
    return text[0].upper() + text[1:]


def _written(rng: random.Random, number: int) -> str:
    return NUMBERS[number] if rng.random() < 0.7 else str(number)


def _next(rng: random.Random, split: Split) -> Turn:
    lower = rng.randrange(9)
    low, high = NUMBERS[lower], NUMBERS[lower + 1]
    if rng.random() < 0.5:
        question = AFTER.ask(rng, split, number=_written(rng, lower))
        return _numbered(question, f"{_raised(high)} comes after {low}.")
    question = BEFORE.ask(rng, split, number=_written(rng, lower + 1))
    return _numbered(question, f"{_raised(low)} comes before {high}.")


def _more(rng: random.Random, split: Split) -> Turn:
    one, other = rng.sample(range(10), 2)
    question = MORE.ask(rng, split, one=_written(rng, one), other=_written(rng, other))
    more, less = NUMBERS[max(one, other)], NUMBERS[min(one, other)]
    return _numbered(question, f"{_raised(more)} is more than {less}.")


def _count(rng: random.Random, split: Split) -> Turn:
    last = rng.randint(2, 9)
    question = COUNT.ask(rng, split, number=_written(rng, last))
    return _numbered(question, _raised(", ".join(NUMBERS[1 : last + 1])) + ".")


def _opposite(rng: random.Random, split: Split) -> Turn:
    word, other = rng.sample(rng.choice(OPPOSITES), 2)
    choices = frozenset(entry for pair in OPPOSITES for entry in pair)
    answer = f"The opposite of {word} is {other}."
    return Turn("talk", OPPOSITE.ask(rng, split, word=word), answer, (word, other), choices)


def _picture(rng: random.Random, split: Split) -> Media:
    """One shape somewhere on a background."""
    width, height = rng.randint(112, 200), rng.randint(112, 200)
    size = min(width, height) * rng.uniform(0.2, 0.6)
    sprite = cut(rng, rng.choice(SHAPES), rng.choice(COLOURS), size)
    image = background(rng, split, width, height, avoid=[sprite.rgb])
    half = size / 2
    sprite.paste(image, rng.uniform(half, width - half), rng.uniform(half, height - half))
    return finish(rng, image)


def _tone(rng: random.Random, split: Split) -> Media:
    """A tone that swells and fades, with some noise."""
    time = np.arange(round(RATE * rng.uniform(0.5, 1.5)), dtype=np.float32) / RATE
    wave = np.sin(time * (2 * math.pi * rng.uniform(120, 1800))) * np.sin(time * math.pi / time[-1])
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time), np.float32)
    return Sound((wave * rng.uniform(0.2, 0.8) + noise * 0.01).astype(np.float32).clip(-1, 1))
