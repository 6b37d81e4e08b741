"""Joins the files of weights that a piece of training wrote into the checkpoint that ships.

python -m models.demo.export OUT [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from models.demo import network


def main(source: Path, folder: Path = network.FOLDER) -> None:
    pieces = sorted(source.glob("weights-*.safetensors"))
    if not pieces:
        sys.exit(f"{source} holds no weights-*.safetensors: train first")
    weights = {name: weight for piece in pieces for name, weight in load_file(piece).items()}
    tokenizer = network.read_tokenizer()
    missing = set(network.build(tokenizer).state_dict()) - set(weights)
    if missing:
        sys.exit(f"{source} lacks {len(missing)} weights, among them {min(missing)}")
    network.save(weights, tokenizer, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
