"""Held-out samples, drawn once into files that a training looks at again and again.

    python -m models.demo.exams FOLDER [--batches 8]

``test`` and ``new`` hold samples of all makers, in learned wordings and in new ones; ``plain``,
``pattern`` and ``texture`` those of shapes and emoji, on backgrounds of one kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.demo.batch import Room
from models.demo.learning import Found, Score, graded
from models.demo.padded import Padded
from models.demo.recipe.backgrounds import GROUNDS
from models.demo.recipe.sample import Split
from models.demo.recipe.tasks import MAKERS, ON_GROUNDS
from models.demo.stream import ROOM, Stream, moved

SEED = 1


def streams(room: Room) -> dict[str, Stream]:
    every = torch.ones(len(MAKERS))
    shown = torch.tensor([float(name in ON_GROUNDS) for name in MAKERS])
    plans = {
        "test": Stream(every, room, SEED, Split.TEST),
        "new": Stream(every, room, SEED, Split.NEW),
    }
    return plans | {g: Stream(shown, room, SEED, Split.TEST, g) for g in GROUNDS}


def draw(folder: Path, room: Room, batches: int) -> None:
    """Each file whole or not at all; the first of every kind come first."""
    folder.mkdir(parents=True, exist_ok=True)
    running = {name: iter(stream) for name, stream in streams(room).items()}
    for number in range(batches):
        for name, stream in running.items():
            if name == "test" or number < max(1, batches // 2):
                new = folder / f"{name}-{number}.new"
                with new.open("wb") as file:
                    np.savez(file, **next(stream))
                new.replace(folder / f"{name}-{number}.npz")


@torch.no_grad()
def look(folder: Path, parts: torch.nn.Module, device: torch.device) -> dict[str, Found]:
    """Loss and share of right turns by kind and task, of what is drawn so far."""
    padded = Padded(parts)
    scores: dict[str, Score] = {}
    for file in sorted(folder.glob("*.npz")):
        score = scores.setdefault(file.name.split("-")[0], Score(device))
        graded(padded, _read(file, device), score)
    return {name: score.take() for name, score in scores.items()}


def _read(file: Path, device: torch.device) -> dict[str, Tensor]:
    with np.load(file) as kept:
        return moved({name: kept[name] for name in kept.files}, device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw held-out samples for a training to look at.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of a batch")
    given = parser.parse_args()
    draw(given.folder, Room.scaled(ROOM, given.scale), given.batches)


if __name__ == "__main__":
    main()
