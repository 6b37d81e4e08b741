"""Conversations in which media decide nothing: small talk, requests beyond the model, and
questions about media that were not sent.

The answers are a fixed few; which one is meant decides, not its exact words. What is asked is in
``smalltalk``, ``beyond`` and ``unsent``. Where there are media all the same, another maker drew
them, and what that one asks may come after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.demo.recipe import beyond, clips, digits, emoji, scenes, several, sounds, unsent, words
from models.demo.recipe.sample import Maker, Sample, Split, Turn, Wordings, told
from models.demo.recipe.smalltalk import (
    AFTER,
    BEFORE,
    COUNT,
    MORE,
    OPPOSITE,
    OPPOSITES,
    TOPICS,
)
from models.demo.recipe.vocabulary import NUMBERS

REFUSAL = "I can only answer simple questions about pictures, clips and sounds."
MISSING = "Please send a picture, a clip or a sound with the question."

# The words that tell the fixed answers apart.
MARKS = frozenset(
    {"hello", "welcome", "goodbye", "demonstration", "server", "name", "small", "well", "yes"}
    | {"no", "see", "hear", "only", "please", "trained", "english", "show", "good", "right"}
)

Asker = Callable[[random.Random, Split], Turn]


@dataclass(frozen=True)
class Sense:
    """A kind of media: who draws it, and what may be asked of it that has no answer."""

    makers: Sequence[Maker]
    beyond: Wordings
    unsent: Wordings  # questions about media of the other sense


PICTURES = Sense(
    (scenes.colour, scenes.count, several.pictures, digits.digit, emoji.emoji, words.word),
    beyond.WITH_PICTURE,
    unsent.TO_HEAR,
)
CLIPS = Sense((clips.motion, clips.order), beyond.WITH_CLIP, unsent.TO_HEAR)
SOUNDS = Sense(
    (sounds.spoken_digit, sounds.spoken_word, sounds.tone), beyond.WITH_SOUND, unsent.TO_SEE
)
SENSES = (PICTURES, PICTURES, CLIPS, SOUNDS, SOUNDS)


def talk(rng: random.Random, split: Split, turns: int) -> Sample:
    """Small talk, seldom with media; without, further turns may be of any kind."""
    if rng.random() < 0.1:
        return _before_media(rng, split, turns, rng.choice(SENSES), _small_talk(rng, split))
    return _conversation(rng, split, turns, _small_talk)


def refuse(rng: random.Random, split: Split, turns: int) -> Sample:
    """What is beyond the model, asked alone or with media, of these or not."""
    if rng.random() < 0.5:
        return _conversation(rng, split, turns, _beyond)
    sense = rng.choice(SENSES)
    if rng.random() < 0.3:
        return _before_media(rng, split, turns, sense, _beyond(rng, split))
    question = beyond.asked(sense.beyond, rng, split)
    return _before_media(rng, split, turns, sense, _marked("refuse", question, REFUSAL))


def nothing(rng: random.Random, split: Split, turns: int) -> Sample:
    """A question about media that the request does not hold; seldom it holds others."""
    if rng.random() < 0.8:
        return _conversation(rng, split, turns, _unsent)
    sense = rng.choice(SENSES)
    question = unsent.ask(sense.unsent, rng, split)
    return _before_media(rng, split, turns, sense, _marked("nothing", question, MISSING))


def _before_media(
    rng: random.Random, split: Split, turns: int, sense: Sense, first: Turn
) -> Sample:
    """A turn and, where there may be more, what the maker of the media asks. Training has them in
    any order, so that an answer does not depend on its place."""
    drawn = rng.choice(sense.makers)(rng, split, max(1, turns - 1))
    asked = [first, *drawn.turns][:turns]
    if split is Split.TRAIN:
        rng.shuffle(asked)
    return Sample(drawn.media, tuple(asked))


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
