"""A tiny Qwen2.5-VL."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from triptych.models.tiny_builders import HIDDEN, Tiny, qwen_vl


def build(tokenizer: Tokenizer) -> Tiny:
    config = Qwen2_5_VLConfig(
        text_config=qwen_vl.text(tokenizer),
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
        },
        **qwen_vl.tokens(tokenizer),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    return Tiny(model, qwen_vl.files(), qwen_vl.ends(tokenizer))
