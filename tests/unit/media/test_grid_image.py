from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from support import stock_images
from support.pictures import draw
from triptych.errors import ImageTooSmall
from triptych.media import images
from triptych.recipe import GridImage, Normalization

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SIZES = [
    (1, 1),
    (1, 200),
    (3, 7),
    (28, 28),
    (29, 83),
    (56, 56),
    (200, 1),
    (333, 111),
    (640, 480),
    (97, 1201),
    (1013, 1009),
]


def recipe(
    least: int = 56 * 56, most: int = 28 * 28 * 1280, patch: int = 14, resample: int = 3
) -> GridImage:
    return GridImage(patch, 2, least, most, resample, TONE)


def stock(picture: Image.Image, wanted: GridImage) -> tuple[np.ndarray, list[int]]:
    """The stock processor's pixels [height, width, 3] before the tone, out of their patches."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": wanted.min_pixels,
        "max_pixels": wanted.max_pixels,
        "patch_size": wanted.patch,
        "resample": wanted.resample,
        "temporal_patch_size": 1,
        "do_rescale": False,
        "do_normalize": False,
    }
    got = {name: value.numpy() for name, value in stock_images.inputs(settings, [picture]).items()}
    (_, rows, columns), p = got["image_grid_thw"].tolist()[0], wanted.patch
    pixels = got["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, p, p)
    pixels = pixels.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)
    return pixels, [1, rows, columns]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [28 * 28 * 16, 28 * 28 * 1280])
def test_equals_stock(size: tuple[int, int], most: int) -> None:
    picture, wanted = draw(size[0] % 4, *size), recipe(most=most)
    meta, (pixels,), cost = images.prepare_grid_image(picture, wanted)
    expected, shape = stock(picture, wanted)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, expected)
    assert [*meta.grid] == shape
    assert (meta.kind, meta.key) == ("image", b"")
    assert cost == meta.grid[1] * meta.grid[2] == meta.tokens * 4


@pytest.mark.parametrize("wanted", [recipe(28 * 28 * 4, 28 * 28 * 9, 7, 2), recipe(patch=16)])
def test_other_settings_act_as_in_stock(wanted: GridImage) -> None:
    picture = draw(5)
    _, (pixels,), _ = images.prepare_grid_image(picture, wanted)
    assert np.array_equal(pixels, stock(picture, wanted)[0])


@pytest.mark.parametrize("size", [(1, 201), (4096, 1)])
def test_b28_refuses_needles(size: tuple[int, int]) -> None:
    with pytest.raises(ImageTooSmall, match="200 times"):
        images.prepare_grid_image(draw(0, *size), recipe())


def test_pictures_that_share_the_limits() -> None:
    alone = images.fit_to_grid(480, 640, 28, 3136, 100_000)
    assert alone == (252, 364)
    assert images.fit_to_grid(480, 640, 28, 3136, 400_000, frames=4, padded=4) == alone
    assert images.fit_to_grid(480, 640, 28, 3136, 400_000, frames=3, padded=4) > alone
