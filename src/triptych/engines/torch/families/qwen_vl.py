"""What the Qwen-VL families share: media of any shape as patches, positions on three axes.

A family of these is a Description: which classes of transformers it is made of, and in what it
differs. Names no family itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triptych.engines.torch import patches
from triptych.engines.torch.arrays import view
from triptych.engines.torch.families import layouts, names, text
from triptych.engines.torch.family import Language, Layout
from triptych.engines.torch.recipes import grid_image, read_settings
from triptych.errors import UnsupportedModel
from triptych.media.base import Prepared
from triptych.messages import MediaMeta
from triptych.model import Model
from triptych.recipe import GridImage, GridVideo, Recipes

# Published checkpoints say "model." where transformers 5 may save "model.language_model.".
PREFIXES = (
    ("model.visual.", "encoder", ""),
    ("visual.", "encoder", ""),
    ("model.language_model.", "language", "model."),
    ("model.", "language", "model."),
)


@dataclass(frozen=True, slots=True)
class Description:
    config: type[Any]
    tower: type[Any]


class QwenVL:
    def __init__(self, model: Model, description: Description) -> None:
        self._description = description
        self._config = text.configure(description.config, model.config)
        vision = self._config.vision_config
        settings = read_settings(model.folder)
        image = grid_image(settings)
        self._temporal: int = vision.temporal_patch_size
        wanted = (vision.patch_size, self._temporal, vision.spatial_merge_size)
        given = (image.patch, settings.get("temporal_patch_size", 2), image.merge)
        if wanted != given:
            raise UnsupportedModel(
                f"{model.name}: the image processor's patch, temporal patch and merge sizes are "
                f"{given}, but the vision tower's are {wanted}"
            )
        self._merge = image.merge
        self.width: int = self._config.text_config.hidden_size
        self.recipes = Recipes(model.revision, image=image)

    def build_encoder(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.vision_config)
        module: nn.Module = self._description.tower._from_config(config, attn_implementation="sdpa")
        return module

    def build_language(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.text_config)
        return text.TextPart(config, tied=self._config.tie_word_embeddings)

    def weight_name(self, name: str) -> tuple[str, str] | None:
        return names.rename(name, PREFIXES)

    def language(self, module: nn.Module, model: Model) -> Language:
        return text.describe(module)

    def encode(self, module: nn.Module, batch: Sequence[Prepared]) -> list[Tensor]:
        recipe = self.recipes.image if batch[0].meta.kind == "image" else self.recipes.video
        assert isinstance(recipe, GridImage | GridVideo)
        pixels = [view(item.arrays[0]) for item in batch]
        output = module(
            patches.of_all(pixels, recipe, self._temporal, next(module.parameters())),
            grid_thw=torch.tensor([item.meta.grid for item in batch]),
        )
        return list(output.pooler_output.split([item.meta.tokens for item in batch]))

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        draft = layouts.Draft(3)
        for item, (words, place) in enumerate(layouts.between(prompt, at)):
            draft.text(words)
            if place is not None:
                self._place(draft, item, prompt[place], media[item])
        return draft.layout()

    def _place(self, draft: layouts.Draft, item: int, id: int, meta: MediaMeta) -> None:
        frames, rows, columns = meta.grid
        rows, columns = rows // self._merge, columns // self._merge
        assert frames * rows * columns == meta.tokens, f"{meta.grid} has not {meta.tokens} tokens"
        draft.placed(item, id, layouts.grid(frames, rows, columns), max(rows, columns))
