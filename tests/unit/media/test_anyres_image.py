from __future__ import annotations

import numpy as np
import pytest
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from support import stock_images
from support.pictures import draw
from triptych.media import images
from triptych.recipe import AnyresImage, Normalization, SquareImage

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
STOCK = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
PLAIN = {"do_rescale": False, "do_normalize": False}
SMALL = tuple((height // 6, width // 6) for height, width in STOCK)
SIZES = [(1, 1), (1, 400), (333, 111), (112, 56), (57, 110), (640, 480), (97, 1201), (168, 168)]


def recipe(side: int, short: int | None = None) -> AnyresImage:
    points = STOCK if side == 336 else SMALL
    return AnyresImage(points, SquareImage(short or side, side, 14, 0, 3, TONE))


def settings(wanted: AnyresImage) -> dict[str, object]:
    return {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": wanted.square.short},
        "crop_size": {"height": wanted.square.side, "width": wanted.square.side},
        "image_grid_pinpoints": [[*point] for point in wanted.pinpoints],
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wanted", [recipe(56), recipe(336), recipe(56, 70)])
def test_equals_stock(size: tuple[int, int], wanted: AnyresImage) -> None:
    picture = draw(2 + size[0] % 2, *size)
    meta, (pixels,), cost = images.prepare_anyres_image(picture, wanted)
    expected = stock_images.inputs(settings(wanted) | PLAIN, [picture])
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, expected["pixel_values"][0].permute(0, 2, 3, 1).numpy())
    assert [*meta.grid] == expected["image_sizes"][0].tolist()
    assert cost == len(pixels) * (wanted.square.side // 14) ** 2


def test_tones_of_padding_are_those_of_black() -> None:
    picture, wanted = draw(1, 300, 40), recipe(56)
    _, (pixels,), _ = images.prepare_anyres_image(picture, wanted)
    with_tone = stock_images.inputs(settings(wanted), [picture])["pixel_values"][0]
    black = with_tone[1:, :, 0, 0]
    assert (pixels[1:, 0, 0] == 0).all()
    assert np.allclose(black, [-1.79226253, -1.75209713, -1.48021979])


@pytest.mark.parametrize("size", [(h, w) for h in (1, 40, 333, 700) for w in (3, 90, 336, 1500)])
@pytest.mark.parametrize("wanted", [recipe(56), recipe(336)])
def test_tokens_are_those_of_the_stock_processor(
    size: tuple[int, int], wanted: AnyresImage
) -> None:
    processor = LlavaNextProcessor.__new__(LlavaNextProcessor)
    processor.image_processor = LlavaNextImageProcessorPil(**settings(wanted))
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    side = wanted.square.side
    expected = processor._get_number_of_features(*size, side, side)
    assert images.anyres_token_count(*size, wanted) == expected
    canvas = images.best_anyres_canvas(*size, wanted.pinpoints)
    tiles = image_size_to_num_patches(size, [[*point] for point in wanted.pinpoints], side)
    assert canvas[0] * canvas[1] // side**2 + 1 == tiles
