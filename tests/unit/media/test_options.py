"""Options of a request: the recipe that they make is the one that the stock processor's settings
make, what a recipe cannot follow is refused by name, and caches tell options apart."""

import ast
import io
import math
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from support import clips
from support.pictures import draw, encoded
from triptych.config import Config, Limits
from triptych.errors import InvalidMedia, InvalidValue, TooManyFrames, UnsupportedParameter
from triptych.media import video
from triptych.media.base import digest_of
from triptych.media.frame_list import is_frame_list, join_frames, split_frames
from triptych.media.options import apply_options
from triptych.media.pool import DecodePool
from triptych.media.prepare import prepare
from triptych.messages import MediaItem
from triptych.models.processor_settings import grid_image, grid_video, square_image
from triptych.pipeline.kv.media_layouts import content_digests
from triptych.pipeline.router import sample_digest
from triptych.recipe import (
    AnyresImage,
    FrameSampling,
    MediaOptions,
    MelAudio,
    Recipes,
    SquareVideo,
    TiledImage,
)

SETTINGS = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 64}
IMAGE, VIDEO = grid_image(SETTINGS), grid_video(SETTINGS, "qwen2", with_audio=True)
MEL = MelAudio(16000, 400, 160, 80, 3000)
GRID = Recipes("1", image=IMAGE, video=VIDEO, audio=MEL)
SQUARE = square_image({"size": 28, "crop_size": 28}, 14, 0)
EIGHT = FrameSampling("even", fps=0.0, count=8, least=1, most=8, patch=1)
SQUARES = Recipes("1", image=AnyresImage(((28, 56),), SQUARE), video=SquareVideo(EIGHT, SQUARE, 1))


LIMITS = Limits()


def options(**given):
    return MediaOptions(**given)


# --- recipes


def test_pixels_are_those_of_a_checkpoint_with_these_settings():
    asked = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 16}
    got = apply_options(GRID, "image", options(**asked))
    assert got == msgspec.structs.replace(GRID, image=grid_image(asked))
    got = apply_options(GRID, "video", options(**asked))
    assert got.video == grid_video(asked, "qwen2", with_audio=True)
    got = apply_options(GRID, "video", options(fps=0.5))
    assert got.video == grid_video(SETTINGS | {"fps": 0.5}, "qwen2", with_audio=True)


def test_options_that_change_nothing_and_sounds():
    for kind in ("image", "video", "audio"):
        assert apply_options(GRID, kind, options()) == GRID
        assert apply_options(SQUARES, kind, options()) == SQUARES
    assert apply_options(GRID, "audio", options(max_pixels=1)) == GRID
    assert apply_options(SQUARES, "video", options(use_audio_in_video=False)) == SQUARES


def test_sound_of_videos():
    got = apply_options(GRID, "video", options(use_audio_in_video=False)).video
    assert got == grid_video(SETTINGS, "qwen2")
    assert apply_options(GRID, "video", options(use_audio_in_video=True)) == GRID


def test_low_detail_is_a_hint():
    cap = 28 * 28 * 9
    assert apply_options(GRID, "image", options(pixel_cap=cap)).image.max_pixels == cap
    large = options(pixel_cap=28 * 28 * 1000)
    assert apply_options(GRID, "image", large) == GRID
    small = apply_options(GRID, "image", options(pixel_cap=1)).image
    assert small.max_pixels == small.min_pixels == IMAGE.min_pixels
    assert apply_options(SQUARES, "image", options(pixel_cap=1)) == SQUARES
    tiled = Recipes("1", image=TiledImage(28, 16, False, 1, 2, IMAGE.tone))
    for asked, tiles in ((cap, 9), (1, 1), (28 * 28 * 1000, 16)):
        assert apply_options(tiled, "image", options(pixel_cap=asked)).image.max_tiles == tiles


@pytest.mark.parametrize(
    ("recipes", "kind", "given", "error", "param"),
    [
        (SQUARES, "image", {"max_pixels": 9}, UnsupportedParameter, "max_pixels"),
        (SQUARES, "image", {"min_pixels": 9}, UnsupportedParameter, "min_pixels"),
        (SQUARES, "video", {"max_pixels": 9}, UnsupportedParameter, "max_pixels"),
        (SQUARES, "video", {"use_audio_in_video": True}, UnsupportedParameter, None),
        (
            Recipes("1", video=grid_video({}, "qwen3")),
            "video",
            {"use_audio_in_video": True},
            UnsupportedParameter,
            "use_audio_in_video",
        ),
        (GRID, "image", {"max_pixels": 28 * 28 * 65}, InvalidValue, "max_pixels"),
        (GRID, "image", {"min_pixels": 28 * 28 * 65}, InvalidValue, "min_pixels"),
        (GRID, "video", {"min_pixels": 9, "max_pixels": 8}, InvalidValue, "min_pixels"),
        (GRID, "video", {"num_frames": 769}, InvalidValue, "num_frames"),
    ],
)
def test_b14_options_that_a_recipe_cannot_follow_are_refused_by_name(
    recipes, kind, given, error, param
):
    with pytest.raises(error) as refused:
        apply_options(recipes, kind, options(**given))
    assert refused.value.param == (param or next(iter(given)))
    assert refused.value.param in refused.value.message


# --- frames


def stock_rule(family):
    """``sample_frames`` of the stock processor, whose module needs torchvision for other things."""
    module = (
        Path(transformers.__file__).parent / "models" / family / f"video_processing_{family}.py"
    )
    (rule,) = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "sample_frames"
    ]
    names = {"torch": torch, "np": np, "math": math}
    exec("from __future__ import annotations\n" + ast.unparse(rule), names)
    return names["sample_frames"]


def test_frames_are_those_that_stock_takes_with_the_same_options():
    stock = {"qwen2": stock_rule("qwen2_vl"), "qwen3": stock_rule("qwen3_vl")}
    processor = types.SimpleNamespace(
        num_frames=None, fps=2.0, min_frames=4, max_frames=768, temporal_patch_size=2
    )
    asked = [{"num_frames": n} for n in (1, 2, 3, 5, 8, 31)]
    asked += [{"fps": f} for f in (0.3, 1, 2, 7.5)]
    rules = {rule: FrameSampling(rule, 2.0, 0, 4, 768, 2) for rule in stock} | {"even": EIGHT}
    compared = 0
    for given in asked:
        for total, rate in ((40, 25.0), (99, 30.0), (301, 23.976)):
            metadata = VideoMetadata(total_num_frames=total, fps=rate)
            for rule, frames in rules.items():
                recipe = SquareVideo(frames, SQUARE, 1)
                chosen = apply_options(Recipes("1", video=recipe), "video", options(**given))
                if rule == "even":
                    wanted = default_sample_indices_fn(metadata, **given)
                elif rule == "qwen2" and given == {"num_frames": 1}:
                    continue  # stock divides by zero; here it is one temporal patch
                else:
                    wanted = stock[rule](processor, metadata, **given)
                assert video.choose_frames(chosen.video.frames, total, rate) == wanted.tolist()
                compared += 1
    assert compared > 80


@pytest.mark.parametrize("rule", ["qwen2", "qwen3", "even"])
def test_with_both_the_fewer_frames_win(rule):
    frames = EIGHT if rule == "even" else FrameSampling(rule, 2.0, 0, 4, 768, 2)
    recipes = Recipes("1", video=SquareVideo(frames, SQUARE, 1))

    def count(total, **given):
        chosen = apply_options(recipes, "video", options(**given)).video.frames
        return len(video.choose_frames(chosen, total, 25.0))

    assert count(250, num_frames=6, fps=2.0) == 6
    assert count(250, num_frames=60, fps=1.0) == 10
    assert count(250, num_frames=2, fps=1.0) == 2
    assert count(5, num_frames=8) <= 5  # a clip that is shorter


# --- preparation and caches


def prepared(data, kind, given=None, recipes=GRID, limits=LIMITS):
    return prepare(kind, "file", memoryview(data), recipes, limits, False, given)


def test_a_file_that_options_do_not_change_keeps_its_media_key():
    picture = encoded(draw(1, 84, 56))
    plain = prepared(picture, "image")[0]
    assert prepared(picture, "image", options(max_pixels=28 * 28 * 32))[0] == plain
    smaller = prepared(picture, "image", options(min_pixels=1, max_pixels=28 * 28 * 2))[0]
    assert smaller.key != plain.key
    assert smaller.tokens < plain.tokens


def test_options_of_a_video():
    clip = clips.video(1, frames=50, fps=25, width=64, height=48, sound=1.0)
    plain = prepared(clip, "video")[0]
    assert (plain.grid[0], plain.interval) == (2, 0.0)
    assert plain.audio_tokens
    silent, arrays, _, _ = prepared(clip, "video", options(use_audio_in_video=False))
    assert (silent.audio_tokens, len(arrays)) == (0, 1)
    assert prepared(clip, "video", options(num_frames=8))[0].grid[0] == 4
    fast = prepared(clip, "video", options(fps=5.0))[0]
    assert (fast.grid[0], fast.interval) == (5, 0.4)
    keys = {meta.key for meta in (plain, silent, fast)}
    assert len(keys) == 3
    with pytest.raises(TooManyFrames):
        prepared(clip, "video", options(num_frames=40), limits=Limits(video_sampled=20))


async def test_digests_tell_options_apart():
    item = MediaItem("image", 0, b"file")
    other = msgspec.structs.replace(item, options=options(max_pixels=9))
    third = msgspec.structs.replace(item, options=options(max_pixels=8))
    assert len({await digest_of(one) for one in (item, other, third)}) == 3
    assert len(set(await content_digests((item, other, third)))) == 3
    assert len({sample_digest(one) for one in (item, other, third)}) == 3


async def test_the_pool_follows_options_and_caches_each():
    picture = encoded(draw(1, 112, 112))
    pool = DecodePool(GRID, Config(decode_processes=1))
    try:
        plain = MediaItem("image", 0, picture)
        small = msgspec.structs.replace(plain, options=options(max_pixels=28 * 28 * 4))
        for _ in range(2):
            assert (await pool.prepare(plain)).meta.tokens == 16
            assert (await pool.prepare(small)).meta.tokens == 4
        assert pool.counters["decoded_items"] == 2
        assert pool.counters["decoded_cache_hits"] == 2
        wrong = msgspec.structs.replace(plain, options=options(max_pixels=28 * 28 * 999))
        with pytest.raises(InvalidValue, match="max_pixels"):
            await pool.prepare(wrong)
        assert pool.counters["decoded_items"] == 2
    finally:
        await pool.close()


# --- lists of frames


def jpegs(count, width=64, height=48):
    return [encoded(draw(n, width, height), "JPEG", quality=95) for n in range(count)]


def test_frames_of_a_list_are_all_taken_as_decoded():
    frames = jpegs(5)
    data = join_frames(frames)
    assert is_frame_list(data)
    assert [bytes(frame) for frame in split_frames(memoryview(data))] == frames
    meta, (pixels,), _, _ = prepared(data, "video")
    assert (len(pixels), meta.grid[0], meta.times) == (6, 3, (0.0, 1.0, 2.0))
    assert meta.audio_tokens == 0
    crop = video._grid_rule(VIDEO)(5, 48, 64)
    for frame, got in zip(frames, pixels, strict=False):
        wanted = np.asarray(Image.open(io.BytesIO(frame)).convert("RGB"))
        assert np.array_equal(crop.apply(wanted, VIDEO.resample), got)
    assert np.array_equal(pixels[5], pixels[4])
    meta, (pixels,), _, _ = prepared(join_frames(jpegs(3)), "video", recipes=SQUARES)
    assert (len(pixels), meta.grid) == (3, (3,))


def test_b57_bad_lists_of_frames():
    good = join_frames(jpegs(2))
    sizes = join_frames([*jpegs(1), *jpegs(1, 32, 32)])
    for data in (join_frames([]), good[:-1], good[:20], good + b"\0", join_frames([b"x"]), sizes):
        with pytest.raises(InvalidMedia):
            prepared(data, "video")
    with pytest.raises(TooManyFrames):
        prepared(join_frames(jpegs(3)), "video", limits=Limits(video_sampled=2))
