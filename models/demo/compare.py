"""``python -m models.demo.compare``: the same tokens in plain transformers and in Triptych?

Asks a server of its own over HTTP, and transformers itself, questions of all tasks.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from models.demo import card, scores, stock
from models.demo.asking import (
    CHECKPOINT,
    Answer,
    Progress,
    Question,
    ask_all,
    questions,
    seed,
    serving,
)
from models.demo.recipe.sample import Maker, Split
from models.demo.recipe.tasks import MAKERS

PATTERN = "EPD"


def chosen(makers: Mapping[str, Maker], count: int) -> list[Question]:
    """``count`` held-out questions, as many of each task as of the others (or one more)."""
    shares = Counter(name for name, _ in zip(list(makers) * count, range(count), strict=False))
    return [
        one
        for task, share in shares.items()
        for one in questions(task, makers[task], Split.TEST, range(share))
    ]


def compare(checkpoint: Path, asked: Sequence[Question], run: scores.Run) -> scores.Comparison:
    progress = Progress(2 * len(asked))
    with (
        serving(checkpoint, PATTERN) as url,
        progress.over("Triptych", len(asked)) as tell,
    ):
        served = asyncio.run(ask_all(url, asked, tell=tell))
    plain: list[Answer] = []
    with progress.over("transformers", len(asked)) as tell:
        for one, answer in zip(asked, served, strict=True):
            plain.append(stock.answer(checkpoint, one, answer.prompt_ids))
            tell(len(plain))
    return found(asked, served, plain, run)


def found(
    asked: Sequence[Question], served: Sequence[Answer], plain: Sequence[Answer], run: scores.Run
) -> scores.Comparison:
    pairs = list(zip(asked, served, plain, strict=True))
    same = [(ours, theirs) for _, ours, theirs in pairs if ours.ids == theirs.ids]
    return scores.Comparison(
        run=run,
        pattern=PATTERN,
        count=len(asked),
        equal=len(same),
        logprob_difference=max((distance(*both) for both in same), default=0.0),
        tasks=dict(Counter(one.task for one in asked)),
        differing=[
            seed(one.task, one.number) for one, ours, theirs in pairs if ours.ids != theirs.ids
        ],
    )


def distance(one: Answer, other: Answer) -> float:
    """The largest between logprobs of the same tokens."""
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.demo.compare", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="requests, over all tasks")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    seeds = "random.Random('TASK:NUMBER'), numbers from 0"
    run = scores.run("models.demo.compare", given.checkpoint, seeds)
    result = compare(given.checkpoint, chosen(MAKERS, given.count), run)
    print(card.table(result))
    if result.differing:
        print("different: " + ", ".join(result.differing))
    if given.save:
        scores.save(result, given.save)


if __name__ == "__main__":
    main()
