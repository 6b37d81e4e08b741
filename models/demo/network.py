"""The model's shape and its files: Qwen2.5-Omni in small, thinker alone, in stock layout.

Stock transformers, Triptych and vLLM read the folder that ``save`` writes. Nothing here trains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    GenerationConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniVisionEncoder,
)

NAME = "triptych-demo"
FOLDER = Path(__file__).parents[2] / "src" / "triptych" / "assets" / NAME

UNIT = 28  # pixels of a token's side: two patches of 14
PATCH = 14
PICTURE_UNITS = (25, 36)  # least and most tokens of a picture
FRAME_UNITS = (9, 16)  # of a clip's frame
FRAMES = 8  # of a clip, whatever its length
FPS = 2.0  # what the positions of frames are counted by
MELS = 80
SECONDS = 8  # of the longest sound
CONTEXT = 4096
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
AUDIO, AUDIO_BOS, AUDIO_EOS = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
VISION_BOS, VISION_EOS, VISION_PAD = "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>"
IMAGE, VIDEO = "<|IMAGE|>", "<|VIDEO|>"
SPECIAL = (
    *(END, START, STOP, AUDIO, AUDIO_BOS, AUDIO_EOS),
    *(VISION_BOS, VISION_EOS, VISION_PAD, IMAGE, VIDEO),
)

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{ '<|vision_bos|><|IMAGE|><|vision_eos|>' }}
{%- elif part['type'] in ('video', 'video_url') -%}
{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}
{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') -%}
{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def read_tokenizer(folder: Path = FOLDER) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    return {name: id for name, id in ids.items() if id is not None}


def thinker_config(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = special_ids(tokenizer)
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    return {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {
            "vocab_size": vocabulary,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 12, 12],
            },
            "bos_token_id": ids[START],
            "eos_token_id": ids[STOP],
            "pad_token_id": ids[END],
        },
        "vision_config": {
            "depth": 6,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_heads": 4,
            "out_hidden_size": 384,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(range(6)),  # all: pictures are small
        },
        "audio_config": {
            "num_mel_bins": MELS,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 1024,
            "d_model": 256,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": 384,
        },
        "tie_word_embeddings": True,
        "audio_token_index": ids[AUDIO],
        "image_token_index": ids[IMAGE],
        "video_token_index": ids[VIDEO],
        "audio_start_token_id": ids[AUDIO_BOS],
        "audio_end_token_id": ids[AUDIO_EOS],
        "vision_start_token_id": ids[VISION_BOS],  # undeclared, but positions are found by it
        "vision_end_token_id": ids[VISION_EOS],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def build(tokenizer: Tokenizer) -> nn.ModuleDict:
    """The stock modules with fresh weights (of torch's global seed), by their published names."""
    config = Qwen2_5OmniThinkerConfig(**thinker_config(tokenizer))
    return nn.ModuleDict(
        {
            "audio_tower": Qwen2_5OmniAudioEncoder._from_config(config.audio_config),
            "visual": Qwen2_5OmniVisionEncoder._from_config(config.vision_config),
            "model": Qwen2_5OmniThinkerTextModel._from_config(config.text_config),
        }
    )


def save(weights: dict[str, torch.Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint; ``weights`` are those of what ``build`` gives."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"thinker.{name}": weight.to(torch.bfloat16).contiguous()
        for name, weight in weights.items()  # the head is tied to the embeddings
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    whole: Any = Qwen2_5OmniConfig  # its signature leaves out what every config takes
    config = whole(
        thinker_config=thinker_config(tokenizer),
        talker_config={"vocab_size": 152_064},  # its default is too small for its own markers
        token2wav_config={},
        enable_audio_output=False,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen2_5OmniForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    ends = [tokenizer.token_to_id(STOP), tokenizer.token_to_id(END)]
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False).save_pretrained(
        folder
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, content in processors().items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def processors() -> dict[str, dict[str, Any]]:
    """Settings of the stock processors, by file."""
    grid = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    return {
        "preprocessor_config.json": {
            **grid,
            "image_processor_type": "Qwen2VLImageProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2_5OmniProcessor",
            "min_pixels": PICTURE_UNITS[0] * UNIT**2,
            "max_pixels": PICTURE_UNITS[1] * UNIT**2,
            "feature_size": MELS,
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": SECONDS,
            "n_samples": SECONDS * 16_000,
            "nb_max_frames": SECONDS * 100,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "dither": 0.0,
        },
        "video_preprocessor_config.json": {
            **grid,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {
                "shortest_edge": FRAME_UNITS[0] * UNIT**2,
                "longest_edge": FRAME_UNITS[1] * UNIT**2,
            },
            "fps": FPS,
            "min_frames": FRAMES,
            "max_frames": FRAMES,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": "Qwen2_5OmniProcessor",
            "bos_token": None,
            "eos_token": STOP,
            "pad_token": END,
            "unk_token": None,
            "image_token": IMAGE,
            "video_token": VIDEO,
            "audio_token": AUDIO,
            "audio_bos_token": AUDIO_BOS,
            "audio_eos_token": AUDIO_EOS,
            "vision_bos_token": VISION_BOS,
            "vision_eos_token": VISION_EOS,
            "extra_special_tokens": list(SPECIAL[1:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    }
