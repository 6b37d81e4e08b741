"""LLaVA-NeXT-Video: pictures in tiles with a row's end marked, videos as pooled frames.

Tower, projector, text model and positions are LLaVA's. A picture is the whole of it and tiles of a
larger one; the tiles' patches are put together again, padding is cut away, and every line of
patches ends with the learned ``image_newline``. A frame's patches are pooled before the projector.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlavaNextVideoConfig
from transformers.models.llava_next_video.modeling_llava_next_video import (
    LlavaNextVideoPooler,
    get_anyres_image_grid_shape,
    unpad_image,
)

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.models import llava, patches
from triptych.models.family import Family, parse_config, with_outer_prefix
from triptych.models.processor_settings import Settings, read_settings
from triptych.models.tensors import tensor_view
from triptych.recipe import AnyresImage, FrameSampling, Recipes, SquareImage, SquareVideo

FRAMES = 8  # of a video, where the checkpoint's processor names no number
PREFIXES = (
    *with_outer_prefix(
        (
            ("image_newline", "encoder", "image_newline"),
            ("vision_resampler.", "encoder", "vision_resampler."),
        )
    ),
    *llava.PREFIXES,
)


class LlavaNextVideoVision(llava.LlavaVision):
    """Tower, projector, the end of a line, and what pools the patches of a frame."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.vision_resampler = LlavaNextVideoPooler(config)
        self._config = config

    def frames(self, pixels: Tensor) -> Tensor:
        """[frames, 3, side, side] to [frames, pooled patches, hidden]."""
        return self.multi_modal_projector(self.vision_resampler(self.run_tower(pixels)))

    def pack_tiles(self, tiles: Tensor, size: tuple[int, int]) -> Tensor:
        """One picture of this (height, width): [tiles, patches, hidden] to [tokens, hidden]."""
        whole, parts = tiles[0], tiles[1:]
        vision = self._config.vision_config
        patches = vision.image_size // vision.patch_size  # on a side of a tile
        down, across = get_anyres_image_grid_shape(
            size, self._config.image_grid_pinpoints, vision.image_size
        )
        grid = parts.view(down, across, patches, patches, -1).permute(4, 0, 2, 1, 3)
        grid = unpad_image(grid.reshape(-1, down * patches, across * patches), size)
        ends = self.image_newline[:, None, None].expand(*grid.shape[:2], 1)
        lines = torch.cat((grid, ends), dim=2).flatten(1).transpose(0, 1)
        return torch.cat((whole, lines))


class LlavaNextVideo(Family):
    prefixes = PREFIXES

    def __init__(self, model: Model) -> None:
        self.config = parse_config(LlavaNextVideoConfig, model.config)
        vision = self.config.vision_config
        if self.config.vision_feature_select_strategy != "default":
            raise UnsupportedModel(
                f"{model.name} keeps the vision tower's class token, which is not supported: "
                "set vision_feature_select_strategy to 'default'"
            )
        settings = read_settings(model.folder)
        image = _square(model, settings, vision)
        pinpoints = self.config.image_grid_pinpoints
        if settings.get("image_grid_pinpoints", pinpoints) != pinpoints:
            raise UnsupportedModel(
                f"{model.name}: image_grid_pinpoints of the image processor are not config.json's"
            )
        settings = read_settings(model.folder, "video_processor") or settings
        video = _square(model, settings, vision)
        pooled = vision.image_size // vision.patch_size // self.config.spatial_pool_stride
        count = settings.get("num_frames") or FRAMES
        if settings.get("fps") is not None:
            raise UnsupportedModel("the video processor's fps is not supported; give num_frames")
        self.width: int = self.config.text_config.hidden_size
        self.recipes = Recipes(
            model.revision,
            image=AnyresImage(tuple((height, width) for height, width in pinpoints), image),
            video=SquareVideo(
                FrameSampling("even", fps=0.0, count=count, least=1, most=count, patch=1),
                video,
                frame_tokens=pooled**2,
            ),
        )
        self._image_tone, self._video_tone = image.tone, video.tone

    def build_encoder(self) -> nn.Module:
        return LlavaNextVideoVision(copy.deepcopy(self.config))

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        assert isinstance(module, LlavaNextVideoVision)
        like = next(module.parameters())
        video = batch[0].meta.kind == "video"
        tone = self._video_tone if video else self._image_tone
        table = patches.normalization_table(tone, like.device, like.dtype)
        # Each [tiles or frames, side, side, 3].
        squares = [tensor_view(item.arrays[0]) for item in batch]
        pixels = patches.to_planes(torch.cat(squares).to(like.device), table)
        counts = [len(each) for each in squares]
        if video:
            return [rows.flatten(0, 1) for rows in module.frames(pixels).split(counts)]
        sizes = [(item.meta.grid[0], item.meta.grid[1]) for item in batch]
        tiles = module(pixels).split(counts)
        return [module.pack_tiles(each, size) for each, size in zip(tiles, sizes, strict=True)]


def _square(model: Model, settings: Settings, vision: Any) -> SquareImage:
    """The square of a tile or a frame. ``do_pad`` concerns batches, not single pictures."""
    alone = {name: value for name, value in settings.items() if name != "do_pad"}
    return llava.clip_square(model, alone, vision)
