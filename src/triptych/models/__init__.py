"""The registry of model families: one entry for each ``model_type``, read by every engine.

An entry says what is known of a family without importing it: which media it takes, which engines
serve it, and what they need to know of its inputs. The family's own module is imported when the
family is chosen. This module imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.messages import MediaKind

if TYPE_CHECKING:
    from triptych.models.family import Family

# How vLLM joins one field of several items: stacked in a new axis (and kept on the CPU), or
# concatenated along the first axis or along time.
FieldJoin = Literal["stack", "stack_on_cpu", "concatenate", "concatenate_in_time"]
VllmFields = Mapping[str, FieldJoin]


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """What engines know of a family before they import it."""

    implementation: str  # "module:attribute" that makes a Family of a Model
    takes: tuple[MediaKind, ...]
    tokenizer: str  # packaged folder with the tokenizer of its tiny checkpoint; empty: has none
    attention_chunk: int = 0  # tokens, where layers attend in chunks and config.json says nothing
    constant_interval: bool = False  # positions space a video's frames by the recipe's rate
    # Inputs of vLLM's model by kind, under the stock processor's names; None: not served by vLLM.
    vllm_fields: Mapping[MediaKind, VllmFields] | None = None
    # vLLM's model without its tower drops the rows of all deepstack layers.
    vllm_needs_tower: bool = False
    # SGLang may know more families, but its scheduler dies of media that its model does not expect.
    sglang: bool = False
    # TensorRT-LLM's PyTorch backend has it, and what the sandbox prepares is one picture.
    trtllm: bool = False


_GRID_IMAGE: VllmFields = {"pixel_values": "concatenate", "image_grid_thw": "stack_on_cpu"}
_GRID_VIDEO: VllmFields = {"pixel_values_videos": "concatenate", "video_grid_thw": "stack_on_cpu"}
_TIMED_VIDEO: VllmFields = {**_GRID_VIDEO, "second_per_grid_ts": "stack_on_cpu"}

_QWEN2_5_OMNI = FamilyEntry(
    "triptych.models.qwen2_5_omni:Qwen2_5Omni",
    takes=("image", "video", "audio"),
    tokenizer="qwen_omni",
    constant_interval=True,
    vllm_fields={
        "image": _GRID_IMAGE,
        "video": _TIMED_VIDEO,
        "audio": {
            "input_audio_features": "concatenate_in_time",
            "audio_feature_lengths": "stack_on_cpu",
            "feature_attention_mask": "stack_on_cpu",
        },
    },
)

FAMILIES: dict[str, FamilyEntry] = {
    "llama4": FamilyEntry(
        "triptych.models.llama4:Llama4",
        takes=("image",),
        tokenizer="llama4",
        attention_chunk=8192,
        vllm_fields={
            "image": {
                "pixel_values": "concatenate",
                "patches_per_image": "stack_on_cpu",
                "aspect_ratios": "stack_on_cpu",
            }
        },
    ),
    "llava": FamilyEntry(
        "triptych.models.llava:Llava",
        takes=("image",),
        tokenizer="llava",
        vllm_fields={"image": {"pixel_values": "stack"}},
    ),
    "llava_next_video": FamilyEntry(
        "triptych.models.llava_next_video:LlavaNextVideo",
        takes=("image", "video"),
        tokenizer="llava_next_video",
        vllm_fields={"video": {"pixel_values_videos": "stack"}},
    ),
    "qwen2_5_omni": _QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": replace(_QWEN2_5_OMNI, tokenizer="", vllm_fields=None),
    "qwen2_5_vl": FamilyEntry(
        "triptych.models.qwen_vl:Qwen2_5VL",
        takes=("image", "video"),
        tokenizer="qwen",
        vllm_fields={"image": _GRID_IMAGE, "video": _TIMED_VIDEO},
        sglang=True,
        trtllm=True,
    ),
    "qwen2_audio": FamilyEntry(
        "triptych.models.qwen2_audio:Qwen2Audio",
        takes=("audio",),
        tokenizer="qwen_audio",
        vllm_fields={"audio": {"input_features": "stack", "feature_attention_mask": "stack"}},
        sglang=True,
    ),
    "qwen2_vl": FamilyEntry(
        "triptych.models.qwen_vl:Qwen2VL",
        takes=("image", "video"),
        tokenizer="qwen",
        vllm_fields={"image": _GRID_IMAGE, "video": _GRID_VIDEO},
        sglang=True,
        trtllm=True,
    ),
    "qwen3_vl": FamilyEntry(
        "triptych.models.qwen_vl:Qwen3VL",
        takes=("image", "video"),
        tokenizer="qwen",
        vllm_fields={"image": _GRID_IMAGE, "video": _GRID_VIDEO},
        vllm_needs_tower=True,
        sglang=True,
        trtllm=True,
    ),
}

# Model types that are known and not served, with the reason.
UNSUPPORTED = {
    "qwen3_vl_moe": "its mixture of experts is not implemented here. Serve a dense Qwen3-VL",
}


def served_by(engine: str) -> tuple[str, ...]:
    """The model types that an engine serves, sorted."""
    match engine:
        case "vllm":
            served = [name for name, entry in FAMILIES.items() if entry.vllm_fields is not None]
        case "sglang":
            served = [name for name, entry in FAMILIES.items() if entry.sglang]
        case "trtllm":
            served = [name for name, entry in FAMILIES.items() if entry.trtllm]
        case "torch" | "fake":
            served = list(FAMILIES)
        case _:
            raise ValueError(f"say here which families the engine '{engine}' serves")
    return tuple(sorted(served))


def check_supported(model: Model) -> None:
    if model.family in UNSUPPORTED:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not supported: "
            f"{UNSUPPORTED[model.family]}."
        )
    if model.family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not supported; "
            f"there are {', '.join(sorted(FAMILIES))}"
        )


def limit_context(model: Model, max_model_len: int = 0) -> Model:
    """The model with the context that the torch engine serves; raises if more is asked for.

    The paged attention knows no chunks. A sequence that fits in one chunk needs none: there,
    chunked attention is ordinary attention.
    """
    check_supported(model)
    chunk = _attention_chunk(model)
    if not chunk or model.context <= chunk:
        return model
    if max_model_len > chunk:
        raise UnsupportedModel(
            f"max_model_len is {max_model_len}, but {model.name} attends in chunks of {chunk} "
            f"tokens, and the torch engine serves one chunk. Ask for {chunk} at most, or choose an "
            "engine with chunked attention (vllm)."
        )
    return msgspec.structs.replace(model, context=chunk)


def _attention_chunk(model: Model) -> int:
    """Tokens of a chunk; 0: every layer attends to all tokens before."""
    default = FAMILIES[model.family].attention_chunk
    text: dict[str, Any] = model.config.get("text_config") or {}
    return (text.get("attention_chunk_size") or default) if default else 0


def find_family(model: Model) -> Family:
    """The family of a checkpoint; imports its module."""
    check_supported(model)
    module, _, name = FAMILIES[model.family].implementation.partition(":")
    family: Family = getattr(importlib.import_module(module), name)(model)
    return family
