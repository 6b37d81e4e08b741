"""Qwen2.5-VL: window attention over patches; a video's positions follow its seconds."""

from __future__ import annotations

from functools import partial

from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from triptych.models.qwen_vl import QwenVariant, QwenVL

FAMILY = partial(
    QwenVL,
    description=QwenVariant(
        config=Qwen2_5_VLConfig,
        tower=Qwen2_5_VisionTransformerPretrainedModel,
        timed=True,
    ),
)
