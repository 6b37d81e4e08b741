"""Media of samples as files: what comes out of them is what went in."""

import io
import wave

import av
import numpy as np
import pytest
from PIL import Image

from models.demo.files import JPEG_EVERY, file_of
from models.demo.recipe.sample import RATE, Clip, Picture, Sound

AS_JPEG = JPEG_EVERY - 1


def shaded(*shape):
    """Smooth, and different everywhere."""
    axes = np.indices(shape).astype(float)
    return (127 + 90 * np.sin(axes.sum(0) / 15) + 20 * axes[-1]).clip(0, 255).astype(np.uint8)


def seen(file):
    return np.asarray(Image.open(io.BytesIO(file.data)))


def frames(file):
    with av.open(io.BytesIO(file.data)) as opened:
        stream = opened.streams.video[0]
        return [f.to_ndarray(format="rgb24") for f in opened.decode(stream)], stream.average_rate


def test_a_picture_is_a_png_without_loss():
    picture = Picture(shaded(31, 45, 3))
    file = file_of(picture, 0)
    assert (file.kind, file.form) == ("image", "png")
    assert np.array_equal(seen(file), picture.pixels)


def test_some_pictures_are_jpegs():
    picture = Picture(shaded(64, 80, 3))
    forms = [file_of(picture, number).form for number in range(2 * JPEG_EVERY)]
    assert forms.count("jpg") == 2
    file = file_of(picture, AS_JPEG)
    assert Image.open(io.BytesIO(file.data)).format == "JPEG"
    assert np.abs(seen(file).astype(int) - picture.pixels).mean() < 8


@pytest.mark.parametrize("size", [(64, 96), (63, 95)])
def test_a_clip_keeps_frames_rate_and_colours(size):
    shown = np.stack(
        [np.full((*size, 3), (40 * at, 200 - 20 * at, 90), np.uint8) for at in range(6)]
    )
    got, rate = frames(file_of(Clip(shown, 4.0)))
    assert rate == 4
    assert len(got) == 6
    for before, after in zip(shown, got, strict=True):
        assert after.shape == (64, 96, 3)
        inner = after[: size[0], : size[1]].astype(int)
        assert np.abs(inner - before).max() < 12


def test_a_sound_is_16_bit_and_not_wrapped_around():
    samples = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1.3, -1.3], np.float32)
    with wave.open(io.BytesIO(file_of(Sound(samples)).data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        got = np.frombuffer(file.readframes(99), "<i2") / 32767
    assert got == pytest.approx(samples.clip(-1, 1), abs=1e-4)


def test_a_part_names_its_kind_and_form():
    part = file_of(Sound(np.zeros(160, np.float32))).part
    assert part["type"] == "audio_url"
    assert part["audio_url"]["url"].startswith("data:audio/wav;base64,UklGR")
