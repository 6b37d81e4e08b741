"""Sounds, and questions about them: spoken digits and words, tones, beeps, and a sound that comes
together with a picture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.demo.recipe import sound_wordings as ways
from models.demo.recipe import together_wordings as both
from models.demo.recipe import tones
from models.demo.recipe.canvas import COLOURS, SHAPES, an
from models.demo.recipe.digits import digit
from models.demo.recipe.sample import RATE, Picture, Sample, Sound, Split, Turn
from models.demo.recipe.scene_questions import ask_colour, ask_shape
from models.demo.recipe.scenes import scattered
from models.demo.recipe.tones import Wave
from models.demo.recipe.voices import DIGITS, WORDS, levelled, say, with_noise, with_silence

ANY_DIGIT, ANY_WORD = frozenset(DIGITS), frozenset(WORDS)
LEVELS, WAYS = frozenset({"high", "low"}), frozenset({"rises", "falls"})
YES_OR_NO = frozenset({"yes", "no"})
MOST_BEEPS = 4
SHORTEST = round(0.3 * RATE)  # samples of a sound


def recorded(rng: random.Random, wave: Wave) -> Sound:
    """One in five begins and ends with the sound itself."""
    bare = np.pad(wave, (0, max(0, SHORTEST - len(wave))))
    around = bare if rng.random() < 0.2 else with_silence(rng, wave)
    return Sound(levelled(rng, with_noise(rng, around)))


def _some(rng: random.Random, turns: int, first: Turn, others: Sequence[Turn]) -> tuple[Turn, ...]:
    """The first and as many of the others as there may be, in any order."""
    asked = [first, *rng.sample(others, min(turns - 1, len(others)))]
    rng.shuffle(asked)
    return tuple(asked)


def _yes_no(task: str, question: str, right: bool, truth: str) -> Turn:
    word = "yes" if right else "no"
    return Turn(task, question, f"{word.capitalize()}, {truth}.", (word,), YES_OR_NO)


def _kind(rng: random.Random, split: Split, kind: str) -> Turn:
    answer = f"It is a {kind}."
    return Turn(
        "sound kind", ways.KIND.ask(rng, split), answer, (kind,), frozenset({"voice", "tone"})
    )


def _is_said(rng: random.Random, split: Split, word: str, every: Sequence[str]) -> Turn:
    named = word if rng.random() < 0.5 else rng.choice(every)
    question = ways.IS_SAID.ask(rng, split, word=named)
    return _yes_no("speech check", question, named == word, f"the voice says {word}")


def spoken_digit(rng: random.Random, split: Split, turns: int) -> Sample:
    """Somebody says zero to nine. Other turns: whether it is a given one, whether it is a voice."""
    word = rng.choice(DIGITS)
    sound = Sound(say(rng, split, word))
    question = ways.DIGIT.ask(rng, split)
    first = Turn("spoken digit", question, f"The voice says {word}.", (word,), ANY_DIGIT)
    others = [_is_said(rng, split, word, DIGITS), _kind(rng, split, "voice")]
    return Sample((sound,), _some(rng, turns, first, others))


def spoken_word(rng: random.Random, split: Split, turns: int) -> Sample:
    """Somebody says a word. Whether it is a given one is not asked of yes and no themselves."""
    word = rng.choice(WORDS)
    sound = Sound(say(rng, split, word))
    question = ways.WORD.ask(rng, split)
    first = Turn("spoken word", question, f"The voice says {word}.", (word,), ANY_WORD)
    others = [_kind(rng, split, "voice")]
    if word not in YES_OR_NO:
        others.append(_is_said(rng, split, word, [w for w in WORDS if w not in YES_OR_NO]))
    return Sample((sound,), _some(rng, turns, first, others))


def _steady(rng: random.Random, split: Split) -> tuple[Sound, str]:
    """A tone, and whether it is high or low."""
    level, bounds = rng.choice((("high", tones.HIGH), ("low", tones.LOW)))
    return recorded(rng, tones.steady(rng, split, tones.between(rng, bounds))), level


def steady_tone(rng: random.Random, split: Split, turns: int) -> Sample:
    """A tone that is high or low."""
    sound, level = _steady(rng, split)
    truth = f"the tone is {level}"
    first = Turn("tone", ways.TONE.ask(rng, split), f"The tone is {level}.", (level,), LEVELS)
    named = rng.choice(("high", "low"))
    check = _yes_no("tone check", ways.IS_TONE.ask(rng, split, level=named), named == level, truth)
    return Sample((sound,), _some(rng, turns, first, [check, _kind(rng, split, "tone")]))


def beeps(rng: random.Random, split: Split, turns: int) -> Sample:
    """One to four beeps, to be counted."""
    count = rng.randint(1, MOST_BEEPS)
    sound = recorded(rng, tones.row(rng, split, count))
    number = DIGITS[count]
    truth = "there is one beep" if count == 1 else f"there are {number} beeps"
    answer = f"{truth.capitalize()}."
    first = Turn("beeps", ways.BEEPS.ask(rng, split), answer, (number,), ANY_DIGIT)
    named = number if count > 1 and rng.random() < 0.5 else DIGITS[rng.randint(2, MOST_BEEPS)]
    question = ways.ARE_BEEPS.ask(rng, split, number=named)
    check = _yes_no("beeps check", question, named == number, truth)
    return Sample((sound,), _some(rng, turns, first, [check]))


def glide(rng: random.Random, split: Split, turns: int) -> Sample:
    """A tone that rises or falls."""
    rises = rng.random() < 0.5
    sound = recorded(rng, tones.glide(rng, split, rises))
    way = "rises" if rises else "falls"
    first = Turn("glide", ways.GLIDE.ask(rng, split), f"The tone {way}.", (way,), WAYS)
    named = rng.random() < 0.5
    words = ("rise", "rising", "up") if named else ("fall", "falling", "down")
    names = dict(zip(("rise", "rising", "up"), words, strict=True))
    question = ways.IS_GLIDE.ask(rng, split, **names)
    check = _yes_no("glide check", question, named == rises, f"the tone {way}")
    return Sample((sound,), _some(rng, turns, first, [check]))


def tone(rng: random.Random, split: Split, turns: int) -> Sample:
    """What is heard without words: a steady tone, beeps or a glide, each a task of its own."""
    (maker,) = rng.choices((steady_tone, beeps, glide), (3, 4, 3))
    return maker(rng, split, turns)


@dataclass(frozen=True, eq=False)
class Part:
    """A picture or a sound that is to come with the other."""

    medium: Picture | Sound
    clause: str  # that asks about it
    truth: str  # of it, as half a sentence
    word: str  # of the truth that decides
    alone: Turn  # about it only


def _shape_seen(rng: random.Random, split: Split) -> Part:
    shape, colour = rng.choice(SHAPES), rng.choice(COLOURS)
    picture, things = scattered(rng, split, [(shape, colour)])
    if rng.random() < 0.3:
        clause, truth = both.SEEN_SHAPE.ask(rng, split), f"it is {an(shape)}"
        return Part(picture, clause, truth, shape, _sure(ask_shape(rng, split, things)))
    clause = both.SEEN_COLOUR.ask(rng, split, thing=rng.choice((shape, "shape")))
    truth = f"the {shape} is {colour}"
    return Part(picture, clause, truth, colour, _sure(ask_colour(rng, split, things)))


def _sure(turn: Turn | None) -> Turn:
    assert turn is not None, "a single thing can always be asked about"
    return turn


def _digit_seen(rng: random.Random, split: Split) -> Part:
    shown = digit(rng, split, 1)
    (picture,), (turn,) = shown.media, shown.turns
    assert isinstance(picture, Picture)
    alone = replace(turn, question=both.PICTURE_DIGIT.ask(rng, split))
    (name,) = turn.truth
    return Part(picture, both.SEEN_DIGIT.ask(rng, split), f"the picture shows {name}", name, alone)


def _voice_heard(rng: random.Random, split: Split, word: str) -> Part:
    kind = "word" if word in WORDS else rng.choice(("digit", "digit", "number"))
    choices = ANY_WORD if word in WORDS else ANY_DIGIT
    question = both.SOUND_SAID.ask(rng, split, kind=kind)
    alone = Turn("", question, f"The voice says {word}.", (word,), choices)
    clause = both.HEARD_SAID.ask(rng, split, kind=kind)
    return Part(Sound(say(rng, split, word)), clause, f"the voice says {word}", word, alone)


def _tone_heard(rng: random.Random, split: Split) -> Part:
    sound, level = _steady(rng, split)
    question = ways.TONE.ask(rng, split)
    alone = Turn("", question, f"The tone is {level}.", (level,), LEVELS)
    return Part(sound, both.HEARD_TONE.ask(rng, split), f"the tone is {level}", level, alone)


def _both(rng: random.Random, split: Split, seen: Part, heard: Part) -> Turn:
    names = {"seen": seen.clause, "Seen": _capital(seen.clause), "heard": heard.clause}
    answer = f"{_capital(seen.truth)} and {heard.truth}."
    choices = seen.alone.choices | heard.alone.choices
    question = both.BOTH.ask(rng, split, **names)
    return Turn("", question, answer, (seen.word, heard.word), choices)


def _same(rng: random.Random, split: Split, seen: Part, heard: Part) -> Turn:
    """Whether the digit that is written is said."""
    truth: tuple[str, ...] = ("yes", seen.word)
    answer = f"Yes, both are {seen.word}."
    if seen.word != heard.word:
        truth = ("no", seen.word, heard.word)
        answer = f"No, {seen.truth} and {heard.truth}."
    return Turn("", both.SAME.ask(rng, split), answer, truth, YES_OR_NO | ANY_DIGIT)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def together(rng: random.Random, split: Split, turns: int) -> Sample:
    """A picture and a sound in one request: both asked about, or one while the other is there."""
    compared = rng.random() < 0.35
    draw = _digit_seen if compared or rng.random() < 0.25 else _shape_seen
    seen = draw(rng, split)
    if compared:
        word = seen.word if rng.random() < 0.5 else rng.choice(DIGITS)
        heard = _voice_heard(rng, split, word)
    elif rng.random() < 0.25:
        heard = _tone_heard(rng, split)
    else:
        heard = _voice_heard(rng, split, rng.choice(DIGITS if rng.random() < 0.6 else WORDS))
    asked = [seen.alone, heard.alone, _both(rng, split, seen, heard)]
    weights = [1, 1, 4]
    if compared:
        asked.append(_same(rng, split, seen, heard))
        weights.append(10)
    (first,) = rng.choices(asked, weights)
    asked.remove(first)
    chosen = [first, *rng.sample(asked, min(turns - 1, len(asked)))]
    media = (seen.medium, heard.medium) if rng.random() < 0.7 else (heard.medium, seen.medium)
    return Sample(media, tuple(replace(turn, task="together") for turn in chosen))
