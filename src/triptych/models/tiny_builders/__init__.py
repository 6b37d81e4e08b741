"""Tiny checkpoints of the families: a module for each, named like its ``model_type``.

Its ``build(tokenizer)`` gives a Tiny. ``tiny_folder.ASSETS`` says which tokenizer it gets, and
``tiny`` fills in the weights. What builders share is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from triptych.errors import UnsupportedModel
from triptych.models.processor_settings import BICUBIC, CLIP_MEAN, CLIP_STD

CONTEXT = 4096
HIDDEN = 128
HEAD = 32  # the smallest that vLLM's attention on a CPU takes

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}
PIXELS: dict[str, Any] = {  # a processor's settings
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A checkpoint before its weights are filled in."""

    model: PreTrainedModel
    files: dict[str, dict[str, Any]]  # JSON files that stock transformers and we read besides
    ends: tuple[int, ...]  # tokens that end an answer
    gains: dict[str, float] = field(default_factory=dict)  # where a family's own: see tiny.py
    published: dict[str, str] = field(default_factory=dict)  # beginnings of names: ours to theirs


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UnsupportedModel(f"the tokenizer has no token '{token}'")
    return found


def rows(tokenizer: Tokenizer) -> int:
    """Of an embedding: some more than there are tokens, as published checkpoints have."""
    return math.ceil(tokenizer.get_vocab_size() / 64) * 64
