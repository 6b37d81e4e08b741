from __future__ import annotations

import numpy as np
import pytest
import torch

from support import stock_images
from support.pictures import draw
from support.torch_engine import prepared
from triptych.models import patches
from triptych.models.processor_settings import grid_image, square_image, tone
from triptych.models.tensors import tensor_view
from triptych.recipe import FrameSampling, GridVideo, Normalization

CPU = torch.device("cpu")
LIKE = torch.empty(0)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64},
        {
            "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 9},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.1, 0.2, 0.3],
            "rescale_factor": 1 / 127,
            "resample": 2,
            "patch_size": 7,
            "temporal_patch_size": 1,
        },
        {"do_normalize": False},
    ],
)
@pytest.mark.parametrize("index", range(4))
def test_patches_of_pictures_equal_stock(settings, index) -> None:
    recipe = grid_image(settings)
    picture = draw(index)
    stock = stock_images.inputs(
        {"image_processor_type": "Qwen2VLImageProcessor", **settings}, [picture]
    )
    item = prepared(recipe, picture)
    temporal = settings.get("temporal_patch_size", 2)
    ours = patches.patchify_all([tensor_view(item.arrays[0])], recipe, temporal, LIKE)
    if settings.get("do_normalize", True):
        assert torch.equal(ours, stock["pixel_values"])
    torch.testing.assert_close(ours, stock["pixel_values"], atol=1e-6, rtol=1e-6)
    assert [list(item.meta.grid)] == stock["image_grid_thw"].tolist()
    assert item.cost == len(ours)


@pytest.mark.parametrize("index", range(4))
def test_planes_equal_stock(index) -> None:
    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    named = {"image_processor_type": "CLIPImageProcessor", **settings}
    stock = stock_images.inputs(named, [draw(index)])["pixel_values"]
    recipe = square_image(settings, patch=14, extra_tokens=0)
    item = prepared(recipe, draw(index))
    table = patches.normalization_table(recipe.tone, CPU, torch.float32)
    assert torch.equal(patches.to_planes(tensor_view(item.arrays[0])[None], table), stock)


def test_patches_of_videos_are_in_the_stock_order() -> None:
    """Frames of a temporal patch lie inside it; a single colour's value as the stock fuses it."""
    recipe = GridVideo(
        FrameSampling("qwen2", 2.0, 0, 4, 768, 2), 14, 2, 1, 1 << 30, True, 3, tone({})
    )
    pixels = np.random.default_rng(0).integers(0, 256, (4, 56, 84, 3), np.uint8)
    ours = patches.patchify_all([torch.from_numpy(pixels)], recipe, 2, LIKE)
    mean = torch.tensor(recipe.tone.mean) * (1.0 / recipe.tone.rescale)
    std = torch.tensor(recipe.tone.std) * (1.0 / recipe.tone.rescale)
    moved = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    values = (moved - mean[:, None, None]) / std[:, None, None]
    expected = torch.empty(2 * 4 * 6, 3 * 2 * 14 * 14)
    at = 0
    for moment in range(2):
        for row in range(2):
            for column in range(3):
                for inner in range(4):
                    top, left = 28 * row + 14 * (inner // 2), 28 * column + 14 * (inner % 2)
                    part = values[2 * moment : 2 * moment + 2, :, top : top + 14, left : left + 14]
                    expected[at] = part.transpose(0, 1).reshape(-1)
                    at += 1
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(
    ("frames", "patch", "merge", "temporal"), [(1, 14, 2, 2), (4, 16, 2, 2), (1, 7, 1, 1)]
)
def test_a_cpu_gives_what_a_gpu_looks_up(dtype, frames, patch, merge, temporal) -> None:
    side = patch * merge
    shape = (frames, 3 * side, 5 * side, 3)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    chosen = (
        Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)) if dtype == torch.uint8 else tone({})
    )
    table = patches.normalization_table(chosen, CPU, dtype)
    by_table = patches.patchify_by_table(pixels, table, patch, merge, temporal)
    ours = patches.patchify(pixels, chosen, dtype, patch, merge, temporal)
    assert ours.dtype == dtype
    assert torch.equal(ours, by_table)


def test_the_table_is_rounded_once() -> None:
    wide = patches.normalization_table(tone({}), CPU, torch.float32)
    narrow = patches.normalization_table(tone({}), CPU, torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), narrow)
