"""Prepared media as the inputs that transformers' processor of a model gives to its towers.

An engine with its own encoder also has its own preprocessing, in Python and beside its event loop.
Here the decode pool has decoded and resized the media; the rest is arithmetic on 8-bit pixels, done
in threads. The engine gets the same tensors under the same names as from transformers' processor.
This module knows recipes and shapes, and no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from triptych.checkpoint import KINDS
from triptych.engines.adapter.base import in_thread
from triptych.engines.base import Allocate, Media
from triptych.engines.checks import check_item_length
from triptych.engines.torch.encoder import with_embeds_recipes
from triptych.errors import EngineFailed
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import patches
from triptych.models.family import Family
from triptych.models.tensors import TORCH_DTYPES, tensor_view
from triptych.recipe import (
    AnyresImage,
    GridImage,
    GridVideo,
    MelAudio,
    Normalization,
    Recipes,
    SquareImage,
    SquareVideo,
    TiledImage,
)
from triptych.transfer.base import Array

THREADS = 2
Recipe = GridImage | SquareImage | AnyresImage | TiledImage | GridVideo | SquareVideo | MelAudio


class ProcessorInputEncoder:
    """The Encoder protocol for an engine whose own towers encode: returns the towers' inputs.

    ``dtype``: of the engine's model. ``context``: items with more tokens than this fit in no
    prompt. ``raw``: patches stay 8 bit, because the engine rescales and normalises them.
    ``kinds``: media that the engine's towers encode; of other kinds it takes embeddings only.
    """

    def __init__(
        self,
        family: Family,
        dtype: str,
        allocate: Allocate,
        context: int,
        *,
        raw: bool = False,
        kinds: Collection[str] = KINDS,
    ) -> None:
        self.counters = {"encoded_items": 0.0}
        self.queued = 0
        self.running = 0
        self._family = family
        self._dtype = dtype
        self._allocate = allocate
        self._context = context
        self._raw = raw
        unseen = {kind: None for kind in KINDS if kind not in kinds}
        self.recipes = replace(with_embeds_recipes(family.recipes, family.width, dtype), **unseen)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="processor-inputs")

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        """One Media for each item, in order, not encoded but ready for the engine's tower."""
        check_item_length(items, self._context)
        self.running += len(items)
        try:
            arrays = await in_thread(lambda: [self._arrays(item) for item in items], self._threads)
        finally:
            self.running -= len(items)
        self.counters["encoded_items"] += len(items)
        return [
            Media(item.meta, own, encoded=False) for item, own in zip(items, arrays, strict=True)
        ]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _arrays(self, item: PreparedMedia) -> tuple[Array, ...]:
        found = []
        for at, given in enumerate(item.arrays):
            # A video's second array is its sound.
            recipe = recipe_of(self.recipes, "audio" if at else item.meta.kind)
            raw = self._raw and isinstance(recipe, GridImage | GridVideo)
            dtype = "uint8" if raw else self._dtype
            tensor = tower_input(tensor_view(given), recipe, self.recipes, dtype)
            array = self._allocate(dtype, tuple(tensor.shape))
            tensor_view(array).copy_(tensor)
            found.append(array)
        return tuple(found)


def recipe_of(recipes: Recipes, kind: str) -> Recipe:
    recipe: Recipe | None = getattr(recipes, kind)
    if recipe is None:
        raise EngineFailed(f"the model of this engine does not take {kind}")
    return recipe


def tower_input(given: Tensor, recipe: Recipe, recipes: Recipes, dtype: str) -> Tensor:
    """8-bit pixels or a spectrum to a tower's input for one item, without a batch axis.

    With ``dtype`` uint8, patches are the unchanged pixels in the tower's order.
    """
    wanted = TORCH_DTYPES[dtype]
    match recipe:
        case GridImage() | GridVideo():
            frames = given if given.ndim == 4 else given[None]
            cut = (recipe.patch, recipe.merge, _temporal(recipes))
            if wanted == torch.uint8:
                return patches.raw_patches(frames, *cut)
            return patches.patchify(frames, recipe.tone, wanted, *cut)
        case SquareImage():
            return _planes(given[None], recipe.tone, wanted)[0]
        case AnyresImage() | SquareVideo():
            return _planes(given, recipe.square.tone, wanted)
        case TiledImage():
            from triptych.models.llama4 import bfloat16_table  # rounds in its own way

            return patches.to_planes(given, bfloat16_table(recipe.tone, given.device, wanted))
        case MelAudio():
            return given.to(wanted)


def _planes(pixels: Tensor, tone: Normalization, dtype: torch.dtype) -> Tensor:
    return patches.to_planes(pixels, patches.normalization_table(tone, pixels.device, dtype))


def _temporal(recipes: Recipes) -> int:
    """Frames in a temporal patch; a picture is repeated to fill one."""
    return recipes.video.frames.patch if isinstance(recipes.video, GridVideo) else 2


def processor_inputs(recipes: Recipes, media: Media) -> dict[str, Tensor]:
    """The outputs of transformers' processor for this item: a batch of one, under its names.

    For an item that is encoded or has no arrays, only the outputs that describe its shape.
    """
    found = shape_inputs(recipes, media.meta)
    if media.encoded or not media.arrays:
        return found
    tensors = [tensor_view(array) for array in media.arrays]
    match media.meta.kind:
        case "image":
            found["pixel_values"] = _batch(tensors[0], recipe_of(recipes, "image"))
        case "video":
            found["pixel_values_videos"] = _batch(tensors[0], recipe_of(recipes, "video"))
        case "audio":
            found |= audio_inputs(tensors[0], recipe_of(recipes, "audio"))
    if media.meta.audio_tokens and len(tensors) > 1:
        found |= audio_inputs(tensors[1], recipe_of(recipes, "audio"))
    return found


def shape_inputs(recipes: Recipes, meta: MediaMeta) -> dict[str, Tensor]:
    """The outputs of transformers' processor that follow from an item's meta alone."""
    match getattr(recipes, meta.kind):
        case GridImage():
            return {"image_grid_thw": torch.tensor([meta.grid])}
        case GridVideo():
            found = {"video_grid_thw": torch.tensor([meta.grid])}
            if len(meta.times) > 1:
                found["second_per_grid_ts"] = torch.tensor([meta.times[1] - meta.times[0]])
            return found
        case AnyresImage():
            return {"image_sizes": torch.tensor([meta.grid])}
        case TiledImage():
            down, across = meta.grid
            whole = 1 if down * across == 1 else down * across + 1
            return {
                "aspect_ratios": torch.tensor([[down, across]]),
                "patches_per_image": torch.tensor([whole]),
            }
    return {}


def audio_inputs(spectrum: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """A spectrum [mels, frames + tail] and the mask of its frames with sound.

    A tower that reads beyond the end of the sound takes spectra of full length only.
    """
    assert isinstance(recipe, MelAudio)
    frames = spectrum.shape[1] - recipe.tail
    length = recipe.max_frames if recipe.tail else frames
    spectrum = pad(spectrum[:, :length], (0, max(0, length - spectrum.shape[1])))
    return {
        "input_features": spectrum[None],
        "feature_attention_mask": (torch.arange(length) < frames).int()[None],
    }


def _batch(tensor: Tensor, recipe: Recipe) -> Tensor:
    """Patches of a batch are concatenated; all other inputs have a batch axis."""
    return tensor if isinstance(recipe, GridImage | GridVideo | TiledImage) else tensor[None]
