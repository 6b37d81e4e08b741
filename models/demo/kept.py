"""Answers on disk, so that a long evaluation that was stopped goes on where it was.

A line holds the answers to one round of questions, and the code that they were given by. They are
found again if checkpoint, pattern and everything that was sent are the same; Triptych itself may
have changed since, so that whoever uses them must say which code it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from models.demo.asking import Answer, Question
from models.demo.scores import Code, Run


class Round(Struct, frozen=True, array_like=True):
    checkpoint: str  # its fingerprint
    code: Code
    pattern: str
    asked: str  # digest of the questions
    answers: list[Answer]


class Kept:
    def __init__(self, file: Path | None, run: Run) -> None:
        self._file, self._run = file, run
        self._found: dict[tuple[str, str], Round] = {}
        self._used: set[Code] = set()
        if file is not None and file.is_file():
            for one in msgspec.json.Decoder(Round).decode_lines(_whole_lines(file)):
                if one.checkpoint == run.checkpoint:
                    self._found[one.pattern, one.asked] = one

    @property
    def run(self) -> Run:
        """With the other code that answers of this result were given by."""
        return msgspec.structs.replace(self._run, kept=sorted(self._used - {self._run.code}))

    def get(self, pattern: str, asked: Sequence[Question]) -> list[Answer] | None:
        if (one := self._found.get((pattern, _digest(asked)))) is None:
            return None
        self._used.add(one.code)
        return one.answers

    def add(self, pattern: str, asked: Sequence[Question], answers: list[Answer]) -> None:
        if self._file is None:
            return
        one = Round(self._run.checkpoint, self._run.code, pattern, _digest(asked), answers)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")


def _whole_lines(file: Path) -> bytes:
    """Without a last one that was being written when the process died; it goes from the file."""
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    return whole


def _digest(asked: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for one in asked:
        digest.update(
            msgspec.msgpack.encode((one.turn.question, one.system, one.files, one.before))
        )
    return digest.hexdigest()
