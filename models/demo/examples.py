"""Makes the packaged examples: held-out media with questions, for ``triptych demo`` and tests.

    python -m models.demo.examples

They are picked: of the held-out samples that have the answer asked for, one that looks well in a
terminal and that the model answers rightly. How often it does is measured elsewhere, on samples
that nobody picked (``models/demo/evaluate.py``). Held out are renderings and voices; the emoji of
the fox itself was learned, in other sizes, places and turns. Tasks, or parts of tasks, in which the
model is right less often than 95 times in 100 are not shown. The shipped files were drawn before
the recipe had textures: drawn anew, others come first, and each ``which`` is to be chosen again.

Each is found by what it is asked about and answered, so that its description stays true of it. Look
at what comes out before it is shipped, and let the model answer it.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.demo.files import file_of
from models.demo.recipe import voices
from models.demo.recipe.sample import Clip, Media, Picture, Sample, Sound, Split
from models.demo.recipe.tasks import MAKERS
from triptych.commands.demo import EXAMPLES, Example, Item
from triptych.commands.drawing import Thumbnail

BORROWED = "recorded"  # a voice that is not ours to license: good for tests, not to ship
TRIES = 200_000  # samples to draw before it is given up
PICTURE, FRAME, FRAMES = 28, 24, 8  # longer side of a picture and of a frame; shown frames
BARS = 76  # of a sound


@dataclass(frozen=True)
class Pick:
    """``about``: words that the sample's own question has, where its answer does not say enough.

    It is asked in the words of ``question``. ``which``: of those that fit, from 0, by looking.
    """

    maker: str
    question: str
    answer: str
    media: tuple[tuple[str, str], ...]  # name of the file without its ending, and description
    about: str = ""
    which: int = 0


PICKS = (
    Pick(
        "colour",
        "What colour is the triangle?",
        "The triangle is brown.",
        (("circles", "a brown triangle, three circles and two stars"),),
    ),
    Pick(
        "emoji",
        "What do you see in the picture?",
        "It is a fox.",
        (("fox", "the emoji of a fox's face"),),
        which=16,
    ),
    Pick(
        "position",
        "Where is the heart, seen from the star?",
        "The heart is left of the star.",
        (("heart", "an orange heart, and to its right a green star"),),
        which=2,
    ),
    Pick(
        "pictures",
        "Which picture has the circle?",
        "The second picture.",
        (("first", "a blue diamond"), ("second", "an orange circle")),
        about="the circle",
        which=13,
    ),
    Pick(
        "motion",
        "Which way does the circle move?",
        "It moves to the right.",
        (("motion", "a purple circle that moves from left to right above a green heart"),),
        about="circle",
        which=4,
    ),
    Pick(
        "order",
        "In which order do the colours come?",
        "Red, then blue, then yellow.",
        (("colours", "a heart that is red, then blue, then yellow"),),
        which=2,
    ),
    Pick(
        "spoken_digit",
        "What number is spoken?",
        "The voice says seven.",
        (("seven", "a voice that says seven"),),
    ),
    Pick(
        "together",
        "What colour is the star and which number do you hear?",
        "The star is blue and the voice says six.",
        (("star", "a blue star"), ("six", "a voice that says six")),
        which=5,
    ),
)


def found(pick: Pick) -> Iterator[Sample]:
    """The held-out samples that a pick asks for, in a fixed order."""
    maker = MAKERS[pick.maker]
    for number in range(TRIES):
        sample = maker(random.Random(f"example:{pick.maker}:{number}"), Split.TEST, 1)
        turn = sample.turns[0]
        if turn.answer == pick.answer and pick.about in turn.question and not sample.system:
            yield sample


def leave_out(voice: str) -> None:
    """Draw from the other held-out voices only."""
    with np.load(voices.SPEECH) as data:
        number = data["voices"].tolist().index(voice)
        clips = set(np.flatnonzero(data["voice"] == number).tolist())
    for heard in voices.speech().kept.values():
        heard[:] = [clip for clip in heard if clip not in clips]


def example(pick: Pick, folder: Path) -> Example:
    """Write the files of a pick below ``folder``, and tell what is to be known of them."""
    sample = next(itertools.islice(found(pick), pick.which, None))
    [turn] = sample.turns
    items = []
    for media, (name, about) in zip(sample.media, pick.media, strict=True):
        file = file_of(media)
        (folder / f"{name}.{file.form}").write_bytes(file.data)
        items.append(Item(file.kind, f"{name}.{file.form}", about, small(media)))
    return Example(pick.question, turn.truth, tuple(sorted(turn.choices)), tuple(items))


def small(media: Media) -> Thumbnail:
    """What a terminal shows of it."""
    match media:
        case Picture(pixels):
            return _frames([pixels], PICTURE)
        case Clip(frames, _):
            chosen = np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)
            return _frames(list(frames[chosen]), FRAME)
        case Sound(wave):
            parts = np.array_split(np.abs(wave), BARS)
            loud = np.sqrt([float(np.mean(part**2)) for part in parts])
            return Thumbnail(wave=tuple(round(float(v), 2) for v in loud / max(loud.max(), 1e-6)))


def _frames(frames: list[NDArray[np.uint8]], longest: int) -> Thumbnail:
    height, width = frames[0].shape[:2]
    scale = longest / max(height, width)
    size = max(2, round(width * scale)), max(2, round(height * scale))
    shrunk = [Image.fromarray(f).resize(size, Image.Resampling.LANCZOS).tobytes() for f in frames]
    return Thumbnail(*size, tuple(shrunk))


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    leave_out(BORROWED)
    examples = [example(pick, folder) for pick in PICKS]
    whole = msgspec.json.format(msgspec.json.encode(examples), indent=1)
    (folder / "examples.json").write_bytes(whole + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the packaged examples.")
    parser.add_argument("--out", type=Path, default=EXAMPLES)
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
