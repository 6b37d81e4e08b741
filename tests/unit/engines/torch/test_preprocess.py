from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.pictures import draw
from triptych.engines.torch.preprocess import GridPreprocess, SquarePreprocess, read_settings
from triptych.errors import ImageTooSmall, UnsupportedModel

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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_pixels", [28 * 28 * 16, 28 * 28 * 1280])
def test_grid_equals_stock(size: tuple[int, int], max_pixels: int) -> None:
    settings = {"min_pixels": 56 * 56, "max_pixels": max_pixels}
    picture = draw(size[0] % 4, *size)
    stock = Qwen2VLImageProcessorPil(**settings)(picture, return_tensors="np")
    ours = GridPreprocess(settings)(np.asarray(picture))
    assert ours.values.dtype == np.float32
    assert np.array_equal(ours.values, stock["pixel_values"])
    assert [list(ours.grid)] == stock["image_grid_thw"].tolist()
    assert ours.patches == len(ours.values)
    assert ours.tokens * 4 == ours.patches


@pytest.mark.parametrize("size", [*SIZES[:1], *SIZES[2:6], *SIZES[7:]])
@pytest.mark.parametrize("side", [56, 336])
def test_square_equals_stock(size: tuple[int, int], side: int) -> None:
    settings = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    picture = draw(1, *size)
    stock = CLIPImageProcessorPil(**settings)(picture, return_tensors="np")["pixel_values"][0]
    ours = SquarePreprocess(settings, patch=14, extra_tokens=0)(np.asarray(picture))
    assert np.array_equal(ours.values, stock)
    assert ours.tokens == (side // 14) ** 2


@pytest.mark.parametrize("size", [(1, 300), (700, 2)])
def test_a_very_long_picture_is_cut_before_it_is_resized(size: tuple[int, int]) -> None:
    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    picture = draw(1, *size)
    stock = CLIPImageProcessorPil(**settings)(picture, return_tensors="np")["pixel_values"][0]
    ours = SquarePreprocess(settings, patch=14, extra_tokens=0)(np.asarray(picture))
    assert np.abs(ours.values - stock).max() <= 1.01 / 255 / 0.26  # one step of 255


def test_a_needle_takes_little_memory() -> None:
    settings = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    needle = np.zeros((4096, 1, 3), np.uint8)  # resized whole it would take 1.4 GB
    assert SquarePreprocess(settings, patch=14, extra_tokens=0)(needle).values.shape[1:] == (
        336,
        336,
    )


@pytest.mark.parametrize("size", [(1, 201), (4096, 1)])
def test_grid_refuses_needles(size: tuple[int, int]) -> None:
    with pytest.raises(ImageTooSmall, match="200 times"):
        GridPreprocess({})(np.zeros((*size, 3), np.uint8))


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1}')
    assert read_settings(tmp_path) == {"max_pixels": 1}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 2}}')
    assert read_settings(tmp_path) == {"max_pixels": 2}
    (tmp_path / "processor_config.json").write_text('{"processor_class": "X"}')
    assert read_settings(tmp_path) == {"max_pixels": 1}
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"processor_config\.json"):
        read_settings(tmp_path)


def test_other_settings_act_as_in_stock() -> None:
    settings = {
        "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 9},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.1, 0.2, 0.3],
        "rescale_factor": 1 / 127,
        "resample": 2,
        "patch_size": 7,
        "temporal_patch_size": 1,
    }
    picture = draw(5)
    stock = Qwen2VLImageProcessorPil(**settings)(picture, return_tensors="np")
    assert np.array_equal(
        GridPreprocess(settings)(np.asarray(picture)).values, stock["pixel_values"]
    )


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"do_pad": True}, {"crop_size": 225}])
def test_settings_that_would_change_the_result_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel):
        SquarePreprocess(settings, patch=14, extra_tokens=0)
