"""LLaVA-NeXT-Video beside stock transformers: rows, expansion and tokens."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools import tiny
from transformers import LlavaNextVideoProcessor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)

import reference
from support.goldens import load
from support.mixed import Mixed, ready
from support.pictures import draw
from support.stock_contract import check_prefill_and_decode_apart, check_tokens_and_logprobs
from support.torch_engine import whole
from triptych import models
from triptych.checkpoint import open_model
from triptych.errors import UnsupportedModel
from triptych.media import images
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import patches
from triptych.recipe import AnyresImage, SquareVideo

# wide, tall, square, flat, larger than any canvas, smaller than a tile
SHAPES = ((200, 90), (64, 150), (130, 130), (300, 30), (500, 333), (23, 41))
FRAMES = 8


@pytest.fixture(scope="module")
def bench(benches) -> Mixed:
    return benches("llava_next_video")


class Show:
    """Pictures and clips by number, as our sandbox and as the stock processors give them."""

    def __init__(self, bench: Mixed) -> None:
        self._bench = bench

    def image(self, number: int) -> PreparedMedia:
        recipe = self._bench.family.recipes.image
        assert isinstance(recipe, AnyresImage)
        meta, [tiles], cost = images.prepare_anyres_image(_picture(number), recipe)
        return ready(meta, tiles, cost)

    def video(self, number: int) -> PreparedMedia:
        recipe = self._bench.family.recipes.video
        assert isinstance(recipe, SquareVideo)
        meta = MediaMeta(b"", FRAMES * recipe.frame_tokens, (FRAMES,), "video")
        return ready(meta, _clip(number))

    def inputs(self, pictures: Sequence[int], clips: Sequence[int] = ()) -> dict[str, Any]:
        """What stock transformers takes."""
        made: dict[str, Any] = {}
        if pictures:
            shown = [_picture(number) for number in pictures]
            made |= reference.image_inputs(self._bench.folder, shown)
        if clips:
            mean, std = (255 * torch.tensor(v) for v in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
            frames = torch.from_numpy(np.stack([_clip(number) for number in clips])).float()
            made["pixel_values_videos"] = ((frames - mean) / std).permute(0, 1, 4, 2, 3)
        return made


def _picture(number: int) -> Any:
    return draw(number, *SHAPES[number % len(SHAPES)])


def _clip(number: int) -> np.ndarray:
    """Frames that change slowly, as a camera's do."""
    start = np.asarray(draw(4 * number + 1, 64 + FRAMES, 64))
    return np.stack([start[:, at : at + 64] for at in range(FRAMES)])


@pytest.fixture(scope="module")
def show(bench: Mixed) -> Show:
    return Show(bench)


def test_pictures_of_all_shapes_in_one_batch_are_encoded_as_stock_does(
    bench: Mixed, show: Show
) -> None:
    numbers = range(len(SHAPES))
    items = [show.image(number) for number in numbers]
    with torch.inference_mode():
        stock = reference.stock_model(bench.folder).get_image_features(**show.inputs(numbers))
    rows = bench.encode(items)
    assert [len(each) for each in rows] == [item.meta.tokens for item in items]
    assert len({len(each) for each in rows}) == len(SHAPES)
    for ours, theirs in zip(rows, stock.pooler_output, strict=True):
        assert torch.equal(ours, theirs)


def test_clips_in_one_batch_are_encoded_as_stock_does(bench: Mixed, show: Show) -> None:
    items = [show.video(0), show.video(1)]
    stock_model = reference.stock_model(bench.folder)
    with torch.inference_mode():
        stock = stock_model.model.get_video_features(
            show.inputs((), (0, 1))["pixel_values_videos"]
        ).pooler_output
    rows = bench.encode(items)
    assert [len(each) for each in rows] == [item.meta.tokens for item in items]
    for ours, theirs in zip(rows, stock, strict=True):
        torch.testing.assert_close(ours, rows_of(theirs), atol=1e-6, rtol=1e-6)


def test_the_tone_of_a_frame_is_that_of_the_stock_processor(bench: Mixed) -> None:
    tone = bench.family.recipes.video.square.tone
    table = patches.normalization_table(tone, torch.device("cpu"), torch.float32)
    goldens = [g for g in load("videos.npz") if g.processor == "LlavaNextVideoVideoProcessor"]
    assert goldens
    for golden in goldens:
        raw, toned = torch.from_numpy(golden.rows)
        pixels = math.prod(golden.result["shape"][-2:])
        channel = torch.arange(len(raw)) * golden.step // pixels % 3
        assert torch.equal(table[channel * patches.PIXEL_LEVELS + raw.long()], toned)


@pytest.mark.parametrize(("mode", "stride"), [("max", 2), ("conv", 2), ("average", 4)])
def test_frames_are_pooled_as_the_checkpoint_says(mode: str, stride: int, tmp_path: Path) -> None:
    made = tiny.make_checkpoint("llava_next_video", tmp_path / "tiny")
    config = json.loads((made / "config.json").read_text())
    config |= {"spatial_pool_mode": mode, "spatial_pool_stride": stride}
    (made / "config.json").write_text(json.dumps(config))
    stock = reference.stock_model(made)  # a convolution's weights are new ones
    stock.save_pretrained(made)
    bench = Mixed(made)
    show = Show(bench)
    with torch.inference_mode():
        [theirs] = stock.model.get_video_features(
            show.inputs((), (3,))["pixel_values_videos"]
        ).pooler_output
    [ours] = bench.encode([show.video(3)])
    assert len(ours) == show.video(3).meta.tokens == FRAMES * (8 // stride) ** 2
    torch.testing.assert_close(ours, rows_of(theirs), atol=1e-6, rtol=1e-6)


def rows_of(clip: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden]; older versions of transformers have [frames, tokens, hidden]."""
    return clip.flatten(0, -2)


def test_placeholders_expand_as_stock_does(bench: Mixed, show: Show) -> None:
    stock = object.__new__(LlavaNextVideoProcessor)  # building one needs torchvision
    stock.image_processor = LlavaNextImageProcessorPil.from_pretrained(bench.folder)
    stock.patch_size, stock.num_additional_image_tokens = 8, 1
    stock.vision_feature_select_strategy = "default"
    stock.image_token, stock.video_token = "i", "v"
    inputs = show.inputs((0, 1, 4), (2,))
    expected = "".join(
        [stock.replace_image_token(inputs, number) for number in range(3)]
        + [stock.replace_video_token(inputs, 0)]
    )
    image, video = (bench.model.media_ids[kind] for kind in ("image", "video"))
    items = [show.image(0), show.image(1), show.image(4), show.video(2)]
    prompt = [7, image, 5, image, image, 6, video, 8]
    layout = bench.family.layout(prompt, bench.places(prompt), [item.meta for item in items])
    expanded = [id for id in layout.ids if id in (image, video)]
    assert expanded == [{"i": image, "v": video}[letter] for letter in expected]
    assert layout.ids[0] == 7
    assert layout.ids[-1] == 8
    assert [(span.item, span.length, span.row) for span in layout.spans] == [
        (number, item.meta.tokens, 0) for number, item in enumerate(items)
    ]
    assert layout.positions.tolist() == [list(range(len(layout.ids)))]
    assert layout.next_position == len(layout.ids)


# (placeholders and words, pictures, clips): pictures come in order, and so do clips
PROMPTS = (
    ("words alone", "aaaa", (), ()),
    ("a picture", "aaIaaa", (0,), ()),
    ("a clip", "aVaaa", (), (0,)),
    ("pictures and clips in turn", "aIaVaaIVa", (1, 2), (1, 2)),
    ("side by side", "IIVaa", (3, 4), (3,)),
    ("the same twice", "aIaIa", (5, 5), ()),
)


def _asked(bench: Mixed, show: Show, letters: str, pictures: Any, clips: Any) -> Any:
    """Prompt, items in its order, and stock inputs."""
    images, videos = iter(pictures), iter(clips)
    prompt, items = [1], []
    for at, letter in enumerate(letters):
        if letter == "I":
            items.append(show.image(next(images)))
        elif letter == "V":
            items.append(show.video(next(videos)))
        else:
            prompt += [100 + at, 200 + 7 * at]
            continue
        prompt.append(bench.model.media_ids[items[-1].meta.kind])
    return prompt, items, show.inputs(pictures, clips)


@pytest.fixture(scope="module")
def answered(bench: Mixed, show: Show) -> list[tuple[Any, Any, reference.Reference]]:
    found = []
    for _, *described in PROMPTS:
        prompt, items, inputs = _asked(bench, show, *described)
        found.append((prompt, items, bench.expect(prompt, items, inputs)))
    return found


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 48, "block_size": 4}], ids=str)
async def test_tokens_and_logprobs_are_those_of_stock(bench, answered, settings) -> None:
    await check_tokens_and_logprobs(bench, answered, 1e-4, **settings)


async def test_prefill_and_decode_apart_give_the_same(bench, answered) -> None:
    await check_prefill_and_decode_apart(bench, answered)


async def test_the_next_turn_with_another_clip_finds_what_went_before(bench, show) -> None:
    prompt, items, _ = _asked(bench, show, "aIaaV", (1,), (1,))
    with bench.engine(block_size=4) as engine:
        answer = await whole(engine, *bench.ask(prompt, items))
        known = answer.deltas[0].prompt.tokens + len(answer.ids) - 1
        grown = [*prompt, *answer.ids, 50, bench.model.media_ids["video"], 51]
        items = [*items, show.video(5)]
        follow = await whole(engine, *bench.ask(grown, items))
    assert follow.deltas[0].prompt.cached == known // 4 * 4
    assert follow.ids == bench.expect(grown, items, show.inputs((1,), (1, 5))).ids


def test_answers_depend_on_every_picture_and_clip(bench, show) -> None:
    def answer(pictures: Any, clips: Any) -> list[int]:
        prompt, items, inputs = _asked(bench, show, "aIaVaaVa", pictures, clips)
        return bench.expect(prompt, items, inputs).ids[:8]

    cold = answer((1,), (1, 2))
    for pictures, clips in (((7,), (1, 2)), ((1,), (2, 1)), ((1,), (4, 2)), ((1,), (1, 4))):
        assert answer(pictures, clips) != cold


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("config.json", {"vision_feature_select_strategy": "full"}, "class token"),
        ("config.json", {"image_grid_pinpoints": [[64, 64]]}, "image_grid_pinpoints"),
        ("preprocessor_config.json", {"crop_size": 32}, "image processor"),
        ("video_preprocessor_config.json", {"crop_size": 32}, "video processor"),
        ("video_preprocessor_config.json", {"do_center_crop": False}, "do_center_crop"),
        ("video_preprocessor_config.json", {"fps": 2}, "fps"),
    ],
)
def test_settings_that_would_silently_differ_are_refused(
    bench: Mixed, tmp_path: Path, file: str, change: dict[str, Any], reason: str
) -> None:
    shutil.copytree(bench.folder, tmp_path / "other")
    path = tmp_path / "other" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=reason):
        models.find_family(open_model(tmp_path / "other"))


def test_the_number_of_frames_is_the_checkpoints_or_eight(bench: Mixed, tmp_path: Path) -> None:
    assert bench.family.recipes.video.frames.count == 8
    shutil.copytree(bench.folder, tmp_path / "other")
    path = tmp_path / "other" / "video_preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_frames": 5}))
    assert models.find_family(open_model(tmp_path / "other")).recipes.video.frames.count == 5
    path.unlink()  # old checkpoints have one file for both
    assert (
        models.find_family(open_model(tmp_path / "other")).recipes.video
        == bench.family.recipes.video
    )


@pytest.mark.parametrize(
    ("stored", "part", "name"),
    [
        ("image_newline", "encoder", "image_newline"),
        ("model.image_newline", "encoder", "image_newline"),
        ("vision_resampler.pool.weight", "encoder", "vision_resampler.pool.weight"),
        (
            "vision_tower.vision_model.pre_layrnorm.bias",
            "encoder",
            "vision_tower.pre_layrnorm.bias",
        ),
        ("language_model.lm_head.weight", "language", "lm_head.weight"),
        ("language_model.model.norm.weight", "language", "model.norm.weight"),
        ("model.language_model.norm.weight", "language", "model.norm.weight"),
        ("lm_head.weight", "language", "lm_head.weight"),
    ],
)
def test_published_and_saved_names(bench: Mixed, stored: str, part: str, name: str) -> None:
    assert bench.family.weight_name(stored) == (part, name)
