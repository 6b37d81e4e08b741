"""A tiny Llama 4: every kind of layer that the large ones have, and tiles of 16 patches."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import Llama4Config, Llama4ForConditionalGeneration

from triptych.models.tiny_builders import HEAD, PIXELS, TEXT, Tiny, rows, token_id

SIDE, PATCH = 56, 14
CHUNK = 2048  # less than the context: what lies beyond is not served
ENDS = ("<|eot|>", "<|eom|>", "<|end_of_text|>")
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def build(tokenizer: Tokenizer) -> Tiny:
    ends = tuple(token_id(tokenizer, token) for token in ENDS)
    config = Llama4Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "intermediate_size_mlp": 128,
            "head_dim": HEAD,
            "attention_chunk_size": CHUNK,
            "floor_scale": 32,  # so that short prompts, too, go through several temperatures
            "attn_scale": 0.3,
            "vocab_size": rows(tokenizer),
            "bos_token_id": token_id(tokenizer, "<|begin_of_text|>"),
            "eos_token_id": ends[0],
            "rope_parameters": dict(ROPE),
        },
        vision_config={
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 256,  # four patches of 64 that become one
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
            "image_size": SIDE,
            "patch_size": PATCH,
            "rope_parameters": dict(ROPE),
        },
        boi_token_index=token_id(tokenizer, "<|image_start|>"),
        eoi_token_index=token_id(tokenizer, "<|image_end|>"),
        image_token_index=token_id(tokenizer, "<|patch|>"),
    )
    processor = {
        **PIXELS,
        "image_processor_type": "Llama4ImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "size": {"height": SIDE, "width": SIDE},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    }
    files = {
        "preprocessor_config.json": processor,
        "processor_config.json": {
            "processor_class": "Llama4Processor",
            "patch_size": PATCH,
            "pixel_shuffle_ratio": 0.5,
        },
    }
    gains = {"experts": 16.0}  # the weights of all lie in one tensor
    return Tiny(Llama4ForConditionalGeneration(config), files, ends, gains)
