"""What was found, as records, and the counting that fills them. Asks nobody, draws nothing."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.record import ROOT, machine
from models.demo.asking import Answer
from models.demo.recipe.sample import Turn, told
from triptych.model import fingerprint, open_model

COMMON = 5  # mistakes that are named


class Run(Struct, frozen=True):
    """What is needed to judge and repeat a result."""

    date: str
    commit: str
    changed_files: int
    command: str
    machine: dict[str, Any]
    checkpoint: str  # its fingerprint
    seeds: str


class Mistake(Struct, frozen=True):
    truth: str
    told: str
    count: int


class Tally(Struct, frozen=True):
    """Of one task and one kind of wordings."""

    count: int
    right: dict[str, int]  # by pattern
    differing: int  # samples whose tokens are not the same in every pattern
    mistakes: list[Mistake] = []

    @property
    def accuracy(self) -> float:
        """In the pattern where it is lowest."""
        return min(self.right.values()) / self.count


class Evaluation(Struct, frozen=True, tag="evaluation"):
    run: Run
    aims: dict[str, float]
    tasks: dict[str, dict[str, Tally]]  # by task and split


class Control(Struct, frozen=True):
    """Of one task: how often it is right, and how often the answer is another one."""

    chance: float
    count: int
    right: int  # with its media
    noise_right: int
    noise_changed: int
    removed_right: int
    removed_changed: int
    removed_asks: int  # for media, as it was taught to
    pairs: int  # the same question about two media with different true answers
    pairs_changed: int
    pairs_right: int  # both answers


class Controls(Struct, frozen=True, tag="controls"):
    run: Run
    pattern: str
    tasks: dict[str, Control]


class Comparison(Struct, frozen=True, tag="comparison"):
    """Triptych's torch engine beside plain transformers."""

    run: Run
    pattern: str
    count: int
    equal: int  # requests with the same tokens
    logprob_difference: float  # the largest, of tokens that are the same
    tasks: dict[str, int]
    differing: list[str] = []  # seeds


class Heard(Struct, frozen=True):
    """What was understood of one speaker."""

    digits: int
    digits_right: int
    words: int
    words_right: int


class Speakers(Struct, frozen=True, tag="speakers"):
    """Every recording of voices that were kept out of training, one by one."""

    run: Run
    pattern: str
    voices: dict[str, Heard]


Result = Evaluation | Controls | Comparison | Speakers


def right(turns: Sequence[Turn], answers: Sequence[Answer]) -> int:
    return sum(turn.right(answer.text) for turn, answer in zip(turns, answers, strict=True))


def changed(before: Sequence[Answer], after: Sequence[Answer]) -> int:
    return sum(one.ids != other.ids for one, other in zip(before, after, strict=True))


def tally(turns: Sequence[Turn], answers: Mapping[str, Sequence[Answer]]) -> Tally:
    """``answers`` by pattern."""
    rounds = list(answers.values())
    differing = sum(len({answer.ids for answer in same}) > 1 for same in zip(*rounds, strict=True))
    return Tally(
        count=len(turns),
        right={pattern: right(turns, given) for pattern, given in answers.items()},
        differing=differing,
        mistakes=mistakes(turns, rounds[0]),
    )


def by_task(
    name: str, turns: Sequence[Turn], answers: Mapping[str, Sequence[Answer]]
) -> dict[str, Tally]:
    """Of one maker, called ``name``. One that asks about several things has a tally for each."""
    tasks = sorted({turn.task for turn in turns})
    if len(tasks) == 1:
        return {name: tally(turns, answers)}
    places = {task: [at for at, turn in enumerate(turns) if turn.task == task] for task in tasks}
    return {
        task: tally(
            [turns[at] for at in chosen],
            {pattern: [given[at] for at in chosen] for pattern, given in answers.items()},
        )
        for task, chosen in places.items()
    }


def mistakes(turns: Sequence[Turn], answers: Sequence[Answer]) -> list[Mistake]:
    """The most common ones: what was true, and what was told instead (or said, if nothing was)."""
    wrong: Counter[tuple[str, str]] = Counter()
    for turn, answer in zip(turns, answers, strict=True):
        if not turn.right(answer.text):
            said = " ".join(told(answer.text, turn.choices)) or answer.text
            wrong[" ".join(turn.truth), said] += 1
    return [Mistake(*words, count) for words, count in wrong.most_common(COMMON)]


def run(command: str, checkpoint: Path, seeds: str) -> Run:
    changes = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    return Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_git("rev-parse", "HEAD"),
        changed_files=len(changes),
        command=command,
        machine=machine(),
        checkpoint=fingerprint(open_model(checkpoint)),
        seeds=seeds,
    )


def save(result: Result, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def load(file: Path) -> Result:
    result: Result = msgspec.json.decode(file.read_bytes(), type=Result)
    return result


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
