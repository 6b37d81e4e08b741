"""``python -m models.demo.evaluate``: how often the model is right, asked over HTTP.

Every question is about held-out media; once in wordings that were learned (``test``), once in such
that were not (``new``). With ``--control`` it looks at what the answers depend on instead, with
``--grounds`` at how they depend on the background, with ``--freeze FOLDER`` it keeps a few samples
for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from models.demo import card, controls, frozen, scores
from models.demo.asking import (
    CHECKPOINT,
    Answer,
    Progress,
    Question,
    ask_all,
    draw,
    question,
    questions,
    serving,
)
from models.demo.kept import Kept
from models.demo.recipe.backgrounds import GROUNDS, on
from models.demo.recipe.chat import MISSING
from models.demo.recipe.parts import FROZEN, PARTS
from models.demo.recipe.sample import Maker, Sample, Split, Turn
from models.demo.recipe.tasks import AIMS, MAKERS, ON_GROUNDS
from models.demo.recipe.words import new_word

PATTERNS = "EPD,E/PD,E/P/D,EP/D"
FREEZE_BYTES = 80_000  # of one question's files, at most
FREEZE_FROM = 8  # pairs of samples, until one is right and small


@dataclass(frozen=True)
class Setting:
    """What is asked about, and whom."""

    makers: dict[str, Maker]
    aims: dict[str, float]
    patterns: tuple[str, ...]
    counts: dict[Split, int]  # samples of each task, in learned wordings and in new ones
    checkpoint: Path
    run: scores.Run  # as it began
    url: str = ""  # of a server that runs; else one is started for each pattern
    save: Path | None = None
    answers: Path | None = None  # that were given before, if it was stopped

    @contextmanager
    def server(self, pattern: str) -> Iterator[str]:
        if self.url:
            yield self.url
            return
        print(f"starting {pattern} ...", flush=True)
        with serving(self.checkpoint, pattern) as url:
            yield url

    def keep(self, result: scores.Result) -> None:
        if self.save is not None:
            scores.save(result, self.save)


def evaluate(setting: Setting) -> scores.Evaluation:
    """Asks all questions in all patterns; what is found is saved after each."""
    parts = [(name, split) for name in setting.makers for split in setting.counts]
    progress = Progress(len(setting.makers) * sum(setting.counts.values()) * len(setting.patterns))
    kept = Kept(setting.answers, setting.run)
    turns: dict[tuple[str, Split], list[Turn]] = {}
    answers: dict[tuple[str, Split], dict[str, list[Answer]]] = {part: {} for part in parts}
    for pattern in setting.patterns:
        with setting.server(pattern) as url:
            for name, split in parts:
                numbers = range(setting.counts[split])
                asked = questions(name, setting.makers[name], split, numbers)
                turns[name, split] = [one.turn for one in asked]
                with progress.over(f"{pattern}  {name}  {split}", len(asked)) as tell:
                    given = kept.get(pattern, asked)
                    if given is None:
                        given = asyncio.run(ask_all(url, asked, tell=tell))
                        kept.add(pattern, asked, given)
                answers[name, split][pattern] = given
        tasks: dict[str, dict[str, scores.Tally]] = {}
        for name, split in parts:
            part = turns[name, split], answers[name, split]
            for task, tally in scores.by_task(_task(name), *part).items():
                tasks.setdefault(task, {})[split] = tally
        aims = {task: aim for task, aim in setting.aims.items() if task in tasks}
        result = scores.Evaluation(kept.run, aims, tasks)
        setting.keep(result)
    return result


def by_ground(setting: Setting) -> scores.Evaluation:
    """In learned wordings, each task on backgrounds of one kind after the other."""
    pattern, count = setting.patterns[0], setting.counts[Split.TEST]
    makers = {name: maker for name, maker in setting.makers.items() if name in ON_GROUNDS}
    progress = Progress(len(makers) * len(GROUNDS) * count)
    tasks: dict[str, dict[str, scores.Tally]] = {}
    with setting.server(pattern) as url:
        for name, maker in makers.items():
            for ground in GROUNDS:
                asked = questions(name, on(ground, maker), Split.TEST, range(count))
                with progress.over(f"{name}  {ground}", count) as tell:
                    given = asyncio.run(ask_all(url, asked, tell=tell))
                tally = scores.tally([one.turn for one in asked], {pattern: given})
                tasks.setdefault(_task(name), {})[ground] = tally
            aims = {task: aim for task, aim in setting.aims.items() if task in tasks}
            setting.keep(result := scores.Evaluation(setting.run, aims, tasks))
    return result


def control(setting: Setting) -> scores.Controls:
    """Tasks that need no media have nothing to control."""
    pattern = setting.patterns[0]
    makers = [task for task, maker in setting.makers.items() if controls.needs_media(task, maker)]
    progress = Progress(len(makers) * 5 * setting.counts[Split.TEST])
    found: dict[str, scores.Control] = {}
    with setting.server(pattern) as url:
        for task in makers:
            found[_task(task)] = _control(setting, url, task, progress)
            setting.keep(result := scores.Controls(setting.run, pattern, found))
    return result


def _control(setting: Setting, url: str, task: str, progress: Progress) -> scores.Control:
    def ask(what: str, asked: Sequence[Question]) -> list[Answer]:
        with progress.over(f"{task}  {what}", len(asked)) as tell:
            return asyncio.run(ask_all(url, asked, tell=tell))

    maker, count = setting.makers[task], setting.counts[Split.TEST]
    samples = [draw(task, maker, Split.TEST, number) for number in range(count)]
    plain = _as_questions(task, samples)
    noisy = _as_questions(
        task, [controls.blinded(task, number, one) for number, one in enumerate(samples)]
    )
    turns = [one.turn for one in plain]
    seen, blind = ask("with its media", plain), ask("noise", noisy)
    alone = ask("without media", [one.without_media() for one in plain])
    pairs = list(controls.pairs(task, maker, Split.TEST, count))
    first, second = (
        questions(task, maker, Split.TEST, numbers)
        for numbers in (zip(*pairs, strict=True) if pairs else ((), ()))
    )
    before, after = ask("one medium", first), ask("another", second)
    both = zip(first, before, second, after, strict=True)
    return scores.Control(
        chance=controls.chance(turns),
        count=count,
        right=scores.right(turns, seen),
        noise_right=scores.right(turns, blind),
        noise_told=scores.names_a_choice(turns, blind),
        noise_changed=scores.changed(seen, blind),
        removed_right=scores.right(turns, alone),
        removed_changed=scores.changed(seen, alone),
        removed_asks=sum(answer.text == MISSING for answer in alone),
        pairs=len(pairs),
        pairs_changed=scores.changed(before, after),
        pairs_right=sum(q.turn.right(a.text) and r.turn.right(b.text) for q, a, r, b in both),
    )


def freeze(setting: Setting, folder: Path) -> None:
    """Two small samples of each task that are answered rightly: asked the same if that can be."""
    kept: list[Question] = []
    with setting.server(setting.patterns[0]) as url:
        for task, maker in setting.makers.items():
            found = controls.pairs(task, maker, Split.TEST, 10 * FREEZE_FROM)
            pairs = [*islice(found, FREEZE_FROM), *((at, at + 1) for at in range(0, 20, 2))]
            for pair in pairs:
                asked = questions(task, maker, Split.TEST, pair)
                if any(sum(len(f.data) for f in one.every_file) > FREEZE_BYTES for one in asked):
                    continue
                answers = asyncio.run(ask_all(url, asked))
                if all(q.turn.right(a.text) for q, a in zip(asked, answers, strict=True)):
                    kept += asked
                    break
            else:
                print(f"{task}: none of {len(pairs)} pairs is right and small", flush=True)
    size = frozen.write(folder, kept)
    print(f"{len(kept)} samples in {folder}: {size / 1e6:.2f} MB")


def _as_questions(task: str, samples: Sequence[Sample]) -> list[Question]:
    return [question(task, number, sample) for number, sample in enumerate(samples)]


def _task(name: str) -> str:
    """What a maker's own questions are called."""
    return name.replace("_", " ")


def _topology(url: str) -> str:
    with urllib.request.urlopen(f"{url}/cluster", timeout=10) as got:
        name: str = json.load(got)["topology"]
        return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.demo.evaluate", description=__doc__)
    parser.add_argument("--pattern", default=PATTERNS, help="of servers to start, with commas")
    parser.add_argument("--count", type=int, default=200, help="samples of each task")
    parser.add_argument("--new-count", type=int, help="in new wordings, if not as many")
    parser.add_argument(
        "--tasks", default="", help="or parts of tasks, with commas; none named: all tasks"
    )
    parser.add_argument("--split", choices=("test", "new"), help="one only; not named: both")
    parser.add_argument("--url", default="", help="of a server that runs, instead of our own")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--answers", type=Path, metavar="FILE.jsonl", help="to go on from")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--control", action="store_true", help="noise, other media, none")
    what.add_argument("--grounds", action="store_true", help="by kind of background")
    what.add_argument("--freeze", type=Path, metavar="FOLDER", help="keep samples for tests")
    return parser


def _setting(given: argparse.Namespace) -> Setting:
    makers = {**MAKERS, "new_word": new_word, **PARTS}
    usual = [*MAKERS, "new_word", *(FROZEN if given.freeze else ())]
    names = given.tasks.split(",") if given.tasks else usual
    if unknown := set(names) - set(makers):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    url = given.url.rstrip("/").removesuffix("/v1")
    counts = _counts(given)
    return Setting(
        makers={name: makers[name] for name in names},
        aims=AIMS,
        patterns=(_topology(url),) if url else tuple(given.pattern.split(",")),
        counts=counts,
        checkpoint=given.checkpoint,
        run=scores.run("models.demo.evaluate", given.checkpoint, _seeds(counts)),
        url=url,
        save=given.save,
        answers=given.answers,
    )


def _counts(given: argparse.Namespace) -> dict[Split, int]:
    new = given.count if given.new_count is None else given.new_count
    counts = {Split.TEST: given.count, Split.NEW: new}
    if given.control or given.freeze or given.grounds:  # these ask in learned wordings alone
        return {Split.TEST: given.count}
    return {Split(given.split): counts[Split(given.split)]} if given.split else counts


def _seeds(counts: Mapping[Split, int]) -> str:
    ranges = ", ".join(f"{split}: numbers from 0 to {count - 1}" for split, count in counts.items())
    return f"random.Random('TASK:NUMBER'); {ranges}"


def main() -> None:
    given = _parser().parse_args()
    setting = _setting(given)
    if given.freeze:
        freeze(setting, given.freeze)
    elif given.grounds:
        print(card.grounds(by_ground(setting)))
    elif given.control:
        print(card.table(control(setting)))
    else:
        print(card.table(evaluate(setting)))


if __name__ == "__main__":
    main()
