"""Where batches come from: drawn by other processes, changed a little, and shown again.

Drawing takes longer than learning, so that no batch is used once only. Knows nothing of weights.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.demo import network
from models.demo.batch import LENGTH, Batch, Prompt, Room, Seen, Written, cut
from models.demo.recipe.backgrounds import only
from models.demo.recipe.sample import Sample, Split
from models.demo.recipe.systems import SYSTEMS
from models.demo.recipe.tasks import MAKERS, TASKS

REPLAYED = 600  # batches that are kept on the device
ROOM = (352, 400, 56, 128, 1408, 12_288)  # of a batch: see Room


class Stream(IterableDataset[dict[str, Any]]):
    """Batches without end, drawn by as many processes as there are; each has its own seeds."""

    def __init__(
        self, shares: Tensor, room: Room, seed: int, split: Split, ground: str = ""
    ) -> None:
        """``ground``: the kind of every background, if it is to be one kind."""
        self._shares, self._room, self._seed, self._split = shares, room, seed, split
        self._ground = ground

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(f"{self._seed} {self._split} {info.id if info else 0}")
        with only(self._ground) if self._ground else nullcontext():
            yield from self._batches(rng)

    def _batches(self, rng: random.Random) -> Iterator[dict[str, Any]]:
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
            while len(written.ids) > LENGTH and len(sample.turns) > 1 and not sample.sent:
                sample = replace(sample, turns=sample.turns[:-1])
                written = prompt.of(sample, seen, first)
            if len(written.ids) <= LENGTH:
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
    curve = torch.randn(sounds, 1, 6, device=batch["waves"].device) * 0.35
    tilt = F.interpolate(curve, network.MELS, mode="linear", align_corners=True)[:, 0]
    bands = torch.arange(network.MELS, device=tilt.device)
    start = torch.randint(network.MELS, (sounds, 1), device=tilt.device)
    width = torch.randint(-8, 9, (sounds, 1), device=tilt.device)  # half of them lose none
    changed["tilt"] = tilt - 2.0 * ((bands >= start) & (bands < start + width))
    return changed


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
