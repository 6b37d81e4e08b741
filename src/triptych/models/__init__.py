"""The model families that the torch engine serves, by ``model_type``; imported when chosen.

What is served is known without torch: ``check`` may be asked anywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel

if TYPE_CHECKING:
    from triptych.models.family import Family

FAMILIES = {
    "llama4": "triptych.models.llama4",
    "llava": "triptych.models.llava",
    "llava_next_video": "triptych.models.llava_next_video",
    "qwen2_5_omni": "triptych.models.qwen2_5_omni",
    "qwen2_5_omni_thinker": "triptych.models.qwen2_5_omni",
    "qwen2_5_vl": "triptych.models.qwen2_5_vl",
    "qwen2_audio": "triptych.models.qwen2_audio",
    "qwen2_vl": "triptych.models.qwen2_vl",
    "qwen3_vl": "triptych.models.qwen3_vl",
}

# Known, and not served: why.
UNSUPPORTED = {
    "qwen3_vl_moe": "its mixture of experts is not implemented here. Serve a dense Qwen3-VL",
}


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
    """The model with the context that this engine serves; refused where more is asked for.

    Attention in chunks is ordinary attention for a sequence that fits in one chunk, and the paged
    attention knows no other.
    """
    check_supported(model)
    chunk = _chunk(model)
    if chunk is None or model.context <= chunk:
        return model
    if max_model_len > chunk:
        raise UnsupportedModel(
            f"max_model_len is {max_model_len}, but {model.name} attends in chunks of {chunk} "
            f"tokens, and the torch engine serves one chunk. Ask for {chunk} at most, or choose an "
            "engine with chunked attention (vllm)."
        )
    return replace(model, context=chunk)


def _chunk(model: Model) -> int | None:
    """Tokens of a chunk, where layers attend within chunks alone."""
    if model.family != "llama4":
        return None
    text: dict[str, Any] = model.config.get("text_config") or {}
    return text.get("attention_chunk_size") or 8192  # which its configuration has by default


def find_family(model: Model) -> Family:
    """The family of a checkpoint. Its module names its class ``FAMILY``."""
    check_supported(model)
    family: Family = importlib.import_module(FAMILIES[model.family]).FAMILY(model)
    return family
