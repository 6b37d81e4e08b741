"""Llama 4: pictures as tiles between separators, a mixture of experts, attention in chunks.

Layers with rotary positions attend within chunks of ``attention_chunk_size`` tokens. For a sequence
that fits in one chunk this is ordinary attention, and the torch engine serves no longer one
(``models.limit_context``). The other layers have no rotary positions, but a temperature that grows
with the position. Builds torch modules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Llama4Config
from transformers.models.llama4.modeling_llama4 import (
    Llama4MultiModalProjector,
    Llama4TextModel,
    Llama4TextRotaryEmbedding,
    Llama4VisionModel,
)

from triptych.checkpoint import Model, special_token_ids
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import layouts, patches
from triptych.models.family import CausalLM, Family, parse_config, with_outer_prefix
from triptych.models.layouts import Layout
from triptych.models.processor_settings import (
    BILINEAR,
    HALF,
    Settings,
    read_settings,
    refuse,
    resample,
    tone,
)
from triptych.models.tensors import tensor_view
from triptych.recipe import Normalization, Recipes, TiledImage

PREFIXES = with_outer_prefix(
    (
        ("vision_model.", "encoder", "vision_model."),
        ("multi_modal_projector.", "encoder", "multi_modal_projector."),
        ("language_model.lm_head.", "language", "lm_head."),
        ("language_model.model.", "language", "model."),
    )
)
MARKS = (
    "<|image_start|>",
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image_end|>",
)


class Llama4Vision(nn.Module):
    """Tower with its pixel shuffle, and projector: [tiles, 3, side, side] to rows of a tile."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_model = Llama4VisionModel._from_config(
            config.vision_config, attn_implementation="sdpa"
        )
        self.multi_modal_projector = Llama4MultiModalProjector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.multi_modal_projector(self.vision_model(pixels).last_hidden_state)


class PositionCache:
    """Takes the place of transformers' cache and holds no keys, only the positions of tokens.

    The stock model computes a token's temperature from its index and the length of the cache before
    it. In a batch of many sequences this length differs for every token.
    """

    def __init__(self, positions: Tensor) -> None:  # [1, tokens]
        indices = torch.arange(positions.shape[1], device=positions.device)
        self._before = positions[0] - indices

    def get_seq_length(self, layer: int = 0) -> Tensor:
        return self._before

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return key, value


class FlatLlama4TextModel(Llama4TextModel):
    """The text model over one row of tokens from many sequences, none longer than a chunk."""

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, **rest: Any) -> Any:
        masks = {"full_attention": None, "chunked_attention": None}
        given: dict[str, Any] = rest | {"attention_mask": masks}
        return super().forward(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            past_key_values=PositionCache(position_ids),
            **given,
        )


class Llama4(Family):
    prefixes = PREFIXES

    def __init__(self, model: Model) -> None:
        self.config = parse_config(Llama4Config, model.config)
        vision = self.config.vision_config
        image = _image(read_settings(model.folder), vision)
        if image.side != vision.image_size:
            raise UnsupportedModel(
                f"{model.name}: the image processor makes tiles of {image.side} pixels, "
                f"but the vision tower takes {vision.image_size}"
            )
        known = special_token_ids(model.folder)
        if missing := [mark for mark in MARKS if mark not in known]:
            raise UnsupportedModel(f"the tokenizer of {model.name} lacks {', '.join(missing)}")
        self._marks = tuple(known[mark] for mark in MARKS)
        self._tile = image.tile_tokens
        self._tone = image.tone
        self.width: int = self.config.text_config.hidden_size
        self.recipes = Recipes(model.revision, image=image)

    def build_encoder(self) -> nn.Module:
        return Llama4Vision(copy.deepcopy(self.config))

    def build_language(self) -> nn.Module:
        config = copy.deepcopy(self.config.text_config)
        return CausalLM(config, tied=config.tie_word_embeddings, build=_flat_text)

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        like = next(module.parameters())
        table = bfloat16_table(self._tone, like.device, like.dtype)
        tiles = [tensor_view(item.arrays[0]) for item in batch]  # each [tiles, side, side, 3]
        rows = module(patches.to_planes(torch.cat(tiles).to(like.device), table))
        return [each.flatten(0, 1) for each in rows.split([len(each) for each in tiles])]

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        return layouts.build_layout(1, prompt, at, media, self._place)

    def _place(self, builder: layouts.LayoutBuilder, item: int, _: int, meta: MediaMeta) -> None:
        """Tiles line by line, then the whole picture in one; a small picture is that alone."""
        begin, whole, patch, beside, below, end = self._marks
        down, across = meta.grid
        tiles = down * across if down * across > 1 else 0
        assert meta.tokens == (tiles + 1) * self._tile, f"{meta.grid} has not {meta.tokens} tokens"
        builder.add_text([begin])
        for tile in range(tiles):
            builder.add_rows(item, patch, self._tile, tile * self._tile)
            builder.add_text([below if (tile + 1) % across == 0 else beside])
        builder.add_text([whole])
        builder.add_rows(item, patch, self._tile, tiles * self._tile)
        builder.add_text([end])


@functools.lru_cache(maxsize=16)
def bfloat16_table(tones: Normalization, device: torch.device, dtype: torch.dtype) -> Tensor:
    """As ``patches.levels``, but the stock processor of Llama 4 rounds every step to bfloat16."""
    mean, std = (
        torch.tensor(three, dtype=torch.bfloat16)[:, None] for three in (tones.mean, tones.std)
    )
    values = torch.arange(patches.PIXEL_LEVELS).to(torch.bfloat16) * tones.rescale
    return ((values - mean) / std).reshape(-1).to(device, dtype)


def _flat_text(config: Any) -> nn.Module:
    # Experts are allocated by torch.zeros, which EmptyWeights does not replace.
    with torch.device("meta"):
        model = FlatLlama4TextModel._from_config(config, attn_implementation="sdpa")
    model.rotary_emb = Llama4TextRotaryEmbedding(config)
    return model


def _image(settings: Settings, vision: Any) -> TiledImage:
    needed = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
    refuse(settings, dict.fromkeys(needed, True))
    size = settings.get("size") or {"height": 336, "width": 336}
    if size.get("height") != size.get("width"):
        raise UnsupportedModel(f"the image processor makes tiles of {size}, not square ones")
    side = int(size["height"])
    merged = round(1 / vision.pixel_shuffle_ratio**2)  # patches per row
    return TiledImage(
        side=side,
        max_tiles=settings.get("max_patches", 16),
        resize_to_max_canvas=settings.get("resize_to_max_canvas", False),
        tile_tokens=(side // vision.patch_size) ** 2 // merged,
        resample=resample(settings, BILINEAR),
        tone=tone(settings, HALF, HALF),
    )
