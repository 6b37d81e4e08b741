"""LLaVA-1.5: a square picture, a CLIP tower, a projector, positions that simply count."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from triptych.engines.torch.families import text
from triptych.engines.torch.family import Language, Layout, Pixels
from triptych.engines.torch.preprocess import SquarePreprocess, read_settings
from triptych.errors import UnsupportedModel
from triptych.messages import MediaMeta
from triptych.model import Model

# After an optional "model.", which transformers 5 may save; the longest prefix decides.
_PREFIXES = (
    ("vision_tower.vision_model.", "encoder", "vision_tower."),
    ("vision_tower.", "encoder", "vision_tower."),
    ("multi_modal_projector.", "encoder", "multi_modal_projector."),
    ("language_model.lm_head.", "language", "lm_head."),
    ("language_model.model.", "language", "model."),
    ("language_model.", "language", "model."),
)
_COMPUTED = (".rotary_emb.inv_freq", ".embeddings.position_ids")  # old checkpoints store them


class VisionPart(nn.Module):
    """Tower and projector: pixels [batch, 3, height, width] to [batch, tokens, hidden]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config, attn_implementation="sdpa")
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        self._skip = 1 if config.vision_feature_select_strategy == "default" else 0  # class token

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vision_tower(pixels, output_hidden_states=True).hidden_states
        chosen = [states[layer][:, self._skip :] for layer in self._layers]
        return self.multi_modal_projector(chosen[0] if len(chosen) == 1 else torch.cat(chosen, -1))


class Llava:
    def __init__(self, model: Model) -> None:
        self._config = _config(model)
        vision = self._config.vision_config
        if vision.model_type != "clip_vision_model":
            raise UnsupportedModel(
                f"{model.name} has a '{vision.model_type}' vision tower; only CLIP is supported"
            )
        self.hidden: int = self._config.text_config.hidden_size
        self._preprocess = SquarePreprocess(
            read_settings(model.folder),
            patch=vision.patch_size,
            extra_tokens=0 if self._config.vision_feature_select_strategy == "default" else 1,
        )
        if self._preprocess.side != vision.image_size:
            raise UnsupportedModel(
                f"{model.name}: the image processor crops to {self._preprocess.side} pixels, "
                f"but the vision tower takes {vision.image_size}"
            )

    def build_encoder(self, model: Model) -> nn.Module:
        return VisionPart(copy.deepcopy(self._config))

    def build_language(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.text_config)
        return text.TextPart(config, tied=self._config.tie_word_embeddings)

    def weight_name(self, name: str) -> tuple[str, str] | None:
        if name.endswith(_COMPUTED):
            return None
        short = name.removeprefix("model.")
        for prefix, part, renamed in _PREFIXES:
            if short.startswith(prefix):
                return part, renamed + short.removeprefix(prefix)
        return "language", name

    def language(self, module: nn.Module, model: Model) -> Language:
        return text.describe(module)

    def preprocess(self, picture: np.ndarray) -> Pixels:
        return self._preprocess(picture)

    def encode(self, module: nn.Module, batch: Sequence[Pixels]) -> list[Tensor]:
        like = next(module.parameters())
        values = np.stack([pixels.values for pixels in batch])
        return list(module(torch.from_numpy(values).to(like.device, like.dtype)))

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        start = 0  # in prompt
        for place, meta in zip(at, media, strict=True):
            ids.extend(prompt[start:place])
            spans.append((len(ids), meta.tokens))
            ids.extend([prompt[place]] * meta.tokens)
            start = place + 1
        ids.extend(prompt[start:])
        return Layout(
            ids=tuple(ids),
            spans=tuple(spans),
            positions=torch.arange(len(ids))[None],
            next_position=len(ids),
        )


def _config(model: Model) -> Any:
    return LlavaConfig.from_dict(copy.deepcopy(model.config))


FAMILY = Llava
