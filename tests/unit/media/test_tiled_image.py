from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from support.goldens import Golden, digest, load, picture
from triptych.media import images
from triptych.recipe import Normalization, TiledImage

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def recipe(max_tiles: int = 16, side: int = 336, to_max: bool = False) -> TiledImage:
    return TiledImage(side, max_tiles, to_max, 144, 2, TONE)


@pytest.mark.parametrize("golden", load("llama4.npz"), ids=lambda golden: golden.name)
def test_equals_stock(golden: Golden) -> None:
    wanted = recipe(
        golden.settings["max_patches"],
        to_max=golden.settings.get("resize_to_max_canvas", False),
    )
    meta, (pixels,), cost = images.prepare_tiled_image(
        Image.fromarray(picture(*golden.shape)), wanted
    )
    assert [*meta.grid] == golden.result["ratio"]
    planes = pixels.transpose(0, 3, 1, 2)
    assert [*planes.shape] == golden.result["shape"]
    assert np.array_equal(planes.reshape(-1)[:: golden.step], golden.rows[0])
    assert digest(planes) == golden.result["digest"]
    assert meta.tokens == len(pixels) * 144
    assert cost == meta.tokens * 4


@pytest.mark.parametrize(
    ("size", "to_max", "expected"),
    [
        ((56, 56), False, (1, 1)),
        ((10, 10), False, (1, 1)),
        ((10, 10), True, (2, 2)),
        ((57, 56), False, (2, 1)),
        ((100, 300), False, (1, 3)),  # reduced as for (1, 4), with less padding
        ((9999, 10), False, (4, 1)),
        ((1, 1), True, (2, 2)),
    ],
)
def test_canvas(size: tuple[int, int], to_max: bool, expected: tuple[int, int]) -> None:
    assert images.best_tile_grid(*size, recipe(4, 56, to_max)) == expected


@pytest.mark.parametrize("size", [(1, 1), (1, 4096), (4096, 1)])
def test_b28_needles(size: tuple[int, int]) -> None:
    meta, (pixels,), _ = images.prepare_tiled_image(
        Image.new("RGB", size, (9, 9, 9)), recipe(4, 56)
    )
    assert meta.tokens == len(pixels) * 144
    assert (pixels.reshape(len(pixels), -1).max(axis=1) == 9).any()
