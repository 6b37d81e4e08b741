"""A tiny Qwen2-VL."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from triptych.models.tiny_builders import HIDDEN, Tiny, qwen_vl

GAINS = {"attn.qkv": 1.4}  # of the tower: sharper, for its output is wider than it is


def build(tokenizer: Tokenizer) -> Tiny:
    config = Qwen2VLConfig(
        text_config=qwen_vl.text(tokenizer),
        vision_config={
            "depth": 4,
            "embed_dim": 64,
            "hidden_size": HIDDEN,
            "mlp_ratio": 2,
            "num_heads": 4,
        },
        **qwen_vl.tokens(tokenizer),
    )
    model = Qwen2VLForConditionalGeneration(config)
    return Tiny(model, qwen_vl.files(), qwen_vl.ends(tokenizer), GAINS)
