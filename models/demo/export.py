"""Makes the checkpoint that ships of the weights that a piece of training wrote.

python -m models.demo.export OUT [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from models.demo import network


def main(source: Path, folder: Path = network.FOLDER) -> None:
    file = source / "weights.safetensors"
    if not file.is_file():
        sys.exit(f"{source} holds no weights.safetensors: train first")
    weights = load_file(file)
    tokenizer = network.read_tokenizer()
    missing = set(network.build(tokenizer).state_dict()) - set(weights)
    if missing:
        sys.exit(f"{source} lacks {len(missing)} weights, among them {min(missing)}")
    network.save(weights, tokenizer, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
