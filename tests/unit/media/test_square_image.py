from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from support import stock_images
from support.pictures import draw
from triptych.media import images
from triptych.recipe import Normalization, SquareImage

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SIZES = [(1, 1), (3, 7), (28, 28), (29, 83), (56, 56), (333, 111), (640, 480), (97, 1201)]


def recipe(short: int, side: int | None = None) -> SquareImage:
    return SquareImage(short, side or short, 14, 0, 3, TONE)


def stock(picture: Image.Image, wanted: SquareImage) -> np.ndarray:
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": wanted.short},
        "crop_size": {"height": wanted.side, "width": wanted.side},
        "do_rescale": False,
        "do_normalize": False,
    }
    got = stock_images.inputs(settings, [picture])["pixel_values"][0]
    return got.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wanted", [recipe(56), recipe(336), recipe(70, 56)])
def test_equals_stock(size: tuple[int, int], wanted: SquareImage) -> None:
    picture = draw(1, *size)
    meta, (pixels,), cost = images.prepare_square_image(picture, wanted)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, stock(picture, wanted))
    assert meta.tokens == cost == (wanted.side // 14) ** 2
    assert meta.grid == ()


def test_extra_tokens_are_counted() -> None:
    meta, _, cost = images.prepare_square_image(draw(1), SquareImage(28, 28, 14, 1, 3, TONE))
    assert (meta.tokens, cost) == (5, 4)


@pytest.mark.parametrize("size", [(1, 300), (700, 2)])
def test_a_very_long_picture_is_cut_before_it_is_resized(size: tuple[int, int]) -> None:
    picture = draw(1, *size)
    ours = images.center_crop(np.asarray(picture), recipe(56)).astype(int)
    assert np.abs(ours - stock(picture, recipe(56))).max() <= 2


def test_b28_a_needle_takes_little_memory() -> None:
    needle = np.zeros((4096, 1, 3), np.uint8)  # resized whole it would take 1.4 GB
    assert images.center_crop(needle, recipe(336)).shape == (336, 336, 3)
