"""LLaVA-1.5: a square picture, a CLIP tower, a projector, positions that count up.

Builds torch modules.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.models import patches
from triptych.models.family import Family, parse_config, with_outer_prefix
from triptych.models.processor_settings import Settings, read_settings, square_image
from triptych.models.tensors import tensor_view
from triptych.recipe import Recipes, SquareImage

PREFIXES = with_outer_prefix(
    (
        ("vision_tower.vision_model.", "encoder", "vision_tower."),
        ("vision_tower.", "encoder", "vision_tower."),
        ("multi_modal_projector.", "encoder", "multi_modal_projector."),
        ("language_model.lm_head.", "language", "lm_head."),
        ("language_model.model.", "language", "model."),
        ("language_model.", "language", "model."),
    )
)


class LlavaVision(nn.Module):
    """Tower and projector: pixels [batch, 3, height, width] to [batch, tokens, hidden]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config, attn_implementation="sdpa")
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        self._skip = 1 if config.vision_feature_select_strategy == "default" else 0  # class token

    def forward(self, pixels: Tensor) -> Tensor:
        return self.multi_modal_projector(self.run_tower(pixels))

    def run_tower(self, pixels: Tensor) -> Tensor:
        """The output of the tower, before the projector."""
        states = self.vision_tower(pixels, output_hidden_states=True).hidden_states
        chosen = [states[layer][:, self._skip :] for layer in self._layers]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, -1)


class Llava(Family):
    prefixes = PREFIXES

    def __init__(self, model: Model) -> None:
        self.config = parse_config(LlavaConfig, model.config)
        extra_tokens = 0 if self.config.vision_feature_select_strategy == "default" else 1
        settings = read_settings(model.folder)
        image = clip_square(model, settings, self.config.vision_config, extra_tokens)
        self.width: int = self.config.text_config.hidden_size
        self.recipes = Recipes(model.revision, image=image)
        self._tone = image.tone

    def build_encoder(self) -> nn.Module:
        return LlavaVision(copy.deepcopy(self.config))

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        like = next(module.parameters())
        table = patches.normalization_table(self._tone, like.device, like.dtype)
        pixels = torch.stack([tensor_view(item.arrays[0]) for item in batch]).to(like.device)
        return list(module(patches.to_planes(pixels, table)))


def clip_square(
    model: Model, settings: Settings, vision: Any, extra_tokens: int = 0
) -> SquareImage:
    """The square that a CLIP tower takes; raises if tower and processor disagree."""
    if vision.model_type != "clip_vision_model":
        raise UnsupportedModel(
            f"{model.name} has a '{vision.model_type}' vision tower; only CLIP is supported"
        )
    made = square_image(settings, vision.patch_size, extra_tokens)
    if made.side != vision.image_size:
        raise UnsupportedModel(
            f"{model.name}: the image processor or video processor crops to {made.side} pixels, "
            f"but the vision tower takes {vision.image_size}"
        )
    return made
