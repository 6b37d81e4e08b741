"""Several media: a picture, a clip and a sound in one request, and new media in a later turn.

In a later turn the question is about the media that came with it, not about those before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.demo.recipe import clips, digits, emoji, scenes, sounds, words
from models.demo.recipe import together_wordings as both
from models.demo.recipe.canvas import COLOURS, SHAPES
from models.demo.recipe.sample import RATE, Maker, Media, Sample, Sound, Split, Turn, Wordings
from models.demo.recipe.scenes import scattered
from models.demo.recipe.voices import DIGITS, WORDS, say

LONGEST = round(1.6 * RATE)  # of a sound beside other media

SEEN = Wordings(
    (
        "[what|which] [colour|color] is the shape in the [picture|image]",
        "[what|which] [colour|color] does the shape in the [picture|image] have",
        "what is the [colour|color] of the shape in the [picture|image]",
        "in the [picture|image], what [colour|color] is the shape",
        "[what|which] [colour|color] is the object in the [picture|image]",
    ),
    (
        "what [colour|color] has the shape in the picture",
        "which [colour|color] is the figure in the image",
    ),
)
MOVES = Wordings(
    (
        "which way does the shape in the [clip|video] [move|go]",
        "where does the shape in the [clip|video] [move|go]",
        "in which direction does the shape in the [clip|video] [move|go]",
        "in the [clip|video], which way does the shape [move|go]",
        "which way does the object in the [clip|video] [move|go]",
    ),
    (
        "what direction does the shape in the clip move in",
        "which way is the object in the video going",
    ),
)


@dataclass(frozen=True, eq=False)
class Part:
    """One medium of several."""

    medium: Media
    clause: str  # that asks about it
    truth: str  # of it, as a part of a sentence
    word: str  # of the truth that decides
    choices: frozenset[str]


def _seen(rng: random.Random, split: Split) -> Part:
    shape, colour = rng.choice(SHAPES), rng.choice(COLOURS)
    picture, _ = scattered(rng, split, [(shape, colour)])
    truth = f"the {shape} in the picture is {colour}"
    return Part(picture, SEEN.ask(rng, split), truth, colour, frozenset(COLOURS))


def _moving(rng: random.Random, split: Split) -> Part:
    way = ""
    while not way:
        clip, things, way = clips.moving(rng, split)
        way = way if len(things) == 1 else ""
    truth = f"the {things[0].shape} in the clip moves {clips.to(way)}"
    return Part(clip, MOVES.ask(rng, split), truth, way, frozenset(clips.WAYS))


def _heard(rng: random.Random, split: Split) -> Part:
    kind, every = rng.choice((("digit", DIGITS), ("word", WORDS)))
    # what another part's answer may say is not said here
    word = rng.choice([word for word in every if word not in clips.WAYS])
    wave = say(rng, split, word)
    while len(wave) > LONGEST:
        wave = say(rng, split, word)
    clause = both.HEARD_SAID.ask(rng, split, kind=kind)
    return Part(
        Sound(wave), clause, f"the voice says {word}", word, frozenset(every) - {*clips.WAYS}
    )


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _asked(parts: Sequence[Part]) -> Turn:
    question = _joined([part.clause for part in parts])
    answer = _joined([part.truth for part in parts])
    choices = frozenset[str]().union(*(part.choices for part in parts))
    return Turn(
        "mixed",
        f"{question[0].upper()}{question[1:]}?",
        f"{answer[0].upper()}{answer[1:]}.",
        tuple(part.word for part in parts),
        choices,
    )


def mixed(rng: random.Random, split: Split, turns: int) -> Sample:
    """A picture, a clip and a sound, or two of them with the clip; one is asked about, or all."""
    parts = [_seen(rng, split), _moving(rng, split), _heard(rng, split)]
    if rng.random() < 0.3:
        parts.remove(rng.choice((parts[0], parts[2])))
    media = [part.medium for part in parts]
    rng.shuffle(media)
    asked = [_asked(parts) if rng.random() < 0.5 else _asked([rng.choice(parts)])]
    for part in rng.sample(parts, len(parts)):
        turn = _asked([part])
        if len(asked) < turns and turn.answer not in {one.answer for one in asked}:
            asked.append(turn)
    return Sample(tuple(media), tuple(asked[:turns]))


SEEN_MAKERS: tuple[Maker, ...] = (
    *(scenes.colour, scenes.shape, scenes.count, scenes.position, scenes.absent),
    *(digits.digit, emoji.emoji, words.word),
)
HEARD_MAKERS: tuple[Maker, ...] = (sounds.spoken_digit, sounds.spoken_word, sounds.tone)


def later(rng: random.Random, split: Split, turns: int) -> Sample:
    """Two rounds: media and a question about them, then new media. The last turn is of this task;
    mostly both rounds are of one kind, so that only their order tells them apart."""
    makers = rng.choices((SEEN_MAKERS, HEARD_MAKERS, (clips.motion,)), (6, 3, 1))[0]
    first = rng.choice(makers)
    if rng.random() < 0.3:
        makers = rng.choice((SEEN_MAKERS, HEARD_MAKERS))
    second = first if rng.random() < 0.5 and first in makers else rng.choice(makers)
    each = 2 if turns > 2 else 1
    before, after = first(rng, split, each), second(rng, split, 1)
    last = replace(after.turns[-1], task="later")
    return Sample(
        (*before.media, *after.media),
        (*before.turns, last),
        sent=(0,) * len(before.media) + (len(before.turns),) * len(after.media),
    )
