"""What plain transformers answers: the measure of every arrangement.

Stock model, stock PIL image processors, greedy, float32, one request at a time. Knows nothing of
Triptych but the checkpoint folder; expanded prompt ids and decoded pictures are given to it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image


@dataclass(frozen=True)
class Reference:
    ids: list[int]  # generated, with the end token where one came
    logprobs: list[float]  # of ids
    gaps: list[float]  # best logit minus second best, at each step


@functools.lru_cache(maxsize=4)
def stock_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@functools.lru_cache(maxsize=4)
def stock_processor(folder: Path) -> Any:
    """The stock image processor in its PIL form, which needs no torchvision."""
    name = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
    if name.startswith("Qwen2VL"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )
    else:
        from transformers.models.clip.image_processing_pil_clip import (
            CLIPImageProcessorPil as Processor,
        )
    return Processor.from_pretrained(folder)


def image_inputs(folder: Path, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Stock pixel values (and grids) of RGB pictures; nothing for none."""
    if not pictures:
        return {}
    return dict(stock_processor(folder)(list(pictures), return_tensors="pt"))


def image_features(folder: Path, pictures: Sequence[Image.Image]) -> list[torch.Tensor]:
    """Stock embeddings [tokens, hidden] of every picture."""
    with torch.inference_mode():
        output = stock_model(folder).get_image_features(**image_inputs(folder, pictures))
    return list(output.pooler_output)


def image_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return config["image_token_id"] if "image_token_id" in config else config["image_token_index"]


def image_lengths(folder: Path, pictures: Sequence[Image.Image]) -> list[int]:
    """Placeholder tokens that every picture takes."""
    return [len(rows) for rows in image_features(folder, pictures)] if pictures else []


def expand(folder: Path, prompt: Sequence[int], pictures: Sequence[Image.Image]) -> list[int]:
    """A prompt with one placeholder for each picture, expanded."""
    token, lengths = image_token(folder), iter(image_lengths(folder, pictures))
    return [i for id in prompt for i in ([id] * next(lengths) if id == token else [id])]


def generate(
    folder: Path | str,
    ids: Sequence[int],
    pictures: Sequence[Image.Image] = (),
    max_tokens: int = 32,
    *,
    ignore_eos: bool = False,
) -> Reference:
    """Greedy continuation of expanded ids with 0 or more RGB pictures, in order."""
    folder = Path(folder).resolve()
    model = stock_model(folder)
    inputs: dict[str, Any] = image_inputs(folder, pictures)
    prompt = torch.tensor([list(ids)])
    if "image_grid_thw" in inputs:  # M-RoPE needs to be told which tokens are picture
        inputs["mm_token_type_ids"] = (prompt == image_token(folder)).int()
    if ignore_eos:
        inputs["eos_token_id"] = model.config.text_config.vocab_size  # an id that never comes
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
    new = output.sequences[0, len(ids) :].tolist()
    logits = torch.cat(output.logits)  # [tokens, vocabulary]
    logprobs = logits.float().log_softmax(-1)
    best = logits.topk(2).values
    return Reference(
        ids=new,
        logprobs=[logprobs[step, id].item() for step, id in enumerate(new)],
        gaps=(best[:, 0] - best[:, 1]).tolist(),
    )
