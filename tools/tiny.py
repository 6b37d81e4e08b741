"""Tiny random checkpoints of every family in stock layout, for tests and benchmarks.

Their answers mean nothing but depend on every part of the request: weights are scaled so that
another picture or another word gives other tokens at once, that the best two tokens lie far apart
compared with rounding noise, and that greedy output varies. ``python -m tools.tiny qwen2_5_vl
DIR`` makes one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tools.tiny_builders import BUILDERS, HIDDEN
from tools.tiny_folder import (
    TOKENIZER_FILES,
    default_folder,
    is_complete_folder,
    tiny_families,
    tokenizer_folder,
)
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from triptych.errors import UnsupportedModel


def make_checkpoint(family: str, folder: Path | str, seed: int = 0) -> Path:
    """Write a tiny checkpoint; the folder appears whole or not at all."""
    if family not in tiny_families():
        raise UnsupportedModel(
            f"there is no tiny '{family}'; there are {', '.join(tiny_families())}"
        )
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_folder(family) / name, making / name)
        tokenizer = Tokenizer.from_file(str(making / "tokenizer.json"))
        tiny = BUILDERS[family](tokenizer)
        silent, vocabulary = _special_ids(making), tokenizer.get_vocab_size()
        _fill(tiny.model, seed, tiny.gains, silent, vocabulary)
        tiny.model.generation_config = GenerationConfig(
            eos_token_id=list(tiny.end_ids), pad_token_id=tiny.end_ids[0], do_sample=False
        )
        with _quiet():
            tiny.model.save_pretrained(making)
        _rename(making / "model.safetensors", tiny.published)
        for name, content in tiny.files.items():
            (making / name).write_text(json.dumps(content, indent=2) + "\n")
        making.chmod(0o755)
        try:
            making.rename(target)
        except OSError:
            if not is_complete_folder(target):
                raise
            # another process was faster and made the same
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _rename(file: Path, published: Mapping[str, str]) -> None:
    """Give weights the names of published checkpoints, which every engine reads."""
    if not published:
        return
    tensors = load_file(file)
    for ours, theirs in published.items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, file, metadata={"format": "pt"})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and its warnings about its own defaults."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def ensure_checkpoint(family: str) -> Path:
    """The default tiny checkpoint, made on first use."""
    folder = default_folder(family)
    return folder if is_complete_folder(folder) else make_checkpoint(family, folder)


def _special_ids(folder: Path) -> list[int]:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return [token["id"] for token in added]


# How strongly a weight acts, by the end of its module's name; 1 keeps the size of what comes in.
# Sharp attention (q, k) lets single tokens decide instead of an average that is alike everywhere;
# much sharper, and rounding noise grows as well.
_GAINS = {
    "q_proj": 1.6,
    "k_proj": 1.6,
    "v_proj": 1.3,
    "o_proj": 1.3,
    "lm_head": 4.0,
    "embed_tokens": math.sqrt(HIDDEN),  # a size of 1 for each value of a row
}


def _fill(
    model: PreTrainedModel,
    seed: int,
    gains: Mapping[str, float],
    silent: list[int],
    vocabulary: int,
) -> None:
    """Random weights from the seed alone, whatever the library's own initialisation does."""
    generator = torch.Generator().manual_seed(seed)
    acting = [*gains.items(), *_GAINS.items()]
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            module, _, kind = name.rpartition(".")
            gain = next((g for end, g in acting if module.endswith(end)), 1.0)
            if weight.ndim > 1:
                weight.normal_(0, gain / math.sqrt(weight[0].numel()), generator=generator)
            elif kind == "weight":  # of a norm
                weight.fill_(gain)
            else:
                weight.normal_(0, 0.1, generator=generator)
        head = model.get_output_embeddings().weight
        head[vocabulary:] = 0  # ids that no token has
        head[silent] *= 0.25  # end and placeholder tokens: possible, but rarely the best


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random checkpoint.")
    parser.add_argument("family", choices=tiny_families())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_checkpoint(given.family, given.folder, given.seed))


if __name__ == "__main__":
    main()
