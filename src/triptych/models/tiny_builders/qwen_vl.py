"""What tiny checkpoints of the Qwen-VL families have in common."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from triptych.models.tiny_builders import PIXELS, TEXT, rows, token_id

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


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


def files(patch: int = 14, rule: str = "qwen2") -> dict[str, dict[str, Any]]:
    """Processor settings: pictures take 4 to 256 tokens, and so do all moments of a video."""
    unit = (2 * patch) ** 2
    cut = {**PIXELS, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 4 * unit, "longest_edge": 256 * unit}
    # Qwen3-VL's limits are for all frames together, and a moment has two.
    limits = {"qwen2": (4, 16), "qwen3": (16, 512)}[rule]
    return {
        "preprocessor_config.json": {
            **cut,
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": size,
        },
        "video_preprocessor_config.json": {
            **cut,
            "video_processor_type": {"qwen2": "Qwen2VL", "qwen3": "Qwen3VL"}[rule]
            + "VideoProcessor",
            "size": {"shortest_edge": limits[0] * unit, "longest_edge": limits[1] * unit},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 32,
        },
    }
