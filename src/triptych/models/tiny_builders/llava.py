"""A tiny LLaVA-1.5."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import LlavaConfig, LlavaForConditionalGeneration

from triptych.models.tiny_builders import PIXELS, TEXT, Tiny, rows, token_id

SIDE, PATCH = 112, 14
PUBLISHED = {"vision_tower.": "vision_tower.vision_model."}


def text(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        **TEXT,
        "model_type": "llama",
        "vocab_size": rows(tokenizer),
        "bos_token_id": token_id(tokenizer, "<s>"),
        "eos_token_id": token_id(tokenizer, "</s>"),
    }


def vision(side: int = SIDE) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": PATCH,
        "projection_dim": 64,
    }


def processor(side: int = SIDE) -> dict[str, Any]:
    return {
        **PIXELS,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }


def build(tokenizer: Tokenizer) -> Tiny:
    config = LlavaConfig(
        text_config=text(tokenizer),
        vision_config=vision(),
        image_token_index=token_id(tokenizer, "<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    model = LlavaForConditionalGeneration(config)
    files = {"preprocessor_config.json": processor()}
    return Tiny(model, files, (token_id(tokenizer, "</s>"),), published=PUBLISHED)
