import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from support.goldens import load
from triptych.media import video
from triptych.recipe import FrameSampling


def rule(name, *, fps=2.0, count=0, least=4, most=768, patch=2):
    return FrameSampling(name, fps, count, least, most, patch)


@pytest.mark.parametrize("golden", load("samples.npz"), ids=lambda golden: golden.name)
def test_takes_the_frames_that_stock_takes(golden):
    wanted = rule("qwen2" if golden.processor.startswith("Qwen2") else "qwen3")
    counts, at, compared = iter(golden.result["counts"]), 0, 0
    for rate in golden.result["rates"]:
        for total in golden.result["totals"]:
            count = next(counts)
            stock = golden.rows[at : at + count].tolist()
            at += count
            if stock:  # else stock refuses the clip
                assert video.choose_frames(wanted, total, rate) == stock, (total, rate)
                compared += 1
    assert compared > 700


def test_rounds_as_torch_does():
    """Some products are just below a whole number, and in 32 bits they are that number."""
    differ = 0
    for total in range(2, 400, 3):
        for count in range(2, total + 1, 2):
            stock = torch.arange(0, total, total / count).int()[:count].tolist()
            assert video.choose_frames(rule("qwen2", least=count, most=count), total, 25.0) == stock
            differ += stock != [int(index * (total / count)) for index in range(count)]
    assert differ


@pytest.mark.parametrize("total", [8, 9, 100, 299, 300, 9000])
def test_even_is_the_default_of_stock(total):
    import transformers
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18 stock cut the distance of frames to a whole number")
    stock = default_sample_indices_fn(VideoMetadata(total_num_frames=total, fps=25.0), num_frames=8)
    assert video.choose_frames(rule("even", count=8), total, 25.0) == stock.tolist()


def test_even_takes_all_of_a_clip_that_is_shorter():
    assert video.choose_frames(rule("even", count=8), 3, 25.0) == [0, 1, 2]
    assert video.choose_frames(rule("even", count=0), 5, 25.0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "even"])
@given(
    total=st.integers(1, 9000),
    fps=st.floats(0.001, 1000),
    asked=st.floats(0.1, 30),
    count=st.integers(0, 100),
)
def test_any_clip_gives_frames_that_are_in_it(name, total, fps, asked, count):
    wanted = rule(name, fps=asked, count=count)
    taken = video.choose_frames(wanted, total, fps)
    assert taken
    assert taken == sorted(set(taken))
    assert taken[0] >= 0
    assert taken[-1] < total
    if name != "even":
        assert len(taken) <= wanted.most


def test_times_of_qwen3_are_those_of_stock():
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    for taken in ([0, 10, 20, 30], [0, 7, 15], [4]):
        stock = Qwen3VLProcessor._calculate_timestamps(None, list(taken), 25.0, 2)
        assert video.patch_times(rule("qwen3"), taken, 31, 25.0) == tuple(stock)


def test_times_of_qwen2_rise_by_the_seconds_of_a_grid():
    from transformers.video_utils import VideoMetadata

    for total, fps in ((300, 30.0), (100, 24.0), (7, 10.0)):
        taken = video.choose_frames(rule("qwen2"), total, fps)
        about = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=taken)
        times = video.patch_times(rule("qwen2"), taken, total, fps)
        assert len(times) == len(taken) // 2
        assert np.allclose(times, np.arange(len(times)) * 2 / about.sampled_fps, rtol=1e-12)
