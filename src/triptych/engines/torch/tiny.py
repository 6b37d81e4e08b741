"""Tiny random checkpoints in stock layout: for tests, and for a first run without a download.

Their answers mean nothing, but they depend on every part of the request: weights are scaled so that
another picture or another word gives other tokens at once, that the best two tokens lie far apart
next to rounding noise, and that greedy output wanders. ``python -m triptych.engines.torch.tiny
qwen2_5_vl DIR`` makes one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.utils import logging

from triptych.engines.torch.preprocess import CLIP_MEAN, CLIP_STD
from triptych.engines.torch.tiny_folder import ASSETS, COPIED, default_folder, is_made
from triptych.errors import UnsupportedModel
from triptych.model import packaged

CONTEXT = 4096
LLAVA_SIDE = 112

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}
_IMAGE: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def make(family: str, folder: Path | str, seed: int = 0) -> Path:
    """Write a tiny checkpoint; the folder appears whole or not at all."""
    if family not in ASSETS:
        raise UnsupportedModel(
            f"there is no tiny '{family}'; there are {', '.join(sorted(ASSETS))}"
        )
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name in COPIED:
            shutil.copyfile(packaged(ASSETS[family]) / name, making / name)
        tokenizer = Tokenizer.from_file(str(making / "tokenizer.json"))
        model, processor, ends = (_qwen if family == "qwen2_5_vl" else _llava)(tokenizer)
        _fill(model, seed, silent=_special_ids(making), vocabulary=tokenizer.get_vocab_size())
        model.generation_config = GenerationConfig(
            eos_token_id=ends, pad_token_id=ends[0], do_sample=False
        )
        with _quiet():
            model.save_pretrained(making)
        (making / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        making.chmod(0o755)
        try:
            making.rename(target)
        except OSError:
            if not is_made(target):
                raise
            # somebody else was quicker; what they made is the same
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars: the checkpoint is made in a fraction of a second."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def ensure(family: str) -> Path:
    """The default tiny checkpoint, made on first use."""
    folder = default_folder(family)
    return folder if is_made(folder) else make(family, folder)


def _special_ids(folder: Path) -> list[int]:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return [token["id"] for token in added]


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UnsupportedModel(f"the tokenizer has no token '{token}'")
    return found


def _rows(tokenizer: Tokenizer) -> int:
    return math.ceil(tokenizer.get_vocab_size() / 64) * 64


def _qwen(tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, Any], list[int]]:
    ends = [_id(tokenizer, "<|im_end|>"), _id(tokenizer, "<|endoftext|>")]
    config = Qwen2_5_VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": _rows(tokenizer),
            "bos_token_id": ends[1],
            "eos_token_id": ends[0],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": _TEXT["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
        },
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_id(tokenizer, "<|vision_end|>"),
    )
    processor = {
        **_IMAGE,
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 256,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    return Qwen2_5_VLForConditionalGeneration(config), processor, ends


def _llava(tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, Any], list[int]]:
    end = _id(tokenizer, "</s>")
    config = LlavaConfig(
        text_config={
            **_TEXT,
            "model_type": "llama",
            "vocab_size": _rows(tokenizer),
            "bos_token_id": _id(tokenizer, "<s>"),
            "eos_token_id": end,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": LLAVA_SIDE,
            "patch_size": 14,
            "projection_dim": 64,
        },
        image_token_index=_id(tokenizer, "<image>"),
        image_seq_length=(LLAVA_SIDE // 14) ** 2,
    )
    processor = {
        **_IMAGE,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": LLAVA_SIDE},
        "do_center_crop": True,
        "crop_size": {"height": LLAVA_SIDE, "width": LLAVA_SIDE},
    }
    return LlavaForConditionalGeneration(config), processor, [end]


# How strongly a weight acts, by the end of its module's name; 1 keeps the size of what comes in.
# Sharp attention (q, k) lets single tokens decide instead of an average that is alike everywhere;
# much sharper, and rounding noise grows as well.
_GAINS = {
    "q_proj": 1.6,
    "k_proj": 1.6,
    "v_proj": 1.3,
    "o_proj": 1.3,
    "lm_head": 4.0,
    "embed_tokens": 8.0,  # rows have 64 values: a size of 1 each
}


def _fill(model: PreTrainedModel, seed: int, silent: list[int], vocabulary: int) -> None:
    """Random weights from the seed alone, whatever the library's own initialisation does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            module, _, kind = name.rpartition(".")
            if weight.ndim == 1:
                norm = kind == "weight"
                weight.copy_(torch.full_like(weight, float(norm)))
                if not norm:
                    weight.normal_(0, 0.1, generator=generator)
                continue
            gain = next((g for end, g in _GAINS.items() if module.endswith(end)), 1.0)
            weight.normal_(0, gain / math.sqrt(weight[0].numel()), generator=generator)
        head = model.get_output_embeddings().weight
        head[vocabulary:] = 0  # ids that no token has
        head[silent] *= 0.25  # end and placeholder tokens: possible, but rarely the best


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random checkpoint.")
    parser.add_argument("family", choices=sorted(ASSETS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make(given.family, given.folder, given.seed))


if __name__ == "__main__":
    main()
