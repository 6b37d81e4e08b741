"""A contact sheet of what a maker draws: media with questions and answers, and the time it takes.

    python -m models.demo.recipe.show count
    python -m models.demo.recipe.show models.demo.recipe.scenes:count --split test --out sheet.png

A maker is named as in ``tasks.MAKERS``, or by module and function.
"""

from __future__ import annotations

import argparse
import importlib
import random
import textwrap
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from models.demo.recipe.sample import RATE, Clip, Maker, Media, Picture, Sample, Sound, Split

TALL = 132  # of media on the sheet
WIDE = 280  # of a cell at least
LINE = 13
FONT = ImageFont.load_default(11)


def named(name: str) -> Maker:
    """The maker of that name; tasks are loaded only where no module is given."""
    if ":" not in name:
        tasks = importlib.import_module("models.demo.recipe.tasks")
        makers: dict[str, Maker] = tasks.MAKERS
        return makers[name]
    module, function = name.split(":")
    maker: Maker = getattr(importlib.import_module(module), function)
    return maker


def looks(media: Media) -> Image.Image:
    """A picture as it is, a clip as its frames side by side, a sound as its wave."""
    match media:
        case Picture(pixels):
            return _fitted(Image.fromarray(pixels), TALL)
        case Clip(frames, fps):
            strip = [_fitted(Image.fromarray(frame), TALL // 2) for frame in frames]
            return _titled(_row(strip), f"{len(frames)} frames, {fps:g} a second")
        case Sound(wave):
            return _titled(_wave(wave), f"{len(wave) / RATE:.2f} s, peak {np.abs(wave).max():.2f}")


def _fitted(image: Image.Image, height: int) -> Image.Image:
    return image.resize((max(1, round(image.width * height / image.height)), height))


def _row(images: list[Image.Image]) -> Image.Image:
    width = sum(image.width + 3 for image in images)
    row = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        row.paste(image, (left, 0))
        left += image.width + 3
    return row


def _titled(image: Image.Image, title: str) -> Image.Image:
    whole = Image.new("RGB", (image.width, image.height + LINE), "white")
    whole.paste(image, (0, LINE))
    ImageDraw.Draw(whole).text((2, 0), title, fill="grey", font=FONT)
    return whole


def _wave(wave: np.ndarray) -> Image.Image:
    image = Image.new("RGB", (200, TALL // 2), "white")
    pen, middle = ImageDraw.Draw(image), TALL / 4
    for x, part in enumerate(np.array_split(wave, image.width)):
        if part.size:
            low, high = float(part.min()), float(part.max())
            pen.line((x, middle - high * middle, x, middle - low * middle), fill="navy")
    return image


def cell(sample: Sample) -> Image.Image:
    """One sample: its media in a row, then what is asked and answered."""
    shown = _row([looks(media) for media in sample.media]) if sample.media else None
    width = max(WIDE, shown.width if shown else 0)
    lines: list[tuple[str, str]] = []
    if sample.system:
        lines += [("grey", line) for line in textwrap.wrap(sample.system, width // 6)]
    for turn in sample.turns:
        lines += [("black", line) for line in textwrap.wrap(f"Q {turn.question}", width // 6)]
        answer = f"A {turn.answer}  [{turn.task}: {' '.join(turn.truth)}]"
        colour = "darkgreen" if turn.right(turn.answer) else "red"
        lines += [(colour, line) for line in textwrap.wrap(answer, width // 6)]
    top = shown.height + 4 if shown else 0
    image = Image.new("RGB", (width, top + LINE * len(lines) + 4), "white")
    if shown:
        image.paste(shown, (0, 0))
    pen = ImageDraw.Draw(image)
    for number, (colour, line) in enumerate(lines):
        pen.text((2, top + number * LINE), line, fill=colour, font=FONT)
    return image


def sheet(samples: list[Sample], columns: int) -> Image.Image:
    cells = [cell(sample) for sample in samples]
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    wide = max(image.width for image in cells) + 8
    whole = Image.new(
        "RGB",
        (wide * columns, sum(max(image.height for image in row) + 8 for row in rows)),
        "lightgrey",
    )
    top = 4
    for row in rows:
        for column, image in enumerate(row):
            whole.paste(image, (column * wide + 4, top))
        top += max(image.height for image in row) + 8
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a contact sheet of a maker's samples.")
    parser.add_argument("maker", help="a name of tasks.MAKERS, or module:function")
    parser.add_argument("--split", type=Split, default=Split.TRAIN, choices=list(Split))
    parser.add_argument("--turns", type=int, default=1, help="questions about the same media")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    options = parser.parse_args()
    maker = named(options.maker)
    rng = random.Random(options.seed)
    samples = [maker(rng, options.split, options.turns) for _ in range(options.count)]
    sheet(samples, options.columns).save(options.out)
    begun = time.process_time()  # the first samples have loaded what makers keep
    for _ in range(200):
        maker(rng, options.split, options.turns)
    spent = (time.process_time() - begun) / 200
    wrong = sum(not turn.right(turn.answer) for one in samples for turn in one.turns)
    print(f"{options.out}: {len(samples)} samples, {spent * 1000:.2f} ms of CPU each")
    if wrong:
        raise SystemExit(f"{wrong} answers are not right by their own truth")


if __name__ == "__main__":
    main()
