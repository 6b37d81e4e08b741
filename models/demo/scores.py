"""What was found, as records, and the counting that fills them. Asks nobody, draws nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys
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
from triptych.checkpoint import fingerprint, open_model

COMMON = 5  # mistakes that are named
UNTOLD = ("--answers",)  # flags that say nothing of what is asked


class Code(Struct, frozen=True, order=True):
    """What was run: a commit, and how many tracked files were not as they are there."""

    commit: str
    changed_files: int = 0

    @classmethod
    def now(cls) -> Code:
        changes = _git("status", "--porcelain", "--untracked-files=no").splitlines()
        return cls(_git("rev-parse", "HEAD"), len(changes))


class Run(Struct, frozen=True):
    """What is needed to judge and repeat a result, as it was when the run began."""

    date: str
    commit: str
    changed_files: int
    command: str
    machine: dict[str, Any]
    checkpoint: str  # its fingerprint
    seeds: str
    kept: list[Code] = []  # other code that some of the answers were given by, before

    @property
    def code(self) -> Code:
        return Code(self.commit, self.changed_files)


class Mistake(Struct, frozen=True):
    truth: str
    told: str
    count: int


class Tally(Struct, frozen=True):
    """Of one task and one kind of wordings."""

    count: int
    right: dict[str, int]  # by pattern: the words that decide are the true ones
    verbatim: dict[str, int]  # by pattern: the whole answer is the true sentence
    differing: int  # samples whose tokens are not the same in every pattern
    mistakes: list[Mistake] = []

    @property
    def accuracy(self) -> float:
        """In the pattern where it is lowest."""
        return min(self.right.values()) / self.count

    @property
    def word_for_word(self) -> float:
        """In the pattern where it is lowest."""
        return min(self.verbatim.values()) / self.count


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
    noise_told: int  # answers to noise that name a choice, right or wrong
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


class Agreed(Struct, frozen=True):
    count: int
    equal: int  # requests with the same prompt and the same tokens


class Agreement(Struct, frozen=True, tag="agreement"):
    """Triptych's torch engine beside vLLM."""

    run: Run
    versions: dict[str, str]  # of vLLM and what it runs on
    drawn: Agreed  # held-out requests over all tasks
    samples: Agreed  # those that are frozen for tests
    logprob_difference: float  # the largest, of tokens that are the same


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


Result = Evaluation | Controls | Comparison | Agreement | Speakers


def right(turns: Sequence[Turn], answers: Sequence[Answer]) -> int:
    return sum(turn.right(answer.text) for turn, answer in zip(turns, answers, strict=True))


def verbatim(turns: Sequence[Turn], answers: Sequence[Answer]) -> int:
    return sum(turn.answer == answer.text for turn, answer in zip(turns, answers, strict=True))


def names_a_choice(turns: Sequence[Turn], answers: Sequence[Answer]) -> int:
    both = zip(turns, answers, strict=True)
    return sum(bool(told(answer.text, turn.choices)) for turn, answer in both)


def changed(before: Sequence[Answer], after: Sequence[Answer]) -> int:
    return sum(one.ids != other.ids for one, other in zip(before, after, strict=True))


def tally(turns: Sequence[Turn], answers: Mapping[str, Sequence[Answer]]) -> Tally:
    """``answers`` by pattern."""
    rounds = list(answers.values())
    differing = sum(len({answer.ids for answer in same}) > 1 for same in zip(*rounds, strict=True))
    return Tally(
        count=len(turns),
        right={pattern: right(turns, given) for pattern, given in answers.items()},
        verbatim={pattern: verbatim(turns, given) for pattern, given in answers.items()},
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


def run(module: str, checkpoint: Path, seeds: str) -> Run:
    """Call it before anything else is done: what is committed later was not run."""
    code = Code.now()
    return Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=code.commit,
        changed_files=code.changed_files,
        command=command(module, sys.argv[1:]),
        machine=machine(),
        checkpoint=fingerprint(open_model(checkpoint)),
        seeds=seeds,
    )


def command(module: str, words: Sequence[str]) -> str:
    """What repeats a run from the repository's root. What lies outside of that is left out."""
    told = []
    for flag, value in _flags(words):
        if flag in UNTOLD:
            continue
        if (inside := _inside(value)) is not None:
            told += [word for word in (flag, inside) if word]
    return shlex.join(["python", "-m", module, *told])


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    """Flags with their values, "" where there is none."""
    found: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found.append((flag, value))
        elif found and not found[-1][1]:
            found[-1] = (found[-1][0], word)
        else:
            found.append(("", word))
    return found


def _inside(word: str) -> str | None:
    """A path of the repository as seen from its root, another word as it is; None if outside."""
    if not word.startswith(("/", "~", "..")):
        return word
    path = Path(word).expanduser().resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def save(result: Result, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def load(file: Path) -> Result:
    result: Result = msgspec.json.decode(file.read_bytes(), type=Result)
    return result


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
