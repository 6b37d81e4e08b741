"""Trains the demo model, in pieces: each goes on where the one before it stopped.

    python -m models.demo.train --state STATE --out OUT --wall 1260 --weights shipped

``--total`` seconds of all pieces are what the learning rate goes by (``--wall``: one piece, which
ends so many seconds after its process began); ``--weights`` begins with those of a file, or with
the shipped ones. Every piece writes its log, the weights (a file that ``models.demo.export`` reads)
and, every few minutes, what share of held-out samples it answers right, word for word, when the
answer so far is given. State and weights are saved every minute: a piece that is stopped early
loses no more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.demo import exams, network
from models.demo.batch import Room
from models.demo.learning import PEAK, Found, Score, Step, Weights
from models.demo.padded import Padded
from models.demo.recipe.sample import Split
from models.demo.recipe.tasks import SHARES
from models.demo.stream import ROOM, Replay, Stream, loader

BEGAN = time.monotonic()
LAST = 1e-5  # learning rate at the end
WARM_STEPS = 500
FLAT = 0.3  # of the time, before the rate falls
TELL_STEPS = 200
SAVE_SECONDS = 60.0
EXAM_SECONDS = 240.0  # between two looks at held-out samples


def rate_at(progress: float, step: int, peak: float = PEAK) -> float:
    warm = min(1.0, (step + 1) / WARM_STEPS)
    if progress < FLAT:
        return peak * warm
    left = (1 + math.cos(math.pi * min(1.0, (progress - FLAT) / (1 - FLAT)))) / 2
    return (LAST + (peak - LAST) * left) * warm


def shift(shares: Tensor, score: Found) -> None:
    """More of what still fails: a maker's share grows with the errors of its own task."""
    errors = [1 - score.get(task, (0.0, 1.0, 0))[1] for _, task in SHARES.values()]
    for i, ((base, _), error) in enumerate(zip(SHARES.values(), errors, strict=True)):
        shares[i] = base * (0.2 + 5 * min(error, 0.4))


class Piece:
    """One piece of training: what it needs, and what it goes on from."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._device = torch.device(given.device)
        torch.manual_seed(given.seed)
        torch.set_float32_matmul_precision("high")
        self._parts = network.build(network.read_tokenizer()).to(self._device)
        half = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._weights = Weights(self._parts, half)
        self._step_number, self._seconds = 0, 0.0
        self._found: Found = {}
        self._shares = torch.tensor([base for base, _ in SHARES.values()]).share_memory_()
        self._room = Room.scaled(ROOM, given.scale)
        self._state = given.state / "state.pt"
        given.out.mkdir(parents=True, exist_ok=True)
        given.state.mkdir(parents=True, exist_ok=True)
        if given.weights:
            self._begin_with(given.weights)
        elif self._state.exists():
            self._go_on()

    def run(self) -> None:
        with open(self._given.out / f"log-{self._step_number}.jsonl", "w") as log:
            self._learn(log)
            self._save()
            self._examine(log)
        print("finished", flush=True)

    def _begin_with(self, file: Path) -> None:
        """A file that this wrote, or a whole checkpoint."""
        for name, weight in load_file(file).items():
            self._weights.exact[name.removeprefix("thinker.")].copy_(weight)
        self._weights.copy()

    def _go_on(self) -> None:
        found = torch.load(self._state, map_location=self._device, weights_only=True)
        self._step_number, self._seconds = found["step"], found["seconds"]
        self._found = found["found"]
        self._weights.optimiser.load_state_dict(found["optimiser"])
        for group in self._weights.optimiser.param_groups:
            group["lr"] = self._weights.rate
        for name, weight in found["exact"].items():
            self._weights.exact[name].copy_(weight)
        self._weights.copy()
        shift(self._shares, self._found)

    def _learn(self, log: TextIO) -> None:
        given, device = self._given, self._device
        stream = Stream(self._shares, self._room, given.seed + self._step_number, Split.TRAIN)
        replay = Replay(iter(loader(stream, given.workers, device)), device, given.seed)
        score = Score(device)
        step = Step(Padded(self._parts, compiled=given.compile), self._weights, score)
        step.prepare(replay.next())
        start = told = saved = looked = time.monotonic()
        if given.wall:  # of which making ready took some
            given.seconds = given.total = given.wall - (start - BEGAN)
        print(f"ready after {start - BEGAN:.0f} s, goes on for {given.seconds:.0f} s", flush=True)
        before = self._seconds
        while (now := time.monotonic()) - start < given.seconds:
            self._seconds = before + now - start
            rate = rate_at(self._seconds / given.total, self._step_number, given.peak)
            self._weights.rate.fill_(rate)
            step(replay.next())
            self._step_number += 1
            if self._step_number % given.tell == 0:
                self._found = score.take()
                shift(self._shares, self._found)
                spent = (time.monotonic() - told) / given.tell
                self._tell(log, spent, replay.fresh, float(step.norm))
                told = time.monotonic()
            if now - saved > SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
            if now - looked > EXAM_SECONDS:
                self._examine(log)
                looked = time.monotonic()
        replay.close()

    def _tell(self, log: TextIO, spent: float, drawn: int, norm: float) -> None:
        line = {
            "step": self._step_number,
            "seconds": round(self._seconds, 1),
            "step_ms": round(1000 * spent, 1),
            "drawn": drawn,
            "norm": round(norm, 3),
            "tasks": {t: [round(a, 3), round(b, 3), n] for t, (a, b, n) in self._found.items()},
        }
        print(json.dumps(line), file=log, flush=True)
        rights = " ".join(f"{t.replace(' ', '_')}:{b:.2f}" for t, (_, b, _) in self._found.items())
        times = f"{line['seconds']} s {line['step_ms']} ms {drawn} drawn"
        print(f"{self._step_number} {times} {rights}", flush=True)

    def _save(self) -> None:
        """The state, whole or not at all."""
        state = {
            "step": self._step_number,
            "seconds": self._seconds,
            "found": self._found,
            "exact": self._weights.exact,
            "optimiser": self._weights.optimiser.state_dict(),
        }
        new = self._state.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._state)
        half = {n: w.bfloat16().cpu().contiguous() for n, w in self._weights.exact.items()}
        save_file(half, self._given.out / "weights.new")
        (self._given.out / "weights.new").replace(self._given.out / "weights.safetensors")

    def _examine(self, log: TextIO) -> None:
        if self._given.exams is None:
            return
        for name, found in exams.look(self._given.exams, self._parts, self._device).items():
            told = " ".join(f"{t.replace(' ', '_')}:{b:.3f}/{n}" for t, (_, b, n) in found.items())
            print(f"HELD-OUT {name} at {self._seconds:.0f} s: {told}", flush=True)
            print(
                json.dumps({"held_out": name, "step": self._step_number, "tasks": found}), file=log
            )
        log.flush()


def weights_file(text: str) -> Path:
    return network.FOLDER / "model.safetensors" if text == "shipped" else Path(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model for a while.")
    parser.add_argument("--state", type=Path, required=True, help="folder to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--weights", type=weights_file, help="file to begin with, or: shipped")
    parser.add_argument("--peak", type=float, default=PEAK, help="the highest learning rate")
    parser.add_argument("--exams", type=Path, help="folder of held-out samples to look at")
    parser.add_argument("--wall", type=float, help="end so many seconds after the process began")
    parser.add_argument("--seconds", type=float, default=540, help="of this piece")
    parser.add_argument("--total", type=float, default=1500, help="seconds of all pieces")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--scale", type=float, default=1.0, help="of the batch")
    parser.add_argument("--tell", type=int, default=TELL_STEPS, help="steps between lines")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    Piece(parser.parse_args()).run()


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
