"""Pictures, clips and sounds that the model does not know, and the answers that say so.

Photographs, textures, emoji that are not on the list, scribbles and empty pictures; noise, music,
animal-like calls, silence and words that are not on the list. Tests have other ones of each. A
thing that a question names and that is not there gets "There is no ..."; an open question gets
"I can't tell what this is."
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from PIL import ImageDraw

from models.demo.recipe import clip_wordings, clips, digits, emoji, sound_wordings, tones, words
from models.demo.recipe import scene_questions as questions
from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import COLOURS, SHAPES, an, finish, shade
from models.demo.recipe.emoji_names import ONE
from models.demo.recipe.sample import RATE, Picture, Sample, Sound, Split, Turn, Wordings
from models.demo.recipe.scene_questions import YES_OR_NO
from models.demo.recipe.scene_wordings import IS_THERE, SHAPE_OF_ONLY
from models.demo.recipe.scenes import measure
from models.demo.recipe.textures import texture
from models.demo.recipe.voices import DIGITS, WORDS, levelled, say, say_unknown, with_silence

Wave = tones.Wave
CANT_TELL = "I can't tell what this is."
NO_VOICE, NO_TONE = "I hear no voice.", "I hear no tone."
NEW_WORD = "I don't know this word."
MARKS = frozenset({"can't tell", "no voice", "no tone", "don't know", "no digit", "no word"})
MARKS |= {"no shape"}


def _said(task: str, question: str, answer: str) -> Turn:
    (mark,) = (mark for mark in MARKS if mark in answer)
    return Turn(task, question, answer, (mark,), MARKS)


# Pictures


def _scribble(rng: random.Random, split: Split) -> Picture:
    """Some crooked lines."""
    width, height = measure(rng)
    rgb = shade(rng, rng.choice(COLOURS))
    image = background(rng, split, width, height, avoid=[rgb])
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 3)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        points = [(x, y)]
        for _ in range(rng.randint(4, 12)):
            x = min(width - 1, max(0, x + rng.gauss(0, width / 5)))
            y = min(height - 1, max(0, y + rng.gauss(0, height / 5)))
            points.append((x, y))
        pen.line(points, rgb, rng.randint(2, 5), joint="curve")
    return finish(rng, image)


def _empty(rng: random.Random, split: Split) -> Picture:
    return finish(rng, background(rng, split, *measure(rng)))


def _open(rng: random.Random, split: Split, task: str) -> Turn:
    return _said(task, emoji.WHAT.ask(rng, split), CANT_TELL)


def _digit(rng: random.Random, split: Split, task: str) -> Turn:
    return _said(task, digits.WHICH.ask(rng, split), "There is no digit.")


def _word(rng: random.Random, split: Split, task: str) -> Turn:
    return _said(task, words.SAYS.ask(rng, split), "There is no word.")


def _shape(rng: random.Random, split: Split, task: str) -> Turn:
    return _said(task, SHAPE_OF_ONLY.ask(rng, split), "There is no shape.")


def _is_emoji(rng: random.Random, split: Split, task: str) -> Turn:
    phrase = rng.choice(list(ONE.values()))
    answer = f"No, it is not {phrase}."
    return Turn(task, emoji.IS_IT.ask(rng, split, name=phrase), answer, ("no",), YES_OR_NO)


def _is_there(rng: random.Random, split: Split, task: str) -> Turn:
    shape = rng.choice(SHAPES)
    question = IS_THERE.ask(rng, split, a_what=an(shape))
    return Turn(task, question, f"No, there isn't {an(shape)}.", ("no",), YES_OR_NO)


def _absent(rng: random.Random, split: Split, task: str) -> Turn:
    ask = rng.choice((questions.ask_absent_count, questions.ask_absent_colour))
    turn = ask(rng, split, ())
    assert turn is not None
    return Turn(task, turn.question, turn.answer, turn.truth, turn.choices)


Asked = Callable[[random.Random, Split, str], Turn]
OF_SCENERY: dict[Asked, int] = {
    _open: 5,
    _absent: 4,
    _word: 1,
    _digit: 1,
    _shape: 1,
    _is_there: 1,
    _is_emoji: 1,
}
HEAR = Wordings(
    (
        "What do you hear?",
        "what do you hear",
        "What can you hear?",
        "What is this sound?",
        "What sound is this?",
        "[Which|What] sound do you hear?",
        "Describe the sound.",
        "What kind of sound is this?",
    ),
    ("Tell me what you hear, please.", "What can be heard in this recording?"),
)
OF_EMOJI: dict[Asked, int] = {_open: 3, _is_emoji: 1}


def _turns(
    rng: random.Random, split: Split, turns: int, asked: dict[Asked, int], task: str
) -> tuple[Turn, ...]:
    """No two with the same answer."""
    found: dict[str, Turn] = {}
    for _ in range(4 * turns):
        if len(found) == turns:
            break
        (ask,) = rng.choices(list(asked), list(asked.values()))
        turn = ask(rng, split, task)
        found.setdefault(turn.answer, turn)
    return tuple(found.values())


def unknown_picture(rng: random.Random, split: Split, turns: int) -> Sample:
    """A picture of nothing that the model knows; seldom a clip."""
    task = "unknown picture"
    kind = rng.random()
    if kind < 0.07:
        return _panned(rng, split, turns, task)
    if kind < 0.4:
        return Sample((emoji.unknown(rng, split),), _turns(rng, split, turns, OF_EMOJI, task))
    if kind < 0.8:
        return scenery(rng, split, turns)
    draw = _empty if kind < 0.9 else _scribble
    return Sample((draw(rng, split),), _turns(rng, split, turns, OF_SCENERY, task))


def scenery(rng: random.Random, split: Split, turns: int) -> Sample:
    """A photograph or a texture, as it is."""
    picture = finish(rng, texture(rng, split, *measure(rng)))
    return Sample((picture,), _turns(rng, split, turns, OF_SCENERY, "unknown picture"))


def _panned(rng: random.Random, split: Split, turns: int, task: str) -> Sample:
    named = clips.absent(rng, split, ())
    named = Turn(task, named.question, named.answer, named.truth, named.choices)
    mover = _said(task, clip_wordings.MOVER.ask(rng, split), CANT_TELL)
    asked = [named, mover]
    rng.shuffle(asked)
    return Sample((clips.panned(rng, split),), tuple(asked[:turns]))


# Sounds


def _seconds(rng: random.Random) -> int:
    return round(rng.uniform(0.5, 1.8) * RATE)


def _static(rng: random.Random) -> Wave:
    """White, pink or brown noise."""
    count = _seconds(rng)
    white = np.random.default_rng(rng.getrandbits(32)).standard_normal(count)
    spectrum = np.fft.rfft(white)
    spectrum[1:] *= np.arange(1, len(spectrum)) ** -rng.choice((0.0, 0.5, 1.0))
    wave = np.fft.irfft(spectrum, count)
    return (wave / np.abs(wave).max()).astype(np.float32)


def _chirps(rng: random.Random) -> Wave:
    """As a bird: short, fast glides with gaps."""
    pieces = []
    for _ in range(rng.randint(3, 9)):
        time = np.linspace(0, 1, round(rng.uniform(0.03, 0.12) * RATE))
        low, high = rng.uniform(1800, 3200), rng.uniform(3300, 6000)
        pitch = low + (high - low) * np.abs(
            np.sin(np.pi * (time * rng.uniform(0.5, 2) + rng.random()))
        )
        wave = np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * np.sin(np.pi * time)
        pieces += [wave, np.zeros(round(rng.uniform(0.02, 0.12) * RATE))]
    return np.concatenate(pieces).astype(np.float32)


def _growl(rng: random.Random) -> Wave:
    """Low and rough, as a large animal or an engine."""
    count = _seconds(rng)
    time = np.arange(count) / RATE
    pitch = rng.uniform(45, 110) * (1 + 0.15 * np.sin(2 * np.pi * rng.uniform(1, 5) * time))
    phase = np.cumsum(pitch) / RATE
    wave = sum(np.sin(2 * np.pi * n * phase) / n ** rng.uniform(0.3, 1) for n in range(1, 20))
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(count)
    rough = 1 + 0.8 * np.sin(2 * np.pi * rng.uniform(18, 40) * time)
    return ((wave + noise * rng.uniform(0.2, 1)) * rough).astype(np.float32)


def _melody(rng: random.Random) -> Wave:
    """Notes of several voices, one chord after another."""
    pieces = []
    base = rng.uniform(110, 330)
    for _ in range(rng.randint(3, 7)):
        time = np.arange(round(rng.uniform(0.12, 0.4) * RATE)) / RATE
        chord = np.zeros(len(time))
        for step in rng.sample((0, 2, 4, 5, 7, 9, 11, 12, 14, 16), rng.randint(2, 4)):
            pitch = base * 2 ** (step / 12)
            chord += sum(np.sin(2 * np.pi * pitch * n * time) / n**2 for n in (1, 2, 3))
        pieces.append(chord * np.exp(-time * rng.uniform(1, 6)))
    return np.concatenate(pieces)[: 2 * RATE].astype(np.float32)


def _clicks(rng: random.Random) -> Wave:
    wave = np.zeros(_seconds(rng), np.float32)
    for _ in range(rng.randint(5, 25)):
        at = rng.randrange(len(wave) - 400)
        wave[at : at + rng.randint(3, 300)] += rng.uniform(-1, 1)
    return wave


def _silence(rng: random.Random) -> Wave:
    """Or nearly."""
    wave = np.random.default_rng(rng.getrandbits(32)).standard_normal(_seconds(rng))
    return (wave * rng.choice((0.0, 1e-4, 1e-3, 3e-3))).astype(np.float32)


def _barks(rng: random.Random) -> Wave:
    """For tests alone: short rough bursts that fall in pitch."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        time = np.linspace(0, 1, round(rng.uniform(0.1, 0.25) * RATE))
        pitch = rng.uniform(300, 700) * (1.4 - 0.8 * time)
        wave = sum(np.sin(2 * np.pi * n * np.cumsum(pitch) / RATE) / n for n in range(1, 8))
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time))
        pieces += [(wave + noise) * np.sin(np.pi * time) ** 0.5]
        pieces += [np.zeros(round(rng.uniform(0.1, 0.35) * RATE))]
    return np.concatenate(pieces).astype(np.float32)


def _rain(rng: random.Random) -> Wave:
    """For tests alone: a hiss with drops in it."""
    hiss = np.random.default_rng(rng.getrandbits(32)).standard_normal(_seconds(rng))
    hiss = np.diff(hiss, prepend=0.0) * 0.2
    for _ in range(rng.randint(20, 60)):
        at = rng.randrange(len(hiss) - 200)
        time = np.arange(rng.randint(60, 200))
        hiss[at : at + len(time)] += np.sin(time * rng.uniform(0.8, 2.4)) * np.exp(-time / 40.0)
    return hiss.astype(np.float32)


def _strummed(rng: random.Random) -> Wave:
    """For tests alone: a chord of plucked strings."""
    count = _seconds(rng)
    wave = np.zeros(count)
    base = rng.uniform(90, 220)
    for number, step in enumerate((0, 7, 12, 16, 19)):
        start = round(number * rng.uniform(0.02, 0.08) * RATE)
        time = np.arange(count - start) / RATE
        for n in range(1, 7):
            fading = np.exp(-time * 2.5 * n) / n
            wave[start:] += np.sin(2 * np.pi * base * 2 ** (step / 12) * n * time) * fading
    return wave.astype(np.float32)


Source = Callable[[random.Random], Wave]
LEARNED: tuple[Source, ...] = (_static, _chirps, _growl, _melody, _clicks, _silence)
KEPT: tuple[Source, ...] = (_barks, _rain, _strummed, _silence)


def _noise(rng: random.Random, split: Split) -> Sound:
    source = rng.choice(LEARNED if split is Split.TRAIN else KEPT)
    wave = source(rng)
    if rng.random() < 0.5:
        wave = with_silence(rng, wave)
    return Sound(wave if source is _silence else levelled(rng, wave))


def _named(wordings: Wordings) -> Wordings:
    """Those that ask for a voice, a word or a digit by that name."""
    names = ("voice", "word", "digit", "said", "spoken")

    def names_it(wording: str) -> bool:
        return any(name in wording for name in names)

    return Wordings(
        [wording for wording in wordings.learned if names_it(wording)],
        [wording for wording in wordings.kept if names_it(wording)],
    )


def unknown_sound(rng: random.Random, split: Split, turns: int) -> Sample:
    """No voice where a word is asked for, no tone, or a word that the model does not know."""
    task, kind = "unknown sound", rng.random()
    spoken = rng.choice((sound_wordings.WORD, sound_wordings.DIGIT))
    toned = rng.choice((sound_wordings.TONE, sound_wordings.BEEPS, sound_wordings.GLIDE))
    if kind < 0.4:
        sound = Sound(say_unknown(rng, split))
        asked = [_said(task, sound_wordings.WORD.ask(rng, split), NEW_WORD)]
    elif kind < 0.85:
        sound = _noise(rng, split)
        asked = [_said(task, _named(spoken).ask(rng, split), NO_VOICE)]
        asked.append(_said(task, HEAR.ask(rng, split), CANT_TELL))
        rng.shuffle(asked)
    elif kind < 0.93:
        sound = Sound(levelled(rng, tones.steady(rng, split, tones.between(rng, (150, 2500)))))
        asked = [_said(task, _named(spoken).ask(rng, split), NO_VOICE)]
    else:
        sound = Sound(say(rng, split, rng.choice((*DIGITS, *WORDS))))
        asked = [_said(task, toned.ask(rng, split), NO_TONE)]
    return Sample((sound,), tuple(asked[:turns]))
