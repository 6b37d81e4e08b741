"""Qwen2.5-Omni's thinker: pictures, videos with or without their sound, and sound, to words.

Takes whole checkpoints and those of the thinker alone. Speech is not served: the weights of talker
and token2wav are never read.

The rows of a video with sound are those of its frames, then those of its sound. In the prompt the
two take turns, ``seconds_per_chunk`` at a time, so that such an item has several spans.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen2_5OmniThinkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniVisionEncoder,
)

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import layouts, patches
from triptych.models.family import CausalLM, Family, parse_config, with_outer_prefix
from triptych.models.layouts import Layout
from triptych.models.processor_settings import grid_image, grid_video, mel_audio, read_settings
from triptych.models.tensors import tensor_view
from triptych.recipe import GridImage, GridVideo, Recipes
from triptych.transfer.base import Array

PREFIXES = (
    ("talker.", "", ""),
    ("token2wav.", "", ""),
    *with_outer_prefix(
        with_outer_prefix(
            (
                ("audio_tower.", "encoder", "audio_tower."),
                ("visual.", "encoder", "visual."),
                ("language_model.", "language", "model."),
            )
        ),
        "thinker.",
    ),
    ("thinker.", "language", ""),
)
PIXEL_LIMITS = ("min_pixels", "max_pixels", "size")


class OmniTowers(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.visual: Any = Qwen2_5OmniVisionEncoder._from_config(
            config.vision_config, attn_implementation="sdpa"
        )
        self.audio_tower: Any = Qwen2_5OmniAudioEncoder._from_config(
            config.audio_config, attn_implementation="sdpa"
        )


class Qwen2_5Omni(Family):
    prefixes = PREFIXES

    def __init__(self, model: Model) -> None:
        config = model.config.get("thinker_config") or model.config
        self.config = parse_config(Qwen2_5OmniThinkerConfig, config)
        vision = self.config.vision_config
        self._temporal: int = vision.temporal_patch_size
        self._merge: int = vision.spatial_merge_size
        image = grid_image(read_settings(model.folder))
        video = grid_video(_video_settings(model), "qwen2", with_audio=True)
        for recipe in (image, video):
            given, wanted = (recipe.patch, recipe.merge), (vision.patch_size, self._merge)
            if given != wanted:
                raise UnsupportedModel(
                    f"{model.name}: the image or video processor's patch and merge sizes are "
                    f"{given}, but the vision tower's are {wanted}"
                )
        hearing = read_settings(model.folder, "feature_extractor")
        audio = mel_audio(hearing, self.config.audio_config, model)
        self._interval = np.float32(self._temporal / video.frames.fps)  # seconds
        self.width: int = self.config.text_config.hidden_size
        self.recipes = Recipes(model.revision, image=image, video=video, audio=audio)

    def build_encoder(self) -> nn.Module:
        return OmniTowers(copy.deepcopy(self.config))

    def build_language(self) -> nn.Module:
        config = copy.deepcopy(self.config.text_config)
        return CausalLM(config, tied=self.config.tie_word_embeddings, build=_text_model)

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        assert isinstance(module, OmniTowers)
        kind = batch[0].meta.kind
        if kind == "audio":
            return _encode_audio(module, [item.arrays[0] for item in batch])
        recipe = self.recipes.image if kind == "image" else self.recipes.video
        assert isinstance(recipe, GridImage | GridVideo)
        like = next(module.parameters())
        frame_rows = module.visual(
            patches.patchify_all(
                [tensor_view(i.arrays[0]) for i in batch], recipe, self._temporal, like
            ),
            grid_thw=torch.tensor([item.meta.grid for item in batch], device=like.device),
        ).pooler_output.split([item.meta.tokens - item.meta.audio_tokens for item in batch])
        audio_rows = iter(
            _encode_audio(module, [item.arrays[1] for item in batch if item.meta.audio_tokens])
        )
        return [
            torch.cat((rows, next(audio_rows))) if item.meta.audio_tokens else rows
            for item, rows in zip(batch, frame_rows, strict=True)
        ]

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        return layouts.build_layout(3, prompt, at, media, self._place)

    def _place(self, builder: layouts.LayoutBuilder, item: int, id: int, meta: MediaMeta) -> None:
        if meta.kind == "audio":
            builder.add_rows(item, id, meta.tokens)
        elif meta.audio_tokens:
            self._interleave(builder, item, id, meta)
        else:
            positions = self._grid_positions(meta)
            builder.add_placed_rows(item, id, positions, _advance(positions))

    def _grid_positions(self, meta: MediaMeta) -> np.ndarray:
        """Positions [3, tokens] of a picture or of a video's frames.

        As in the stock processor a video's frames lie as far apart as the rate says that is asked
        for, though few or very many are sampled at another.
        """
        frames, rows, columns = meta.grid
        axes = np.indices((frames, rows // self._merge, columns // self._merge), dtype=np.int64)
        where = axes.reshape(3, -1)
        interval = np.float32(meta.interval) if meta.interval else self._interval
        seconds = where[0].astype(np.float32) * interval
        where[0] = seconds * np.float32(self.config.position_id_per_seconds)
        assert where.shape[1] == meta.tokens - meta.audio_tokens, (
            f"{meta.grid} and {meta.tokens} tokens"
        )
        return where

    def _interleave(
        self, builder: layouts.LayoutBuilder, item: int, id: int, meta: MediaMeta
    ) -> None:
        """A video's frames and sound in turns, between markers of sound.

        These markers share the positions of the vision markers around them.
        """
        config = self.config
        builder.position -= builder.after_prompt_text
        builder.add_text([config.audio_start_token_id])
        frames = self._grid_positions(meta)
        audio = np.broadcast_to(
            np.arange(meta.audio_tokens, dtype=np.int64), (3, meta.audio_tokens)
        )
        length = int(config.position_id_per_seconds * config.seconds_per_chunk)
        advance = 0
        for shown, played in zip_longest(_turns(frames[0], length), _turns(audio[0], length)):
            if shown is not None:
                builder.add_placed_rows(item, id, frames[:, shown], 0, shown.start)
                advance = _advance(frames[:, shown])
            if played is not None:
                row = frames.shape[1] + played.start
                builder.add_placed_rows(item, config.audio_token_id, audio[:, played], 0, row)
                advance = _advance(audio[:, played])
        builder.position += advance  # from the last turn's end, though one before it may end later
        builder.add_text([config.audio_end_token_id])
        builder.position -= 1


def _text_model(config: Any) -> nn.Module:
    module: nn.Module = Qwen2_5OmniThinkerTextModel._from_config(config, attn_implementation="sdpa")
    return module


def _encode_audio(module: OmniTowers, spectra: Sequence[Array]) -> list[Tensor]:
    """Rows of each sound: the tower takes them one after another, in windows of its own."""
    if not spectra:
        return []
    like = next(module.parameters())
    tensors = [tensor_view(spectrum) for spectrum in spectra]  # [mels, frames]
    frames = torch.tensor([tensor.shape[1] for tensor in tensors])
    rows = module.audio_tower(
        torch.cat(tensors, dim=1).to(like.device, like.dtype), feature_lens=frames.to(like.device)
    ).last_hidden_state
    _, lengths = module.audio_tower._get_feat_extract_output_lengths(frames)
    return list(rows.split(lengths.tolist()))


def _turns(where: np.ndarray, length: int) -> Iterator[slice]:
    """Runs of rising positions, a new one when the next ``length`` of them begins."""
    start, turn = 0, 1
    for at, position in enumerate(where.tolist()):
        if position >= turn * length:
            yield slice(start, at)
            start, turn = at, turn + 1
    yield slice(start, len(where))


def _advance(where: np.ndarray) -> int:
    return int(where.max(initial=-1)) + 1


def _video_settings(model: Model) -> dict[str, Any]:
    """Those of the video processor, of its own file only: published checkpoints have none.

    What they say of pixels is for pictures, and stock takes its own limits for videos.
    """
    settings = read_settings(model.folder, "video_processor")
    if settings != read_settings(model.folder):
        return settings
    return {name: value for name, value in settings.items() if name not in PIXEL_LIMITS}
