"""What an engine's own tower is given: the stock processors' names, shapes and values."""

import asyncio
import threading
from dataclasses import dataclass

import pytest
import torch

from triptych.engines.adapter import processor_inputs as module
from triptych.engines.adapter.processor_inputs import ProcessorInputEncoder, processor_inputs
from triptych.engines.base import Media
from triptych.errors import ContextLengthExceeded, EngineFailed
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import patches
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.recipe import (
    FrameSampling,
    GridImage,
    GridVideo,
    MelAudio,
    Normalization,
    Recipes,
    SquareImage,
    SquareVideo,
    TiledImage,
)
from triptych.transfer.base import Array

TONE = Normalization(1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
FRAMES = FrameSampling("qwen2", 2.0, 0, 4, 768, 2)
PATCH = {"patch": 2, "merge": 2, "min_pixels": 16, "max_pixels": 1024, "resample": 3, "tone": TONE}
GRIDS = Recipes(
    "r",
    image=GridImage(**PATCH),
    video=GridVideo(frames=FRAMES, per_frame=True, with_audio=True, **PATCH),
    audio=MelAudio(16000, 400, 160, 3, 3000),
)
SQUARE = SquareImage(4, 4, 2, 0, 3, TONE)
CONTEXT = 1 << 20
SQUARES = Recipes("r", image=SQUARE, video=SquareVideo(FRAMES, SQUARE, 1))


@dataclass
class Family:
    recipes: Recipes
    width: int = 8


def array(tensor):
    buffer = memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))
    return Array(buffer, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def empty(dtype, shape):
    return array(torch.zeros(shape, dtype={v: k for k, v in DTYPE_NAMES.items()}[dtype]))


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(0))


def item(kind, tensors, grid=(), **meta):
    known = MediaMeta(b"k" * 32, 1, grid, kind, **meta)
    return PreparedMedia(known, tuple(array(tensor) for tensor in tensors), 1)


async def made(recipes, prepared, **options):
    encoder = ProcessorInputEncoder(Family(recipes), "float32", empty, CONTEXT, **options)
    [media] = await encoder.encode([prepared])
    encoder.close()
    assert not media.encoded
    return processor_inputs(encoder.recipes, media)


async def test_a_picture_on_a_grid():
    picture = pixels(4, 8, 3)
    found = await made(GRIDS, item("image", [picture], (1, 2, 4)))
    wanted = patches.patchify(picture[None], TONE, torch.float32, 2, 2, 2)
    assert found["image_grid_thw"].tolist() == [[1, 2, 4]]
    torch.testing.assert_close(found["pixel_values"], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 8, 3), (4, 4, 8, 3)])
async def test_raw_patches_are_those_before_rescaling(shape):
    kind = "image" if len(shape) == 3 else "video"
    given = pixels(*shape)
    found = await made(GRIDS, item(kind, [given], (shape[0] // 2, 2, 4)), raw=True)
    raw = found["pixel_values" if kind == "image" else "pixel_values_videos"]
    assert raw.dtype == torch.uint8
    wanted = patches.patchify(given.view(-1, 4, 8, 3), TONE, torch.float32, 2, 2, 2)
    mean, std = (torch.tensor(three).repeat_interleave(8) for three in (TONE.mean, TONE.std))
    torch.testing.assert_close((raw / 255 - mean) / std, wanted)


async def test_a_video_has_its_seconds_per_grid():
    found = await made(GRIDS, item("video", [pixels(4, 4, 8, 3)], (2, 2, 4), times=(0.5, 2.0)))
    assert found["video_grid_thw"].tolist() == [[2, 2, 4]]
    assert found["second_per_grid_ts"].tolist() == [1.5]


async def test_a_video_with_sound_has_both():
    spectrum = torch.rand(3, 10)
    prepared = item("video", [pixels(4, 4, 8, 3), spectrum], (2, 2, 4), audio_tokens=2)
    found = await made(GRIDS, prepared)
    assert found["pixel_values_videos"].shape == (16, 24)
    assert torch.equal(found["input_features"], spectrum[None])


async def test_a_square_picture_has_a_batchs_axis():
    found = await made(SQUARES, item("image", [pixels(4, 4, 3)]))
    assert found["pixel_values"].shape == (1, 3, 4, 4)
    assert set(found) == {"pixel_values"}


async def test_a_video_of_squares_keeps_its_frames_together():
    found = await made(SQUARES, item("video", [pixels(5, 4, 4, 3)], (5,)))
    assert found["pixel_values_videos"].shape == (1, 5, 3, 4, 4)


async def test_tiles_lie_one_after_another():
    recipes = Recipes("r", image=TiledImage(4, 16, False, 1, 2, TONE))
    found = await made(recipes, item("image", [pixels(3, 4, 4, 3)], (1, 2)))
    assert found["pixel_values"].shape == (3, 3, 4, 4)
    assert found["patches_per_image"].tolist() == [3]  # two tiles and the whole
    assert found["aspect_ratios"].tolist() == [[1, 2]]


async def test_a_tower_that_looks_beyond_the_end_gets_a_full_spectrum():
    recipes = Recipes("r", audio=MelAudio(16000, 400, 160, 3, max_frames=20, tail=2))
    spectrum = torch.rand(3, 12)
    found = await made(recipes, item("audio", [spectrum]))
    assert torch.equal(found["input_features"][0, :, :12], spectrum)
    assert not found["input_features"][0, :, 12:].any()
    assert found["feature_attention_mask"].tolist() == [[1] * 10 + [0] * 10]


async def test_another_tower_gets_what_there_is():
    found = await made(GRIDS, item("audio", [torch.rand(3, 12)]))
    assert found["input_features"].shape == (1, 3, 12)
    assert found["feature_attention_mask"].tolist() == [[1] * 12]


@pytest.mark.parametrize("arrays", [(), (array(torch.zeros(2, 8)),)])
def test_encoded_or_remote_media_carry_only_their_shape(arrays):
    media = Media(MediaMeta(b"k" * 32, 2, (1, 2, 4)), arrays)
    assert set(processor_inputs(GRIDS, media)) == {"image_grid_thw"}


async def test_values_are_rounded_to_the_engines_type():
    encoder = ProcessorInputEncoder(Family(SQUARES), "bfloat16", empty, CONTEXT)
    [media] = await encoder.encode([item("image", [pixels(4, 4, 3)])])
    assert media.arrays[0].dtype == "bfloat16"
    exact = patches.to_planes(
        pixels(4, 4, 3)[None], patches.normalization_table(TONE, torch.device("cpu"), torch.float32)
    )
    assert torch.equal(tensor_view(media.arrays[0]), exact[0].bfloat16())
    encoder.close()


def test_a_kind_that_the_engines_model_does_not_encode_is_accepted_as_an_embedding_only():
    encoder = ProcessorInputEncoder(Family(SQUARES), "float32", empty, CONTEXT, kinds={"video"})
    assert encoder.recipes.image is None
    assert encoder.recipes.image_embeds is not None
    assert encoder.recipes.video == SQUARES.video
    encoder.close()


async def test_what_fits_in_no_prompt_is_refused_at_once():
    encoder = ProcessorInputEncoder(Family(SQUARES), "float32", empty, context=1)
    with pytest.raises(ContextLengthExceeded):
        await encoder.encode([item("image", [pixels(4, 4, 3)])])
    encoder.close()


def test_a_kind_that_the_model_does_not_take():
    with pytest.raises(EngineFailed, match="not take audio"):
        module.recipe_of(SQUARES, "audio")


async def test_a_cancelled_call_ends_when_nothing_reads_its_items_any_more(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    real = module.tower_input

    def slow(*arguments):
        started.set()
        assert go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(module, "tower_input", slow)
    encoder = ProcessorInputEncoder(Family(SQUARES), "float32", empty, CONTEXT)
    task = asyncio.create_task(encoder.encode([item("image", [pixels(4, 4, 3)])]))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    assert encoder.running == 1
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert encoder.running == 0
    encoder.close()
