"""A tiny Qwen3-VL."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from triptych.models.tiny_builders import HEAD, HIDDEN, Tiny, qwen_vl

PATCH = 16


def build(tokenizer: Tokenizer) -> Tiny:
    text = qwen_vl.text(tokenizer)
    config = Qwen3VLConfig(
        text_config={
            **text,
            "head_dim": HEAD,
            "rope_parameters": {**text["rope_parameters"], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "patch_size": PATCH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        **qwen_vl.tokens(tokenizer),
    )
    model = Qwen3VLForConditionalGeneration(config)
    # Queries and keys are normed: what sharpens attention elsewhere acts here.
    sharp = {"q_norm": 1.6, "k_norm": 1.6}
    return Tiny(model, qwen_vl.files(PATCH, "qwen3"), qwen_vl.ends(tokenizer), sharp)
