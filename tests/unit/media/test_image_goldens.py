"""Pictures from the file to the tower's input, beside what the stock default processors gave.

The same for what tests take for the stock processors elsewhere, where torchvision is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support import pictures, stock_images
from support.goldens import Golden, digest, load, picture
from triptych.config import Limits
from triptych.media import images
from triptych.media.prepare import prepare
from triptych.models import patches
from triptych.models.processor_settings import grid_image, square_image
from triptych.recipe import AnyresImage, GridImage, ImageRecipe, Normalization, Recipes, SquareImage

GOLDENS = load("images.npz")
EXACT = [
    golden
    for golden in GOLDENS
    if golden.processor != "CLIPImageProcessor"
    or max(golden.shape) <= images.EXACT_ASPECT * min(golden.shape)
]
PLAIN = {"do_rescale": False, "do_normalize": False}
NO_TONE = Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
PIL = {
    "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
}


def recipe(golden: Golden) -> ImageRecipe:
    if golden.processor == "Qwen2VLImageProcessor":
        return grid_image(golden.settings)
    one = square_image(golden.settings, patch=14, extra_tokens=0)
    if golden.processor == "CLIPImageProcessor":
        return one
    points = golden.settings["image_grid_pinpoints"]
    return AnyresImage(tuple((height, width) for height, width in points), one)


def ordered(pixels: np.ndarray, golden: Golden, dtype: torch.dtype) -> np.ndarray:
    """As the tower takes it; with 8-bit values where ``dtype`` is an integer's."""
    given, wanted = torch.tensor(pixels), recipe(golden)
    one = wanted.square if isinstance(wanted, AnyresImage) else wanted
    assert isinstance(one, GridImage | SquareImage)
    tone = one.tone if dtype.is_floating_point else NO_TONE
    if isinstance(one, GridImage):
        temporal = golden.settings.get("temporal_patch_size", 2)
        made = patches.patchify(given[None], tone, dtype, one.patch, one.merge, temporal)
        return made.numpy()
    table = patches.normalization_table(tone, torch.device("cpu"), dtype)
    if isinstance(wanted, SquareImage):
        return patches.to_planes(given[None], table).numpy()
    return patches.to_planes(given, table)[None].numpy()


def check(golden: Golden, raw: np.ndarray, toned: np.ndarray) -> None:
    assert [*raw.shape] == golden.result["shape"]
    assert np.array_equal(raw.reshape(-1)[:: golden.step], golden.rows[0])
    assert digest(raw) == golden.result["digest"]
    assert np.abs(toned.reshape(-1)[:: golden.step] - golden.rows[1]).max() < 1e-6


@pytest.mark.parametrize("golden", EXACT, ids=lambda golden: golden.name)
def test_equals_stock(golden: Golden) -> None:
    shown = Image.fromarray(picture(*golden.shape))
    file = memoryview(pictures.encoded(shown, compress_level=1))
    recipes = Recipes("", image=recipe(golden))
    meta, (pixels,), *_ = prepare("image", "file", file, recipes, Limits(), False)
    check(golden, *(ordered(pixels, golden, dtype) for dtype in (torch.uint8, torch.float32)))
    expected = golden.result.get("image_grid_thw") or golden.result.get("image_sizes") or []
    assert [*meta.grid] == expected


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_the_reference_equals_stock(golden: Golden) -> None:
    shown = [Image.fromarray(picture(*golden.shape))]
    settings = {"image_processor_type": golden.processor, **golden.settings}
    raw = stock_images.inputs(settings | PLAIN, shown)
    toned = stock_images.inputs(settings, shown)
    check(golden, raw["pixel_values"].numpy(), toned["pixel_values"].numpy())
    for name in ("image_grid_thw", "image_sizes"):
        if name in golden.result:
            assert raw[name][0].tolist() == golden.result[name]


def test_the_pil_processors_are_two_levels_off_at_most() -> None:
    """They stand in for the default ones where torchvision is missing: how far apart they are.

    Pillow may resize down before across, torch never does. What bicubic overshoots is then cut off
    at other places, and at sharp edges of noise that shows.
    """
    chosen = [golden for golden in GOLDENS if min(golden.shape) > 28 and max(golden.shape) < 1100]
    alike = 0
    for golden in chosen:
        shown = [Image.fromarray(picture(*golden.shape))]
        settings: dict[str, Any] = golden.settings | PLAIN
        ours = stock_images.inputs(settings | {"image_processor_type": golden.processor}, shown)
        theirs = PIL[golden.processor](**settings)(shown, return_tensors="pt")
        apart = (ours["pixel_values"].int() - theirs["pixel_values"].int()).abs()
        assert (apart > 2).float().mean() < 0.01
        alike += int(apart.max()) <= 2
    assert alike > 0.8 * len(chosen)
