"""Tiny checkpoints of every family before their weights are filled in, by ``model_type``.

A builder gets the family's tokenizer and gives a TinyCheckpoint; ``tiny`` fills in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from triptych.errors import UnsupportedModel
from triptych.models.processor_settings import BICUBIC, CLIP_MEAN, CLIP_STD

CONTEXT = 4096
HIDDEN = 128
HEAD = 32  # the smallest that vLLM's attention on a CPU takes

TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}
IMAGE_SETTINGS: dict[str, Any] = {  # of an image processor
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}
AUDIO_SETTINGS: dict[str, Any] = {  # of a feature extractor
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
AUDIO_TOWER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
QWEN2_5_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# Spectra are mostly alike: few layers, whose first ones act strongly, keep what differs.
AUDIO_GAINS = {"conv1": 8.0, "conv2": 3.0, "fc2": 0.5, "self_attn.out_proj": 2.0}
LLAVA_SIDE, LLAVA_PATCH = 112, 14
LLAVA_NAMES = {"vision_tower.": "vision_tower.vision_model."}


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A checkpoint before its weights are filled in."""

    model: PreTrainedModel
    files: dict[str, dict[str, Any]]  # more JSON files that stock transformers and we read
    end_ids: tuple[int, ...]  # tokens that end an answer
    gains: dict[str, float] = field(default_factory=dict)  # the family's own: see tiny.py
    published: dict[str, str] = field(default_factory=dict)  # name prefixes: saved to published


Builder = Callable[[Tokenizer], TinyCheckpoint]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UnsupportedModel(f"the tokenizer has no token '{token}'")
    return found


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Some more than there are tokens, as in published checkpoints."""
    return math.ceil(tokenizer.get_vocab_size() / 64) * 64


def llava_text(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        **TEXT_CONFIG,
        "model_type": "llama",
        "vocab_size": embedding_rows(tokenizer),
        "bos_token_id": token_id(tokenizer, "<s>"),
        "eos_token_id": token_id(tokenizer, "</s>"),
    }


def clip_vision(side: int = LLAVA_SIDE) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": LLAVA_PATCH,
        "projection_dim": 64,
    }


def clip_processor(side: int = LLAVA_SIDE) -> dict[str, Any]:
    return {
        **IMAGE_SETTINGS,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }


def qwen_end_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    return token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")


def qwen_text(tokenizer: Tokenizer) -> dict[str, Any]:
    end, bos = qwen_end_ids(tokenizer)
    return {
        **TEXT_CONFIG,
        "vocab_size": embedding_rows(tokenizer),
        "bos_token_id": bos,
        "eos_token_id": end,
        "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]},
    }


def qwen_vision_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
    }


def qwen_files(patch: int = 14, rule: str = "qwen2") -> dict[str, dict[str, Any]]:
    """Processor settings: pictures take 4 to 256 tokens, and so do all moments of a video."""
    unit = (2 * patch) ** 2
    cut = {**IMAGE_SETTINGS, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
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


def build_llama4(tokenizer: Tokenizer) -> TinyCheckpoint:
    """Every kind of layer that the large ones have, and tiles of 16 patches."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    side, patch = 56, 14
    marks = ("<|eot|>", "<|eom|>", "<|end_of_text|>")
    ends = tuple(token_id(tokenizer, mark) for mark in marks)
    config = Llama4Config(
        text_config={
            **TEXT_CONFIG,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "intermediate_size_mlp": 128,
            "head_dim": HEAD,
            "attention_chunk_size": 2048,  # less than the context: what lies beyond is not served
            "floor_scale": 32,  # so that short prompts, too, go through several temperatures
            "attn_scale": 0.3,
            "vocab_size": embedding_rows(tokenizer),
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
            "image_size": side,
            "patch_size": patch,
            "rope_parameters": dict(ROPE),
        },
        boi_token_index=token_id(tokenizer, "<|image_start|>"),
        eoi_token_index=token_id(tokenizer, "<|image_end|>"),
        image_token_index=token_id(tokenizer, "<|patch|>"),
    )
    processor = {
        **IMAGE_SETTINGS,
        "image_processor_type": "Llama4ImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "size": {"height": side, "width": side},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    }
    files = {
        "preprocessor_config.json": processor,
        "processor_config.json": {
            "processor_class": "Llama4Processor",
            "patch_size": patch,
            "pixel_shuffle_ratio": 0.5,
        },
    }
    gains = {"experts": 16.0}  # the weights of all lie in one tensor
    return TinyCheckpoint(Llama4ForConditionalGeneration(config), files, ends, gains)


def build_llava(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=llava_text(tokenizer),
        vision_config=clip_vision(),
        image_token_index=token_id(tokenizer, "<image>"),
        image_seq_length=(LLAVA_SIDE // LLAVA_PATCH) ** 2,
    )
    model = LlavaForConditionalGeneration(config)
    files = {"preprocessor_config.json": clip_processor()}
    return TinyCheckpoint(model, files, (token_id(tokenizer, "</s>"),), published=LLAVA_NAMES)


def build_llava_next_video(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

    side, patch = 64, 8  # a side of at least patch squared: other engines need it
    tiles = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
    pinpoints = [[down * side, across * side] for down, across in tiles]
    config = LlavaNextVideoConfig(
        text_config=llava_text(tokenizer),
        vision_config=clip_vision(side) | {"patch_size": patch},
        image_token_index=token_id(tokenizer, "<image>"),
        video_token_index=token_id(tokenizer, "<video>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=(side // patch) ** 2,
        video_seq_length=(side // patch // 2) ** 2,
    )
    square: dict[str, Any] = clip_processor(side)
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
            "patch_size": patch,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    model = LlavaNextVideoForConditionalGeneration(config)
    ends = (token_id(tokenizer, "</s>"),)
    return TinyCheckpoint(model, files, ends, published=LLAVA_NAMES)


def _omni_thinker(tokenizer: Tokenizer) -> dict[str, Any]:
    tower = {**AUDIO_TOWER, "n_window": 100, "output_dim": HIDDEN}
    return {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {**qwen_text(tokenizer), "tie_word_embeddings": False},
        "vision_config": dict(QWEN2_5_TOWER),
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


def _omni_files() -> dict[str, dict[str, Any]]:
    """Settings of the processors: pictures take 4 to 256 tokens, frames of videos 4 to 36."""
    grid = {**IMAGE_SETTINGS, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    return {
        "preprocessor_config.json": {
            **AUDIO_SETTINGS,
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


def build_qwen2_5_omni(tokenizer: Tokenizer) -> TinyCheckpoint:
    """Without talker: the layout of a whole checkpoint, of which the thinker is used.

    Stock ``Qwen2_5OmniThinkerForConditionalGeneration`` loads it, as it does published ones.
    """
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    config = Qwen2_5OmniConfig(
        thinker_config=_omni_thinker(tokenizer),
        talker_config={"vocab_size": 152_064},  # its default is too small for its own markers
        token2wav_config={},
        enable_audio_output=False,
    )
    model = Qwen2_5OmniForConditionalGeneration(config)
    # The whole model names no output embeddings, which tiny.py needs.
    model.get_output_embeddings = model.thinker.get_output_embeddings  # type: ignore[method-assign]
    return TinyCheckpoint(model, _omni_files(), qwen_end_ids(tokenizer), AUDIO_GAINS)


def build_qwen2_5_vl(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=qwen_text(tokenizer),
        vision_config=dict(QWEN2_5_TOWER),
        **qwen_vision_tokens(tokenizer),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    return TinyCheckpoint(model, qwen_files(), qwen_end_ids(tokenizer))


def build_qwen2_audio(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    end, bos = ends = qwen_end_ids(tokenizer)
    text = {
        **TEXT_CONFIG,
        "model_type": "qwen2",
        "vocab_size": embedding_rows(tokenizer),
        "bos_token_id": bos,
        "eos_token_id": end,
    }
    config = Qwen2AudioConfig(
        text_config=text,
        audio_config={"model_type": "qwen2_audio_encoder", **AUDIO_TOWER},
        audio_token_index=token_id(tokenizer, "<|AUDIO|>"),
    )
    published = {"language_model.model.model.": "language_model.model."}
    model = Qwen2AudioForConditionalGeneration(config)
    return TinyCheckpoint(
        model, {"preprocessor_config.json": dict(AUDIO_SETTINGS)}, ends, AUDIO_GAINS, published
    )


def build_qwen2_vl(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config=qwen_text(tokenizer),
        vision_config={
            "depth": 4,
            "embed_dim": 64,
            "hidden_size": HIDDEN,
            "mlp_ratio": 2,
            "num_heads": 4,
        },
        **qwen_vision_tokens(tokenizer),
    )
    gains = {"attn.qkv": 1.4}  # of the tower: sharper, for its output is wider than it is
    model = Qwen2VLForConditionalGeneration(config)
    return TinyCheckpoint(model, qwen_files(), qwen_end_ids(tokenizer), gains)


def build_qwen3_vl(tokenizer: Tokenizer) -> TinyCheckpoint:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    patch = 16
    text = qwen_text(tokenizer)
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
            "patch_size": patch,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        **qwen_vision_tokens(tokenizer),
    )
    model = Qwen3VLForConditionalGeneration(config)
    # Queries and keys are normed: what sharpens attention elsewhere acts here.
    sharp = {"q_norm": 1.6, "k_norm": 1.6}
    return TinyCheckpoint(model, qwen_files(patch, "qwen3"), qwen_end_ids(tokenizer), sharp)


BUILDERS: dict[str, Builder] = {
    "llama4": build_llama4,
    "llava": build_llava,
    "llava_next_video": build_llava_next_video,
    "qwen2_5_omni": build_qwen2_5_omni,
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen2_audio": build_qwen2_audio,
    "qwen2_vl": build_qwen2_vl,
    "qwen3_vl": build_qwen3_vl,
}
