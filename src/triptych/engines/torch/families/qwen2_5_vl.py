"""Qwen2.5-VL: pictures of any shape, patches with window attention, positions on three axes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from triptych.engines.torch.families import text
from triptych.engines.torch.family import Language, Layout, Pixels
from triptych.engines.torch.preprocess import GridPreprocess, read_settings
from triptych.errors import UnsupportedModel
from triptych.messages import MediaMeta
from triptych.model import Model

# The longest prefix decides: published checkpoints say "model." where transformers 5 may save
# "model.language_model.".
_PREFIXES = (
    ("model.visual.", "encoder", ""),
    ("visual.", "encoder", ""),
    ("model.language_model.", "language", "model."),
    ("model.", "language", "model."),
)


class Qwen25VL:
    def __init__(self, model: Model) -> None:
        self._config = _config(model)
        vision = self._config.vision_config
        self.hidden: int = self._config.text_config.hidden_size
        self._preprocess = GridPreprocess(read_settings(model.folder))
        wanted = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        given = (self._preprocess.patch, self._preprocess.frames, self._preprocess.merge)
        if wanted != given:
            raise UnsupportedModel(
                f"{model.name}: the image processor's patch, temporal patch and merge sizes are "
                f"{given}, but the vision tower's are {wanted}"
            )

    def build_encoder(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.vision_config)
        return Qwen2_5_VisionTransformerPretrainedModel._from_config(
            config, attn_implementation="sdpa"
        )

    def build_language(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.text_config)
        return text.TextPart(config, tied=self._config.tie_word_embeddings)

    def weight_name(self, name: str) -> tuple[str, str] | None:
        if name.endswith(".inv_freq"):  # computed, though some old checkpoints store it
            return None
        for prefix, part, renamed in _PREFIXES:
            if name.startswith(prefix):
                return part, renamed + name.removeprefix(prefix)
        return "language", name

    def language(self, module: nn.Module, model: Model) -> Language:
        return text.describe(module)

    def preprocess(self, picture: np.ndarray) -> Pixels:
        return self._preprocess(picture)

    def encode(self, module: nn.Module, batch: Sequence[Pixels]) -> list[Tensor]:
        like = next(module.parameters())
        values = np.concatenate([pixels.values for pixels in batch])  # [patches, patch values]
        output = module(
            torch.from_numpy(values).to(like.device, like.dtype),
            grid_thw=torch.tensor([pixels.grid for pixels in batch], device=like.device),
        )
        return list(output.pooler_output.split([pixels.tokens for pixels in batch]))

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        positions: list[np.ndarray] = []
        start = 0  # in prompt
        position = 0
        for place, meta in zip(at, media, strict=True):
            ids.extend(prompt[start:place])
            positions.append(_line(position, place - start))
            position += place - start
            spans.append((len(ids), meta.tokens))
            ids.extend([prompt[place]] * meta.tokens)
            grid, step = self._grid(position, meta)
            positions.append(grid)
            position += step
            start = place + 1
        ids.extend(prompt[start:])
        positions.append(_line(position, len(prompt) - start))
        joined = np.concatenate(positions, axis=1)
        return Layout(
            ids=tuple(ids),
            spans=tuple(spans),
            positions=torch.from_numpy(joined),
            next_position=int(joined.max(initial=-1)) + 1,
        )

    def _grid(self, position: int, meta: MediaMeta) -> tuple[np.ndarray, int]:
        """Positions [3, tokens] of a picture: its frame, row and column; and the room it takes."""
        frames, rows, columns = meta.grid
        rows, columns = rows // self._preprocess.merge, columns // self._preprocess.merge
        assert frames * rows * columns == meta.tokens, f"{meta.grid} has not {meta.tokens} tokens"
        axes = np.indices((frames, rows, columns), dtype=np.int64).reshape(3, -1)
        return axes + position, max(rows, columns)


def _line(position: int, length: int) -> np.ndarray:
    """Positions [3, length] of text: the same on every axis."""
    return np.broadcast_to(np.arange(position, position + length, dtype=np.int64), (3, length))


def _config(model: Model) -> Any:
    return Qwen2_5_VLConfig.from_dict(copy.deepcopy(model.config))


FAMILY = Qwen25VL
