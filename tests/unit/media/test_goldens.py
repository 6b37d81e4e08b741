"""Videos from the file to the tower's input, beside what the stock video processors gave."""

import io

import av
import numpy as np
import pytest
import torch

from support.goldens import digest, frames, load
from triptych.config import Limits
from triptych.media import video
from triptych.models import patches
from triptych.recipe import (
    FrameSampling,
    GridVideo,
    Normalization,
    Recipes,
    SquareImage,
    SquareVideo,
)

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
QUICK = [golden for golden in load("videos.npz") if golden.shape[1] < 1000]  # rows of pixels
QWEN = {"Qwen2VLVideoProcessor": (14, True, CLIP), "Qwen3VLVideoProcessor": (16, False, HALF)}


def lossless(pictures):
    """An MP4 whose frames come out as these went in."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("libx264rgb", rate=10, options={"qp": "0", "preset": "ultrafast"})
        track.height, track.width, track.pix_fmt = *pictures.shape[1:3], "rgb24"
        track.codec_context.thread_count = 1
        for picture in pictures:
            out.mux(track.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        out.mux(track.encode(None))
    return file.getvalue()


def recipe(golden):
    every = FrameSampling("even", 2.0, 0, 4, 768, 2)
    if golden.processor in QWEN:
        patch, per_frame, tone = QWEN[golden.processor]
        unit = (2 * patch) ** 2
        size = golden.settings.get(
            "size", {"shortest_edge": 128 * unit, "longest_edge": 768 * unit}
        )
        edges = size["shortest_edge"], size["longest_edge"]
        return GridVideo(every, patch, 2, *edges, per_frame, 3, Normalization(1 / 255, *tone))
    side = golden.settings.get("size", {"shortest_edge": 224})["shortest_edge"]
    square = SquareImage(side, side, 14, 0, 3, Normalization(1 / 255, *CLIP))
    return SquareVideo(FrameSampling("even", 2.0, 0, 4, 768, 1), square, 1)


def ordered(pixels, wanted, dtype):
    """As the tower takes it; with 8-bit values where ``dtype`` is an integer's."""
    tone = wanted.tone if isinstance(wanted, GridVideo) else wanted.square.tone
    if not dtype.is_floating_point:
        tone = Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    given = torch.from_numpy(pixels)
    if isinstance(wanted, GridVideo):
        return patches.patchify(given, tone, dtype, wanted.patch, 2, 2).numpy()
    table = patches.normalization_table(tone, torch.device("cpu"), dtype)
    return patches.to_planes(given, table)[None].numpy()


@pytest.mark.parametrize("golden", QUICK, ids=lambda golden: golden.name)
def test_equals_stock(golden):
    wanted = recipe(golden)
    data = memoryview(lossless(frames(*golden.shape)))
    meta, (pixels,), _ = video.prepare_video(data, wanted, Recipes(""), Limits())
    if golden.result["grid"]:
        assert [*meta.grid] == golden.result["grid"]
    raw, toned = (ordered(pixels, wanted, dtype) for dtype in (torch.uint8, torch.float32))
    assert [*raw.shape] == golden.result["shape"]
    assert np.array_equal(raw.reshape(-1)[:: golden.step], golden.rows[0])
    assert digest(raw) == golden.result["digest"]
    assert np.abs(toned.reshape(-1)[:: golden.step] - golden.rows[1]).max() < 1e-6
