from __future__ import annotations

from pathlib import Path

import pytest

from triptych.errors import UnsupportedModel
from triptych.models.processor_settings import (
    grid_image,
    grid_video,
    read_settings,
    square_image,
    tone,
)
from triptych.recipe import Normalization


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1}')
    assert read_settings(tmp_path) == {"max_pixels": 1}
    assert read_settings(tmp_path, "video_processor") == {"max_pixels": 1}  # as in stock
    (tmp_path / "video_preprocessor_config.json").write_text('{"max_pixels": 3}')
    assert read_settings(tmp_path, "video_processor") == {"max_pixels": 3}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 2}}')
    assert read_settings(tmp_path) == {"max_pixels": 2}
    assert read_settings(tmp_path, "video_processor") == {"max_pixels": 3}
    (tmp_path / "processor_config.json").write_text('{"processor_class": "X"}')
    assert read_settings(tmp_path) == {"max_pixels": 1}
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"processor_config\.json"):
        read_settings(tmp_path)


def test_pixel_limits_can_be_said_in_three_ways() -> None:
    for settings in (
        {"min_pixels": 3, "max_pixels": 9},
        {"size": {"shortest_edge": 3, "longest_edge": 9}},
        {"size": {"min_pixels": 3, "max_pixels": 9}},
    ):
        recipe = grid_image(settings)
        assert (recipe.min_pixels, recipe.max_pixels) == (3, 9)
    recipe = grid_image({"size": None})
    assert (recipe.min_pixels, recipe.max_pixels) == (56 * 56, 28 * 28 * 1280)


def test_videos_are_cut_as_the_stock_classes_do_by_default() -> None:
    two, three = grid_video({}, "qwen2"), grid_video({}, "qwen3")
    assert (two.min_pixels, two.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    assert (three.min_pixels, three.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert (two.patch, two.per_frame, three.patch, three.per_frame) == (14, True, 16, False)
    assert three.tone.mean == three.tone.std == (0.5, 0.5, 0.5)
    for recipe in (two, three):
        frames = recipe.frames
        assert (frames.fps, frames.least, frames.most, frames.patch) == (2.0, 4, 768, 2)
    told = grid_video({"fps": 1, "min_frames": 2, "max_frames": 9, "size": {}}, "qwen3")
    assert (told.frames.fps, told.frames.least, told.frames.most) == (1.0, 2, 9)


def test_steps_that_are_left_out_change_nothing() -> None:
    assert tone({"do_rescale": False, "do_normalize": False}) == Normalization(
        1.0, (0, 0, 0), (1, 1, 1)
    )
    assert tone({"rescale_factor": 0.5, "do_normalize": False}).rescale == 0.5
    assert tone({"image_mean": [1, 2, 3]}).mean == (1.0, 2.0, 3.0)
    with pytest.raises(UnsupportedModel, match="image_std"):
        tone({"image_std": [1]})


@pytest.mark.parametrize(
    "settings", [{"do_resize": False}, {"do_pad": True}, {"crop_size": 225}, {"resample": 1}]
)
def test_settings_that_would_change_the_result_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel):
        square_image(settings, patch=14, extra_tokens=0)
