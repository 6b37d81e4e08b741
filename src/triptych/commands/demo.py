"""``triptych demo``: starts a server, asks it about packaged examples, shows answers, stops.

The examples are held-out media with true answers, picked to be shown: the demo model never saw
these renderings nor heard these voices (of the fox, it learned the emoji itself).
``models/demo/examples.py`` makes them. Beside each file lies a thumbnail for the terminal, so that
the demo decodes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from triptych.checkpoint import open_model
from triptych.commands.client import ChatAnswer, MediaInput
from triptych.commands.drawing import Thumbnail, draw_bar, draw_frames, draw_wave
from triptych.commands.launch import check_config, describe_model, resolve, why_meaningless
from triptych.commands.temporary_server import temporary_server
from triptych.commands.terminal import (
    GREEN,
    GREY,
    RED,
    Terminal,
    display_width,
    replace_unencodable,
    side_by_side,
    stdout,
    strip_controls,
    wrap,
    write_stdout,
)
from triptych.config import Config
from triptych.errors import UnsupportedModel
from triptych.messages import MediaKind

NAMES: dict[MediaKind, str] = {"image": "picture", "video": "clip", "audio": "sound"}
MAX_TOKENS = 32
PICTURE, SEVERAL, FRAMES = 28, 18, 6  # columns of a picture, of one of several; frames of a clip
TEXT, GAP = 40, 3  # columns that text needs beside a picture (else it goes below); space between
INDENT = "  "
EXAMPLES = Path(__file__).parents[1] / "assets" / "examples"


class Item(Struct, frozen=True):
    """One picture, clip or sound."""

    kind: MediaKind
    file: str  # name below EXAMPLES
    about: str  # for those who can't see or hear it
    small: Thumbnail

    def medium(self) -> MediaInput:
        return MediaInput(self.kind, str(EXAMPLES / self.file))


class Example(Struct, frozen=True):
    """A question. What decides are the words ``truth``, in their order, among ``choices``."""

    question: str
    truth: tuple[str, ...]
    choices: tuple[str, ...]  # in small letters
    media: tuple[Item, ...]

    def right(self, answer: str) -> bool:
        longest_first = sorted(self.choices, key=len, reverse=True)  # a light is no light bulb
        names = "|".join(map(re.escape, longest_first))
        return tuple(re.findall(rf"\b(?:{names})\b", answer.lower())) == self.truth


def examples() -> tuple[Example, ...]:
    return msgspec.json.decode((EXAMPLES / "examples.json").read_bytes(), type=tuple[Example, ...])


def run(config: Config) -> int:
    named = bool(config.model)
    config = msgspec.structs.replace(config, enable_multimodal=True)
    write_stdout(f"Triptych demo: {config.topology} on this machine, over HTTP.")
    config = resolve(config)
    check_config(config)
    model = open_model(config.model)
    asked = [e for e in examples() if all(item.kind in model.media_ids for item in e.media)]
    if not asked:
        raise UnsupportedModel("this model takes text only: the demo has no example for it")
    replace_unencodable(stdout())
    write_stdout(f"\nmodel     {describe_model(config, model)}")
    terminal, about = Terminal.of(stdout()), why_meaningless(config)
    right = 0
    with temporary_server(config, write_stdout) as client:
        for number, example in enumerate(asked, 1):
            parts = [item.medium().part() for item in example.media]
            answer = client.ask(example.question, parts, MAX_TOKENS)
            right += example.right(answer.answer)
            place = f"{number}/{len(asked)}"
            write_stdout(
                "\n" + "\n".join(draw_example(place, example, answer, terminal, judged=not about))
            )
    result = f"{right} of {len(asked)} answers are right."
    if about:
        result = f"No real model answered ({about}), but every request passed all stages."
    write_stdout("\n" + "\n".join(wrap(result, terminal.width)))
    return 0 if named or about or right == len(asked) else 1


def draw_example(
    number: str, example: Example, answer: ChatAnswer, terminal: Terminal, *, judged: bool = True
) -> Iterator[str]:
    """The lines of an example: media, and beside or below them question, answer and times."""
    room = terminal.width - len(INDENT)
    drawn = _draw_media(example.media, terminal, room)
    beyond = max(map(display_width, drawn), default=-GAP) + GAP  # where words begin beside them
    apart = beyond + TEXT > room
    width = room if apart else room - beyond
    title = [_title(number, example.media, terminal, width), ""]
    words = _describe_media(example.media, terminal, width)
    words += _label("question", example.question, width)
    words += _label("answer", strip_controls(answer.answer), width)
    words += _verdict(example, answer.answer, terminal, width) if judged else []
    words += ["", *draw_bar(answer.timings, terminal, width)]
    lines: Iterable[str] = [*title, *words]
    if drawn:
        lines = (
            [*title, *drawn, "", *words] if apart else side_by_side(drawn, [*title, *words], GAP)
        )
    yield from (f"{INDENT}{line}".rstrip() for line in lines)


def _draw_media(media: Sequence[Item], terminal: Terminal, width: int) -> list[str]:
    """Images in one row, videos and audio below."""
    images = [item.small for item in media if item.kind == "image"]
    most = PICTURE if len(images) < 2 else SEVERAL
    each = min(most, (width + 1) // max(1, len(images)) - 1)  # a column between them
    rows: list[str] = []
    for small in images:
        drawn = draw_frames(small, terminal, each, 1)
        rows = list(side_by_side(rows, drawn, 1)) if rows else drawn
    for item in media:
        below = []
        if item.kind == "video":
            below = draw_frames(item.small, terminal, width, FRAMES)
        elif item.kind == "audio":
            below = draw_wave(item.small, terminal, min(PICTURE, width) if images else width)
        rows += ["", *below] if rows and below else below
    return rows


def _title(number: str, media: Sequence[Item], terminal: Terminal, width: int) -> str:
    names = ", ".join(f"{NAMES[item.kind]} {item.file}" for item in media)
    return terminal.paint(f"{number}  {names}"[:width], GREY)


def _describe_media(media: Sequence[Item], terminal: Terminal, width: int) -> list[str]:
    """Descriptions of media that this terminal cannot show."""
    return [
        line
        for item in media
        if not _draw_media([item], terminal, width)
        for line in _label(NAMES[item.kind], item.about, width)
    ]


def _label(label: str, text: str, width: int) -> list[str]:
    return wrap(f"{label:10}{text.strip()}", width, " " * 10)


def _verdict(example: Example, answer: str, terminal: Terminal, width: int) -> list[str]:
    right = example.right(answer)
    verdict = "right" if right else f"wrong: it is {' '.join(example.truth)}"
    lines = _label("", verdict, width)
    return [terminal.paint(line, GREEN if right else RED) for line in lines]
