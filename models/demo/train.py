"""Trains the demo model, in pieces: each goes on where the one before it stopped.

    python -m models.demo.train --state STATE --out OUT --seconds 540 --total 1500

``--total`` seconds of all pieces are what the learning rate goes by. Every piece writes its log,
the weights (in files that ``models.demo.export`` joins) and what held-out samples it answers right,
word for word, when the answer so far is given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.demo import network
from models.demo.batch import LENGTH, NOTHING, Batch, Prompt, Room, Seen, Written, cut
from models.demo.padded import Padded
from models.demo.recipe.sample import Sample, Split
from models.demo.recipe.systems import SYSTEMS
from models.demo.recipe.tasks import MAKERS, SHARES, TASKS

PEAK, LAST = 1e-3, 2e-5  # learning rates
WARM_STEPS = 500
FLAT = 0.4  # of the time, before the rate falls
PIECE = 15 << 20  # bytes of a file of weights
TELL_STEPS = 200
ROOM = (384, 416, 40, 96, 2048, 14_336)  # of a batch: see Room
REPLAYED = 600  # batches that are kept on the device: drawing new ones takes longer than a step
KEPT_BATCHES = 14  # of held-out samples, for each split


class Stream(IterableDataset[dict[str, Any]]):
    """Batches without end, drawn by as many processes as there are; each has its own seeds."""

    def __init__(self, shares: Tensor, room: Room, seed: int, split: Split) -> None:
        self._shares, self._room, self._seed, self._split = shares, room, seed, split

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(f"{self._seed} {self._split} {info.id if info else 0}")
        samples = self._samples(rng, Prompt(network.read_tokenizer()))
        batch = Batch(self._room, TASKS)
        for sample, seen, written in samples:
            if batch.full or not batch.add(sample, seen, written):
                yield batch.arrays()
                batch = Batch(self._room, TASKS)
                batch.add(sample, seen, written)

    def _samples(
        self, rng: random.Random, prompt: Prompt
    ) -> Iterator[tuple[Sample, list[Seen], Written]]:
        names = list(MAKERS)
        learning = self._split is Split.TRAIN
        while True:
            name = rng.choices(names, self._shares.tolist())[0]
            sample = MAKERS[name](rng, self._split, rng.choice((1, 3, 4, 5)) if learning else 1)
            if learning and rng.random() < 0.15:
                sample = replace(sample, system=SYSTEMS.ask(rng, self._split))
            seen = [cut(media) for media in sample.media]
            first = bool(seen) and rng.random() < 0.15
            written = prompt.of(sample, seen, first)
            while len(written.ids) > LENGTH and len(sample.turns) > 1:
                sample = replace(sample, turns=sample.turns[:-1])
                written = prompt.of(sample, seen, first)
            yield sample, seen, written


def loader(stream: Stream, workers: int, device: torch.device) -> DataLoader[Any]:
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
    )


def moved(batch: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(array).to(device, non_blocking=True) for name, array in batch.items()
    }


def varied(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other light, some noise, another microphone: what costs nothing on the device."""
    changed = dict(batch)
    for name in ("pictures", "clips"):
        pixels = batch[name].float()
        shape = (len(pixels), *[1] * (pixels.ndim - 1))
        gain = 1 + 0.08 * torch.randn(shape, device=pixels.device).clamp(-2, 2)
        noise = 6 * torch.rand(shape, device=pixels.device) ** 2
        pixels = (pixels - 128) * gain + 128 + 6 * torch.randn(shape, device=pixels.device)
        changed[name] = (pixels + torch.randn_like(pixels) * noise).clamp(0, 255)
    sounds = len(batch["waves"])
    curve = torch.randn(sounds, 1, 6, device=batch["waves"].device) * 0.25
    tilt = F.interpolate(curve, network.MELS, mode="linear", align_corners=True)[:, 0]
    bands = torch.arange(network.MELS, device=tilt.device)
    start = torch.randint(network.MELS, (sounds, 1), device=tilt.device)
    width = torch.randint(-8, 9, (sounds, 1), device=tilt.device)  # half of them lose none
    changed["tilt"] = tilt - 2.0 * ((bands >= start) & (bands < start + width))
    return changed


class Weights:
    """Half-width weights that are computed with, and exact ones that learn."""

    def __init__(self, parts: torch.nn.Module, dtype: torch.dtype) -> None:
        self.exact = {n: p.detach().clone().float() for n, p in parts.named_parameters()}
        parts.to(dtype)
        self.used = dict(parts.named_parameters())
        decayed = [w for n, w in self.exact.items() if w.ndim > 1 and "embed_tokens" not in n]
        kept = [w for n, w in self.exact.items() if w.ndim <= 1 or "embed_tokens" in n]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}]
        device = decayed[0].device
        self.rate = torch.tensor(0.0, device=device)
        cuda = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.98), fused=cuda, capturable=cuda
        )
        for weight in self.exact.values():
            weight.grad = torch.zeros_like(weight)

    def step(self) -> Tensor:
        """Learn from the gradients; gives their norm."""
        exact = list(self.exact.values())
        learned = [n for n, w in self.used.items() if w.grad is not None]  # one embedding has none
        torch._foreach_copy_(
            [self.exact[name].grad for name in learned], [self.used[name].grad for name in learned]
        )
        norm = torch.nn.utils.clip_grad_norm_(exact, 1.0)
        self.optimiser.step()
        self.copy()
        return norm

    @torch.no_grad()
    def copy(self) -> None:
        torch._foreach_copy_(list(self.used.values()), list(self.exact.values()))


class Score:
    """Loss and share of right turns by task, kept on the device until somebody looks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, len(TASKS) + 1, device=device)  # loss, right turns, turns

    def add(self, losses: Tensor, logits: Tensor, batch: dict[str, Tensor]) -> None:
        turn = batch["turn"]
        tasks = torch.where(batch["turn_tasks"] < 0, len(TASKS), batch["turn_tasks"])
        wrong = ((logits.argmax(-1) != batch["want"]) & (batch["want"] >= 0)).float()
        missed = torch.zeros(len(tasks), device=losses.device).index_add_(0, turn, wrong)
        spent = torch.zeros(len(tasks), device=losses.device).index_add_(0, turn, losses)
        self._sums[0].index_add_(0, tasks, spent)
        self._sums[1].index_add_(0, tasks, (missed == 0).float())
        self._sums[2].index_add_(0, tasks, torch.ones_like(missed))

    def take(self) -> dict[str, tuple[float, float, int]]:
        """Loss of a turn, share right, and how many; and begin anew."""
        loss, right, turns = self._sums.tolist()
        self._sums.zero_()
        return {
            task: (loss[i] / turns[i], right[i] / turns[i], int(turns[i]))
            for i, task in enumerate(TASKS)
            if turns[i]
        }


def graded(padded: Padded, batch: dict[str, Tensor], score: Score) -> Tensor:
    """Losses of the answers' tokens; 0 where the batch is not filled."""
    logits = padded(batch).float()
    losses = F.cross_entropy(logits, batch["want"], reduction="none", ignore_index=NOTHING)
    with torch.no_grad():
        score.add(losses.detach(), logits, batch)
    return losses


class Replay:
    """Batches in the order of drawing, and old ones again, at random, while none is new."""

    def __init__(self, batches: Iterator[dict[str, Any]], device: torch.device, seed: int) -> None:
        self._device, self._rng = device, random.Random(seed)
        self._drawn: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=4)
        self._kept: list[dict[str, Tensor]] = []
        self.fresh = 0
        self._open = True
        threading.Thread(target=self._pull, args=(batches,), daemon=True).start()

    def _pull(self, batches: Iterator[dict[str, Any]]) -> None:
        for batch in batches:
            self._drawn.put(batch)
            if not self._open:
                return

    def close(self) -> None:
        """No more are drawn."""
        self._open = False
        while not self._drawn.empty():
            self._drawn.get()

    def next(self) -> dict[str, Tensor]:
        try:
            drawn = self._drawn.get(block=len(self._kept) < 16)
        except queue.Empty:
            return self._rng.choice(self._kept)
        batch = moved(drawn, self._device)
        if len(self._kept) < REPLAYED:
            self._kept.append(batch)
        else:
            self._kept[self.fresh % REPLAYED] = batch
        self.fresh += 1
        return batch


class Step:
    """One step of learning. On a GPU it is recorded once and played back: launching its kernels
    one by one takes longer than computing them."""

    def __init__(self, padded: Padded, weights: Weights, score: Score) -> None:
        self._padded, self._weights, self._score = padded, weights, score
        self._inputs: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.norm = torch.zeros(())

    def __call__(self, batch: dict[str, Any]) -> None:
        device = self._weights.rate.device
        if not self._inputs:
            self._inputs = {n: torch.as_tensor(a).to(device) for n, a in batch.items()}
            for _ in range(3 if device.type == "cuda" else 0):
                self._compute()  # compiles, and makes what a recording may not make
            if device.type == "cuda":
                torch.cuda.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._compute()
        for name, array in batch.items():
            self._inputs[name].copy_(torch.as_tensor(array), non_blocking=True)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
            torch.cuda.current_stream().synchronize()

    def _compute(self) -> None:
        for weight in self._weights.used.values():
            weight.grad = None
        losses = graded(self._padded, varied(self._inputs), self._score)
        (losses.sum() / (self._inputs["want"] >= 0).sum()).backward()
        self.norm = self._weights.step()


def rate_at(progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / WARM_STEPS)
    if progress < FLAT:
        return PEAK * warm
    left = (1 + math.cos(math.pi * min(1.0, (progress - FLAT) / (1 - FLAT)))) / 2
    return (LAST + (PEAK - LAST) * left) * warm


def shift(shares: Tensor, score: dict[str, tuple[float, float, int]]) -> None:
    """More of what still fails: a maker's share grows with the errors of its own task."""
    errors = [1 - score.get(task, (0.0, 1.0, 0))[1] for _, task in SHARES.values()]
    for i, ((base, _), error) in enumerate(zip(SHARES.values(), errors, strict=True)):
        shares[i] = base * (0.25 + 2.2 * min(error, 0.5))


def run(given: argparse.Namespace) -> None:
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    parts = network.build(network.read_tokenizer()).to(device)
    weights = Weights(parts, torch.bfloat16 if device.type == "cuda" else torch.float32)
    padded = Padded(parts, compiled=given.compile)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0}
    shares = torch.tensor([base for base, _ in SHARES.values()]).share_memory_()
    saved = given.state / "state.pt"
    if given.weights:
        for file in given.weights.glob("weights-*.safetensors"):
            for name, weight in load_file(file).items():
                weights.exact[name].copy_(weight)
        weights.copy()
    elif saved.exists():
        found = torch.load(saved, map_location=device, weights_only=True)
        state, score = found["state"], found["score"]
        weights.optimiser.load_state_dict(found["optimiser"])
        for group in weights.optimiser.param_groups:
            group["lr"] = weights.rate
        for name, weight in found["exact"].items():
            weights.exact[name].copy_(weight)
        weights.copy()
        shift(shares, score)
    room = Room(*(max(1, int(n * given.scale)) for n in ROOM))
    given.out.mkdir(parents=True, exist_ok=True)
    given.state.mkdir(parents=True, exist_ok=True)
    with open(given.out / f"log-{state['step']}.jsonl", "w") as log:
        score = _learn(given, device, weights, padded, state, shares, room, log)
        _write(given, weights, state, score)
        for split in (Split.TEST, Split.NEW):
            kept = _examine(given, device, Padded(parts), room, split)
            print(split, {task: f"{right:.3f}/{n}" for task, (_, right, n) in kept.items()})
            print(json.dumps({"split": split, "kept": kept}), file=log)


def _learn(
    given: argparse.Namespace,
    device: torch.device,
    weights: Weights,
    padded: Padded,
    state: dict[str, Any],
    shares: Tensor,
    room: Room,
    log: Any,
) -> dict[str, tuple[float, float, int]]:
    stream = Stream(shares, room, given.seed + state["step"], Split.TRAIN)
    score, last = Score(device), {}
    step = Step(padded, weights, score)
    replay = Replay(iter(loader(stream, given.workers, device)), device, given.seed)
    weights.rate.fill_(0.0)
    step(replay.next())  # records; learns nothing at this rate
    score.take()
    start = told = time.monotonic()
    before = state["seconds"]
    while (passed := time.monotonic() - start) < given.seconds:
        state["seconds"] = before + passed
        weights.rate.fill_(rate_at(state["seconds"] / given.total, state["step"]))
        step(replay.next())
        state["step"] += 1
        if state["step"] % given.tell == 0:
            last = score.take()
            shift(shares, last)
            now = time.monotonic()
            line = {
                "step": state["step"],
                "seconds": round(state["seconds"], 1),
                "step_ms": round(1000 * (now - told) / given.tell, 1),
                "drawn": replay.fresh,
                "norm": round(float(step.norm), 3),
                "tasks": {t: [round(a, 3), round(b, 3), n] for t, (a, b, n) in last.items()},
            }
            told = now
            print(json.dumps(line), file=log, flush=True)
            rights = " ".join(f"{t.replace(' ', '_')}:{b:.2f}" for t, (_, b, _) in last.items())
            times = f"{line['seconds']} s {line['step_ms']} ms {line['drawn']} drawn"
            print(f"{line['step']} {times} {rights}", flush=True)
    replay.close()
    return last


def _write(
    given: argparse.Namespace, weights: Weights, state: dict[str, Any], score: dict[str, Any]
) -> None:
    torch.save(
        {
            "state": state,
            "score": score,
            "exact": weights.exact,
            "optimiser": weights.optimiser.state_dict(),
        },
        given.state / "state.pt",
    )
    piece: dict[str, Tensor] = {}
    number = size = 0
    for name, weight in weights.exact.items():
        half = weight.bfloat16().cpu().contiguous()
        if size + half.nbytes > PIECE:
            save_file(piece, given.out / f"weights-{number}.safetensors")
            piece, size, number = {}, 0, number + 1
        piece[name], size = half, size + half.nbytes
    save_file(piece, given.out / f"weights-{number}.safetensors")


@torch.no_grad()
def _examine(
    given: argparse.Namespace, device: torch.device, padded: Padded, room: Room, split: Split
) -> dict[str, tuple[float, float, int]]:
    shares = torch.ones(len(MAKERS))
    score = Score(device)
    workers = min(given.workers, 7)
    batches = iter(loader(Stream(shares, room, 1, split), workers, device))
    for _ in range(KEPT_BATCHES if device.type == "cuda" else 1):
        graded(padded, moved(next(batches), device), score)
    return score.take()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model for a while.")
    parser.add_argument("--state", type=Path, required=True, help="folder to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--weights", type=Path, help="begin with the weights of this --out")
    parser.add_argument("--seconds", type=float, default=540, help="of this piece")
    parser.add_argument("--total", type=float, default=1500, help="seconds of all pieces")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--scale", type=float, default=1.0, help="of the batch")
    parser.add_argument("--tell", type=int, default=TELL_STEPS, help="steps between lines")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    run(parser.parse_args())


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    np.seterr(all="raise", under="ignore")
    main()
