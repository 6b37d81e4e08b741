"""A tiny LLaVA-NeXT-Video."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

from triptych.models.tiny_builders import Tiny, llava, token_id

SIDE, PATCH = 64, 8  # a side of at least patch squared: other engines need it
PINPOINTS = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]  # in tiles


def build(tokenizer: Tokenizer) -> Tiny:
    pinpoints = [[down * SIDE, across * SIDE] for down, across in PINPOINTS]
    config = LlavaNextVideoConfig(
        text_config=llava.text(tokenizer),
        vision_config=llava.vision(SIDE) | {"patch_size": PATCH},
        image_token_index=token_id(tokenizer, "<image>"),
        video_token_index=token_id(tokenizer, "<video>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=(SIDE // PATCH) ** 2,
        video_seq_length=(SIDE // PATCH // 2) ** 2,
    )
    square: dict[str, Any] = llava.processor(SIDE)
    del square["image_processor_type"]
    files = {
        "preprocessor_config.json": {
            **square,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": pinpoints,
            "do_pad": True,
        },
        "video_preprocessor_config.json": {
            **square,
            "video_processor_type": "LlavaNextVideoVideoProcessor",
        },
        "processor_config.json": {
            "processor_class": "LlavaNextVideoProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    model = LlavaNextVideoForConditionalGeneration(config)
    ends = (token_id(tokenizer, "</s>"),)
    return Tiny(model, files, ends, published=llava.PUBLISHED)
