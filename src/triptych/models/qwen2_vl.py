"""Qwen2-VL: a video's positions count its moments."""

from __future__ import annotations

from functools import partial

from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from triptych.models.qwen_vl import QwenVariant, QwenVL

FAMILY = partial(
    QwenVL,
    description=QwenVariant(config=Qwen2VLConfig, tower=Qwen2VisionTransformerPretrainedModel),
)
