"""A tiny Qwen2-Audio."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from triptych.models.tiny_builders import TEXT, Tiny, qwen_vl, rows, token_id

TOWER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
# Spectra are mostly alike: few layers, whose first ones act strongly, keep what differs.
GAINS = {"conv1": 8.0, "conv2": 3.0, "fc2": 0.5, "self_attn.out_proj": 2.0}
PUBLISHED = {"language_model.model.model.": "language_model.model."}
SPECTRUM: dict[str, Any] = {  # a feature extractor's settings
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def build(tokenizer: Tokenizer) -> Tiny:
    end, bos = ends = qwen_vl.ends(tokenizer)
    text = {
        **TEXT,
        "model_type": "qwen2",
        "vocab_size": rows(tokenizer),
        "bos_token_id": bos,
        "eos_token_id": end,
    }
    config = Qwen2AudioConfig(
        text_config=text,
        audio_config={"model_type": "qwen2_audio_encoder", **TOWER},
        audio_token_index=token_id(tokenizer, "<|AUDIO|>"),
    )
    model = Qwen2AudioForConditionalGeneration(config)
    return Tiny(model, {"preprocessor_config.json": dict(SPECTRUM)}, ends, GAINS, PUBLISHED)
