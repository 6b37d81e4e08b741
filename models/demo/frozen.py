"""A few held-out samples as files, so that tests need neither the recipe nor its data.

They are no measure of the model: only questions that it answers rightly are kept.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from models.demo.asking import Question
from models.demo.files import MIMES, File
from models.demo.recipe.sample import Turn

INDEX = "samples.json"


class Entry(Struct, frozen=True, omit_defaults=True):
    task: str
    number: int
    question: str
    answer: str
    truth: tuple[str, ...]
    choices: tuple[str, ...] = ()
    system: str = ""
    files: tuple[str, ...] = ()


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
    for at, file in enumerate(one.files):
        names.append(f"{one.task}-{one.number}-{at}.{file.form}")
        (folder / names[-1]).write_bytes(file.data)
    turn = one.turn
    return Entry(
        one.task,
        one.number,
        turn.question,
        turn.answer,
        turn.truth,
        tuple(sorted(turn.choices)),
        one.system,
        tuple(names),
    )


def _question(folder: Path, entry: Entry) -> Question:
    files = tuple(
        File(Path(name).suffix.removeprefix("."), (folder / name).read_bytes())
        for name in entry.files
    )
    choices = frozenset(entry.choices)
    turn = Turn(entry.task, entry.question, entry.answer, entry.truth, choices)
    return Question(entry.task, entry.number, turn, files, entry.system)
