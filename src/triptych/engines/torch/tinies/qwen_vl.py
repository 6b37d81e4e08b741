"""What tiny checkpoints of the Qwen-VL families have in common."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from triptych.engines.torch.tinies import PIXELS, TEXT, rows, token_id

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def ends(tokenizer: Tokenizer) -> tuple[int, int]:
    return token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")


def text(tokenizer: Tokenizer) -> dict[str, Any]:
    end, bos = ends(tokenizer)
    return {
        **TEXT,
        "vocab_size": rows(tokenizer),
        "bos_token_id": bos,
        "eos_token_id": end,
        "rope_parameters": dict(ROPE),
    }


def tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
    }


def files(patch: int = 14) -> dict[str, dict[str, Any]]:
    """Settings of the image processor; pictures take 4 to 256 tokens."""
    unit = patch * 2
    return {
        "preprocessor_config.json": {
            **PIXELS,
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 4 * unit**2,
            "max_pixels": 256 * unit**2,
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
    }
