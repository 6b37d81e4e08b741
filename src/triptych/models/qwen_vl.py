"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: media of any shape as patches, positions on three axes.

The families differ in their vision tower and in how a prompt writes the frames of a video.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import layouts, patches
from triptych.models.family import Family, LanguageModel, describe_language_model, parse_config
from triptych.models.layouts import Layout
from triptych.models.processor_settings import grid_image, grid_video, read_settings
from triptych.models.tensors import tensor_view
from triptych.recipe import GridImage, GridVideo, Recipes

# Published checkpoints say "model." where transformers 5 may save "model.language_model.".
PREFIXES = (
    ("model.visual.", "encoder", ""),
    ("visual.", "encoder", ""),
    ("model.language_model.", "language", "model."),
    ("model.", "language", "model."),
)
TIMESTAMPS_CACHED = 4096  # a video has some hundred moments, most at the same seconds as another's


class QwenVL(Family):
    """What the Qwen-VL families share; a subclass says in what it differs."""

    prefixes = PREFIXES
    _frame_rule = "qwen2"  # how frames of a video are chosen: ``recipe.Frames.rule``
    _timed = False  # a video's positions follow its seconds
    _timestamped = False  # the time in words stands before every moment of a video

    def __init__(self, model: Model) -> None:
        config, self._tower = self._stock_classes()
        self.config = parse_config(config, model.config)
        vision = self.config.vision_config
        image = grid_image(read_settings(model.folder))
        video = grid_video(read_settings(model.folder, "video_processor"), self._frame_rule)
        self._merge: int = vision.spatial_merge_size
        self._temporal: int = vision.temporal_patch_size
        self._deepstack = len(getattr(vision, "deepstack_visual_indexes", ()))
        self.width: int = self.config.text_config.hidden_size * (1 + self._deepstack)
        self.recipes = Recipes(model.revision, image=image, video=video)
        self._check(model, read_settings(model.folder).get("temporal_patch_size", 2))
        self._timestamps = TimestampTokens(model.folder) if self._timestamped else None

    @staticmethod
    def _stock_classes() -> tuple[Any, Any]:
        """Configuration and vision tower of transformers."""
        raise NotImplementedError

    def build_encoder(self) -> nn.Module:
        config = copy.deepcopy(self.config.vision_config)
        module: nn.Module = self._tower._from_config(config, attn_implementation="sdpa")
        return module

    def language(self, module: nn.Module) -> LanguageModel:
        if self._timestamps is not None:
            self._timestamps.load()
        return describe_language_model(module, deepstack=self._deepstack)

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
        return layouts.build_layout(3, prompt, at, media, self._place)

    def _place(self, builder: layouts.LayoutBuilder, item: int, id: int, meta: MediaMeta) -> None:
        moments, rows, columns = meta.grid
        rows, columns = rows // self._merge, columns // self._merge
        assert moments * rows * columns == meta.tokens, f"{meta.grid} has not {meta.tokens} tokens"
        advance = max(rows, columns)
        if self._timestamps is None or meta.kind != "video":
            where = layouts.grid_positions(moments, rows, columns, self._interval(meta))
            builder.add_placed_rows(item, id, where, advance)
            return
        where = layouts.grid_positions(1, rows, columns)
        for moment, seconds in enumerate(meta.times):
            builder.add_text((*self._timestamps.ids(seconds), self.config.vision_start_token_id))
            builder.add_placed_rows(item, id, where, advance, row=moment * rows * columns)
            builder.add_text((self.config.vision_end_token_id,))

    def _interval(self, meta: MediaMeta) -> float:
        """How far two moments lie apart in position."""
        if not self._timed or len(meta.times) < 2:
            return 1.0
        step = np.float32(meta.times[1] - meta.times[0])
        return float(np.float32(self.config.vision_config.tokens_per_second) * step)

    def _check(self, model: Model, temporal: int) -> None:
        """That both processors cut media as the tower wants it."""
        image, video = self.recipes.image, self.recipes.video
        assert isinstance(image, GridImage)
        assert isinstance(video, GridVideo)
        wanted = (self.config.vision_config.patch_size, self._temporal, self._merge)
        for kind, given in (
            ("image", (image.patch, temporal, image.merge)),
            ("video", (video.patch, video.frames.patch, video.merge)),
        ):
            if wanted != given:
                raise UnsupportedModel(
                    f"{model.name}: the {kind} processor's patch, temporal patch and merge sizes "
                    f"are {given}, but the vision tower's are {wanted}"
                )


class Qwen2VL(QwenVL):
    """A video's positions count its moments."""

    @staticmethod
    def _stock_classes() -> tuple[Any, Any]:
        from transformers import Qwen2VLConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VisionTransformerPretrainedModel,
        )

        return Qwen2VLConfig, Qwen2VisionTransformerPretrainedModel


class Qwen2_5VL(QwenVL):
    """Window attention over patches; a video's positions follow its seconds."""

    _timed = True

    @staticmethod
    def _stock_classes() -> tuple[Any, Any]:
        from transformers import Qwen2_5_VLConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        return Qwen2_5_VLConfig, Qwen2_5_VisionTransformerPretrainedModel


class Qwen3VL(QwenVL):
    """Deepstack, and a video whose moments stand apart, each after its time in words.

    What the chat template writes around a video's placeholder stays, and the moments with their own
    markers stand inside, as in transformers since version 5. (Its first processor for these models
    put the moments in place of the markers too, and a time could merge with the word before it.)
    """

    _frame_rule = "qwen3"
    _timestamped = True

    @staticmethod
    def _stock_classes() -> tuple[Any, Any]:
        from transformers import Qwen3VLConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        return Qwen3VLConfig, Qwen3VLVisionModel


class TimestampTokens:
    """The times of a video's moments in words, as token ids of the checkpoint's tokenizer.

    Timestamps stand between special tokens, so their ids do not depend on the text around them.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        if not self._file.is_file():
            raise UnsupportedModel(f"{folder.name} has no tokenizer.json, which its videos need")
        self._encode = functools.lru_cache(TIMESTAMPS_CACHED)(self._tokenize)

    def load(self) -> None:
        """Read the tokenizer now, so that the first video does not wait for it."""
        _ = self._tokenizer

    def ids(self, seconds: float) -> tuple[int, ...]:
        return self._encode(f"<{seconds:.1f} seconds>")

    def _tokenize(self, timestamp: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(timestamp, add_special_tokens=False).ids)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Read when needed: a worker that only encodes lays out no prompt."""
        return Tokenizer.from_file(str(self._file))
