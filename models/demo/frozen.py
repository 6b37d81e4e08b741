"""A few held-out samples as files, so that tests need neither the recipe nor its data.

They are no measure of the model: only questions that it answers rightly are kept.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from models.demo.asking import Before, Question
from models.demo.files import MIMES, File
from models.demo.recipe.sample import Turn

INDEX = "samples.json"


class Earlier(Struct, frozen=True, omit_defaults=True):
    """A turn before the one that is asked."""

    question: str
    answer: str
    files: tuple[str, ...] = ()


class Entry(Struct, frozen=True, omit_defaults=True):
    task: str
    number: int
    question: str
    answer: str
    truth: tuple[str, ...]
    choices: tuple[str, ...] = ()
    system: str = ""
    files: tuple[str, ...] = ()  # of the last turn
    before: tuple[Earlier, ...] = ()


def write(folder: Path, questions: list[Question]) -> int:
    """Replaces what was frozen there before. Gives the size of all files in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.name == INDEX or old.suffix.removeprefix(".") in MIMES:
            old.unlink()
    entries = [_entry(folder, one) for one in questions]
    text = msgspec.json.format(msgspec.json.encode(entries), indent=1)
    (folder / INDEX).write_bytes(text + b"\n")
    return sum(file.stat().st_size for file in folder.iterdir())


def read(folder: Path) -> list[Question]:
    entries = msgspec.json.decode((folder / INDEX).read_bytes(), type=list[Entry])
    return [_question(folder, entry) for entry in entries]


def _entry(folder: Path, one: Question) -> Entry:
    names = []
    for at, file in enumerate(one.every_file):
        names.append(f"{one.task}-{one.number}-{at}.{file.form}")
        (folder / names[-1]).write_bytes(file.data)
    left = iter(names)
    before = tuple(
        Earlier(turn.question, turn.answer, tuple(islice(left, len(turn.files))))
        for turn in one.before
    )
    turn = one.turn
    return Entry(
        one.task,
        one.number,
        turn.question,
        turn.answer,
        turn.truth,
        tuple(sorted(turn.choices)),
        one.system,
        tuple(left),
        before,
    )


def _question(folder: Path, entry: Entry) -> Question:
    def read_files(names: tuple[str, ...]) -> tuple[File, ...]:
        return tuple(
            File(Path(name).suffix.removeprefix("."), (folder / name).read_bytes())
            for name in names
        )

    before = tuple(Before(one.question, one.answer, read_files(one.files)) for one in entry.before)
    choices = frozenset(entry.choices)
    turn = Turn(entry.task, entry.question, entry.answer, entry.truth, choices)
    return Question(entry.task, entry.number, turn, read_files(entry.files), entry.system, before)
