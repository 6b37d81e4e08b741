"""Answers on disk, so that a long evaluation that was stopped goes on where it was.

A line holds the answers to one round of questions. They are found again if checkpoint, pattern and
everything that was sent are the same; a change of Triptych itself is not seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from models.demo.asking import Answer, Question


class Round(Struct, frozen=True, array_like=True):
    checkpoint: str  # its fingerprint
    pattern: str
    asked: str  # digest of the questions
    answers: list[Answer]


class Kept:
    def __init__(self, file: Path | None, checkpoint: str) -> None:
        self._file, self._checkpoint = file, checkpoint
        self._found: dict[tuple[str, str], list[Answer]] = {}
        if file is not None and file.is_file():
            for one in msgspec.json.Decoder(Round).decode_lines(file.read_bytes()):
                if one.checkpoint == checkpoint:
                    self._found[one.pattern, one.asked] = one.answers

    def get(self, pattern: str, asked: Sequence[Question]) -> list[Answer] | None:
        return self._found.get((pattern, _digest(asked)))

    def add(self, pattern: str, asked: Sequence[Question], answers: list[Answer]) -> None:
        if self._file is None:
            return
        one = Round(self._checkpoint, pattern, _digest(asked), answers)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")


def _digest(asked: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for one in asked:
        digest.update(msgspec.msgpack.encode((one.turn.question, one.system, one.files)))
    return digest.hexdigest()
