"""What the Qwen-VL families share: media of any shape as patches, positions on three axes.

A family of these is a Description: which classes of transformers it is made of, and in what it
differs. Names no family itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import layouts, modules, names, patches
from triptych.models.family import LanguageModel, Layout
from triptych.models.processor_settings import grid_image, grid_video, read_settings
from triptych.models.stamps import TimestampTokens
from triptych.models.tensors import tensor_view
from triptych.recipe import GridImage, GridVideo, Recipes

# Published checkpoints say "model." where transformers 5 may save "model.language_model.".
PREFIXES = (
    ("model.visual.", "encoder", ""),
    ("visual.", "encoder", ""),
    ("model.language_model.", "language", "model."),
    ("model.", "language", "model."),
)


@dataclass(frozen=True, slots=True)
class QwenVariant:
    config: type[Any]
    tower: type[Any]
    frames: str = "qwen2"  # how a video's are chosen: the rule of recipe.Frames
    timed: bool = False  # a video's positions follow its seconds
    stamped: bool = False  # before every moment of a video, its time is said in words


class QwenVL:
    def __init__(self, model: Model, description: QwenVariant) -> None:
        self._description = description
        self._config = modules.parse_config(description.config, model.config)
        vision = self._config.vision_config
        image = grid_image(read_settings(model.folder))
        video = grid_video(read_settings(model.folder, "video_processor"), description.frames)
        self._merge: int = vision.spatial_merge_size
        self._temporal: int = vision.temporal_patch_size
        self._deepstack = len(getattr(vision, "deepstack_visual_indexes", ()))
        self.width: int = self._config.text_config.hidden_size * (1 + self._deepstack)
        self.recipes = Recipes(model.revision, image=image, video=video)
        self._check(model, read_settings(model.folder).get("temporal_patch_size", 2))
        self._stamps = TimestampTokens(model.folder) if description.stamped else None

    def build_encoder(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.vision_config)
        module: nn.Module = self._description.tower._from_config(config, attn_implementation="sdpa")
        return module

    def build_language(self, model: Model) -> nn.Module:
        config = copy.deepcopy(self._config.text_config)
        return modules.CausalLM(config, tied=self._config.tie_word_embeddings)

    def weight_name(self, name: str) -> tuple[str, str] | None:
        return names.map_weight_name(name, PREFIXES)

    def language(self, module: nn.Module, model: Model) -> LanguageModel:
        if self._stamps is not None:
            self._stamps.load()
        return modules.describe_language_model(module, deepstack=self._deepstack)

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        recipe = self.recipes.image if batch[0].meta.kind == "image" else self.recipes.video
        assert isinstance(recipe, GridImage | GridVideo)
        like = next(module.parameters())
        output = module(
            patches.patchify_all(
                [tensor_view(i.arrays[0]) for i in batch], recipe, self._temporal, like
            ),
            grid_thw=torch.tensor([item.meta.grid for item in batch], device=like.device),
        )
        rows = output.pooler_output
        if self._deepstack:
            rows = torch.cat([rows, *output.deepstack_features], dim=-1)
        return list(rows.split([item.meta.tokens for item in batch]))

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        draft = layouts.LayoutBuilder(3)
        for item, (words, place) in enumerate(layouts.split_at_placeholders(prompt, at)):
            draft.words(words)
            if place is not None:
                self._place(draft, item, prompt[place], media[item])
        return draft.layout()

    def _place(self, draft: layouts.LayoutBuilder, item: int, id: int, meta: MediaMeta) -> None:
        moments, rows, columns = meta.grid
        rows, columns = rows // self._merge, columns // self._merge
        assert moments * rows * columns == meta.tokens, f"{meta.grid} has not {meta.tokens} tokens"
        advance = max(rows, columns)
        if self._stamps is None or meta.kind != "video":
            where = layouts.grid_positions(moments, rows, columns, self._interval(meta))
            draft.placed(item, id, where, advance)
            return
        where = layouts.grid_positions(1, rows, columns)
        for moment, seconds in enumerate(meta.times):
            draft.text((*self._stamps.of(seconds), self._config.vision_start_token_id))
            draft.placed(item, id, where, advance, row=moment * rows * columns)
            draft.text((self._config.vision_end_token_id,))

    def _interval(self, meta: MediaMeta) -> float:
        """How far two moments lie apart in position."""
        if not self._description.timed or len(meta.times) < 2:
            return 1.0
        step = np.float32(meta.times[1] - meta.times[0])
        return float(np.float32(self._config.vision_config.tokens_per_second) * step)

    def _check(self, model: Model, temporal: int) -> None:
        """That both processors cut media as the tower wants it."""
        image, video = self.recipes.image, self.recipes.video
        assert isinstance(image, GridImage)
        assert isinstance(video, GridVideo)
        wanted = (self._config.vision_config.patch_size, self._temporal, self._merge)
        for kind, given in (
            ("image", (image.patch, temporal, image.merge)),
            ("video", (video.patch, video.frames.patch, video.merge)),
        ):
            if wanted != given:
                raise UnsupportedModel(
                    f"{model.name}: the {kind} processor's patch, temporal patch and merge sizes "
                    f"are {given}, but the vision tower's are {wanted}"
                )
