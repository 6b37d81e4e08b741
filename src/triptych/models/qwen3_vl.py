"""Qwen3-VL: deepstack, and a video whose moments stand apart, each after its time in words.

What the chat template writes around a video's placeholder stays, and the moments with their own
markers stand inside, as transformers has it since version 5. (Its first processor for these models
put the moments in place of the markers too, and a time could then melt with the word before it.)
"""

from __future__ import annotations

from functools import partial

from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from triptych.models.qwen_vl import QwenVariant, QwenVL

FAMILY = partial(
    QwenVL,
    description=QwenVariant(
        config=Qwen3VLConfig, tower=Qwen3VLVisionModel, frames="qwen3", stamped=True
    ),
)
