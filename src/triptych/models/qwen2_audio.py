"""Qwen2-Audio: sound of up to 30 s, an encoder like Whisper's, positions that count up.

Builds torch modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, Qwen2AudioConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.models.family import Family, parse_config, with_outer_prefix
from triptych.models.processor_settings import mel_audio, read_settings
from triptych.models.tensors import tensor_view
from triptych.recipe import Recipes

# Published checkpoints say "language_model.model." where transformers 5 saves
# "language_model.model.model.".
PREFIXES = with_outer_prefix(
    (
        ("audio_tower.", "encoder", "audio_tower."),
        ("multi_modal_projector.", "encoder", "multi_modal_projector."),
        ("language_model.lm_head.", "language", "lm_head."),
        ("language_model.model.model.", "language", "model."),
        ("language_model.model.", "language", "model."),
        ("language_model.", "language", "model."),
    )
)
TAIL = 2  # frames after the sound that the two convolutions still see


class Qwen2AudioTower(nn.Module):
    """Tower and projector."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.audio_tower = AutoModel.from_config(config.audio_config, attn_implementation="sdpa")
        self.multi_modal_projector = Qwen2AudioMultiModalProjector(config)

    def forward(self, spectra: Tensor, frames: Tensor) -> Tensor:
        """Spectra [items, mels, columns], each with so many ``frames``, to [items, rows, hidden].

        The stock tower pads every spectrum to 30 s and masks the padding. Masked columns do not
        change the result, so here the longest spectrum decides the length.
        """
        tower = self.audio_tower
        states = gelu(tower.conv2(gelu(tower.conv1(spectra)))).transpose(1, 2)
        states = states + tower.embed_positions.weight[: states.shape[1]]
        heard = torch.arange(states.shape[1], device=frames.device) <= (frames[:, None] - 1) // 2
        mask = heard[:, None, None].expand(-1, -1, states.shape[1], -1)
        for layer in tower.layers:
            states = layer(states, mask)
        pooled = tower.avg_pooler(states.transpose(1, 2)).transpose(1, 2)
        rows: Tensor = self.multi_modal_projector(tower.layer_norm(pooled))
        return rows


class Qwen2Audio(Family):
    prefixes = PREFIXES

    def __init__(self, model: Model) -> None:
        self.config = parse_config(Qwen2AudioConfig, model.config)
        tower = self.config.audio_config
        audio = mel_audio(read_settings(model.folder, "feature_extractor"), tower, model, TAIL)
        self._columns = 2 * tower.max_source_positions
        if audio.max_frames != self._columns:
            raise UnsupportedModel(
                f"{model.name}: the feature extractor gives {audio.max_frames} frames, but the "
                f"audio tower takes {self._columns}"
            )
        self.width: int = self.config.text_config.hidden_size
        self.recipes = Recipes(model.revision, audio=audio)

    def build_encoder(self) -> nn.Module:
        return Qwen2AudioTower(copy.deepcopy(self.config))

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        """One forward pass per group of similar lengths: a long sound would pad many short ones."""
        spectra = [tensor_view(item.arrays[0]) for item in batch]  # [mels, frames + TAIL]
        rows: dict[int, Tensor] = {}
        for group in _group_by_length([spectrum.shape[1] for spectrum in spectra]):
            made = self._forward(module, [spectra[at] for at in group])
            rows |= zip(group, made, strict=True)
        return [rows[at][: item.meta.tokens] for at, item in enumerate(batch)]

    def _forward(self, module: nn.Module, spectra: Sequence[Tensor]) -> Tensor:
        like = next(module.parameters())
        frames = torch.tensor([each.shape[1] - TAIL for each in spectra], device=like.device)
        padded = pad_sequence([each.T for each in spectra], batch_first=True).transpose(1, 2)
        rows: Tensor = module(padded[..., : self._columns].to(like.device, like.dtype), frames)
        return rows


def _group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups, longest first, none under half as long as the longest of its group."""
    group: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if group and 2 * lengths[at] < lengths[group[0]]:
            yield group
            group = []
        group.append(at)
    yield group
