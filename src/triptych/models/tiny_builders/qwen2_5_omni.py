"""A tiny Qwen2.5-Omni without talker: the whole checkpoint's layout, of which the thinker is used.

Stock ``Qwen2_5OmniThinkerForConditionalGeneration`` loads it, as it does published ones.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from triptych.models.tiny_builders import HIDDEN, PIXELS, Tiny, qwen_vl, token_id
from triptych.models.tiny_builders.qwen2_audio import GAINS, SPECTRUM, TOWER


def thinker(tokenizer: Tokenizer) -> dict[str, Any]:
    """Configuration of the thinker."""
    tower = {**TOWER, "n_window": 100, "output_dim": HIDDEN}
    return {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {**qwen_vl.text(tokenizer), "tie_word_embeddings": False},
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
        },
        "audio_config": tower,
        "tie_word_embeddings": False,
        "audio_token_index": token_id(tokenizer, "<|AUDIO|>"),
        "image_token_index": token_id(tokenizer, "<|IMAGE|>"),
        "video_token_index": token_id(tokenizer, "<|VIDEO|>"),
        "audio_start_token_id": token_id(tokenizer, "<|audio_bos|>"),
        "audio_end_token_id": token_id(tokenizer, "<|audio_eos|>"),
        "vision_start_token_id": token_id(tokenizer, "<|vision_bos|>"),  # undeclared, but needed
        "vision_end_token_id": token_id(tokenizer, "<|vision_eos|>"),
    }


def files() -> dict[str, dict[str, Any]]:
    """Settings of the processors: pictures take 4 to 256 tokens, frames of videos 4 to 36."""
    grid = {**PIXELS, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    return {
        "preprocessor_config.json": {
            **SPECTRUM,
            **grid,
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 4 * 28**2,
            "max_pixels": 256 * 28**2,
        },
        "video_preprocessor_config.json": {
            **grid,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 4 * 28**2, "longest_edge": 36 * 28**2},
            "min_frames": 4,
            "max_frames": 16,
        },
    }


def build(tokenizer: Tokenizer) -> Tiny:
    config = Qwen2_5OmniConfig(
        thinker_config=thinker(tokenizer),
        talker_config={"vocab_size": 152_064},  # its default is too small for its own markers
        token2wav_config={},
        enable_audio_output=False,
    )
    model = Qwen2_5OmniForConditionalGeneration(config)
    # The whole names none, and tiny.py wants to know.
    model.get_output_embeddings = model.thinker.get_output_embeddings  # type: ignore[method-assign]
    return Tiny(model, files(), qwen_vl.ends(tokenizer), GAINS)
