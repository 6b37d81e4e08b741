import io
import struct

import av
import numpy as np
import pytest

from support import clips
from triptych.config import Limits
from triptych.errors import AudioTooLong, InvalidMedia, UnsupportedMediaType
from triptych.media import audio, mel
from triptych.media.container import AUDIO_CONTAINERS
from triptych.recipe import MelAudio

RECIPE = MelAudio(16000, 400, 160, 80, 3000)
EDGE = 1600  # samples at either end, where codecs and filters begin and end


def listen(data, recipe=RECIPE, **limits):
    return audio.decode_audio(memoryview(data), AUDIO_CONTAINERS, recipe, Limits(**limits))


def prepare(data, recipe=RECIPE, **limits):
    return audio.prepare_audio(memoryview(data), recipe, Limits(**limits))


def off(wave, exact):
    """How far from the exact wave, in decibels below it; away from the ends."""
    size = min(len(wave), len(exact)) - EDGE
    wrong = wave[EDGE:size] - exact[EDGE:size]
    return 10 * np.log10(np.mean(exact[EDGE:size] ** 2) / np.mean(wrong**2))


def pcm(wave, rate, code=3, bits=32):
    """A WAV file of float samples [samples] or [samples, channels], written by hand."""
    wave = np.atleast_2d(wave.T).T.astype("<f4")
    channels = wave.shape[1]
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * width % 2**32, width, bits)
    body = wave.tobytes()
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize(
    ("form", "rate", "decibels"),
    [
        ("wav", 16000, 80),
        ("wav", 8000, 80),
        ("wav", 44100, 80),
        ("flac", 48000, 80),
        ("mp3", 44100, 20),
        ("opus", 48000, 30),
        ("m4a", 48000, 20),
    ],
)
def test_every_form_sounds_as_it_was(form, rate, decibels):
    data = clips.sound(2, form, seconds=2.0, rate=rate)
    wave = listen(data)
    assert wave.dtype == np.float32
    assert len(wave) == pytest.approx(32000, abs=600)
    assert off(wave, clips.wave(2, 2.0)) > decibels


def test_channels_are_averaged():
    wave = listen(clips.sound(2, "wav", rate=16000, channels=2))
    assert off(wave, clips.wave(2, 1.0) / 2) > 75


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 32000, 44100, 48000, 96000])
def test_resampling_keeps_what_fits_and_drops_the_rest(rate):
    """A sine comes out as that sine; one above the new rate's half comes out as silence."""
    at = np.arange(rate * 2) / rate
    exact = 0.5 * np.sin(2 * np.pi * 1234.0 * np.arange(32000) / 16000).astype(np.float32)
    wave = listen(pcm(0.5 * np.sin(2 * np.pi * 1234.0 * at), rate))
    assert abs(len(wave) - 32000) <= 1
    assert off(wave, exact) > 75
    if rate > 22050:
        high = listen(pcm(0.5 * np.sin(2 * np.pi * 0.35 * rate * at), rate))[EDGE:-EDGE]
        assert np.sqrt(np.mean(high**2)) < 0.5e-3


def test_same_rate_is_left_alone():
    wave = clips.wave(5, 1.0)
    assert np.array_equal(listen(pcm(wave, 16000)), wave)


def test_meta():
    meta, (spectrum,), cost = prepare(clips.sound(1, "wav", seconds=2.0))
    assert (meta.kind, meta.grid, meta.tokens, meta.key, meta.audio_tokens) == (
        "audio",
        (200,),
        50,
        b"",
        0,
    )
    assert spectrum.shape == (80, 200)
    assert cost == 200
    assert np.array_equal(
        spectrum, mel.mel_spectrum(listen(clips.sound(1, "wav", seconds=2.0)), RECIPE)
    )


@pytest.mark.parametrize("form", [*clips.SOUNDS])
def test_same_number_same_sound_and_no_other(form):
    one, again, two = (prepare(clips.sound(n, form))[1][0] for n in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, two)


def test_b33_sound_over_the_limit_is_refused():
    data = clips.sound(1, "mp3", seconds=3.0)
    assert prepare(data, audio_seconds=3.1)
    with pytest.raises(AudioTooLong, match=r"longer than 2\.5 seconds"):
        prepare(data, audio_seconds=2.5)


def test_b33_sound_over_what_the_model_was_made_for_is_refused():
    with pytest.raises(AudioTooLong, match="longer than 2 seconds"):
        prepare(clips.sound(1, seconds=3.0), MelAudio(16000, 400, 160, 80, 200))


def test_b33_a_bomb_is_refused_before_it_is_decoded():
    """Twenty minutes of silence in little space: decoding ends at the limit."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        track = out.add_stream("flac", rate=8000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 4608), np.int16), "s16", "mono")
        silence.sample_rate = 8000
        for _ in range(1200 * 8000 // 4608):
            out.mux(track.encode(silence))
        out.mux(track.encode(None))
    data = file.getvalue()
    assert len(data) < 250_000
    seconds = 0.0

    def counted(*args):
        nonlocal seconds
        for frame in mono(*args):
            seconds += frame.samples / 8000
            yield frame

    mono = audio._mono
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio, "_mono", counted)
        with pytest.raises(AudioTooLong):
            prepare(data)
    assert 25 < seconds < 40


@pytest.mark.parametrize("rate", [1, 999, 1_000_000, 2**31 - 1, 4_000_000_000])
def test_b33_a_forged_rate_is_refused(rate):
    data = bytearray(clips.sound(1, "wav"))
    at = data.index(b"fmt ") + 12
    data[at : at + 4] = struct.pack("<I", rate)
    with pytest.raises(AudioTooLong, match=f"{rate} samples a second"):
        prepare(bytes(data))


def test_b33_a_low_rate_is_not_resampled_before_it_is_refused(monkeypatch):
    monkeypatch.setattr(audio, "_resample", None)
    data = pcm(np.zeros(1_000_000, np.float32), 1000)  # 1000 seconds
    with pytest.raises(AudioTooLong):
        prepare(data, audio_seconds=0.5)


@pytest.mark.parametrize("form", ["wav", "flac", "m4a", "mp3"])
def test_b26_cut_short(form):
    data = clips.sound(1, form, seconds=4.0)
    with pytest.raises(InvalidMedia):
        prepare(data[: len(data) // 2])


@pytest.mark.parametrize("form", [*clips.SOUNDS])
def test_b26_a_head_without_a_body(form):
    with pytest.raises(InvalidMedia):
        prepare(clips.sound(1, form)[:48])


@pytest.mark.parametrize("data", [b"", b"RIFF", b"<html></html>", bytes(1000), b"\xff\xfb" * 50])
def test_b26_no_sound_at_all(data):
    with pytest.raises(InvalidMedia):
        prepare(data)


def test_no_samples():
    with pytest.raises(InvalidMedia):
        prepare(pcm(np.zeros(0, np.float32), 16000))


def test_too_short_for_one_token():
    with pytest.raises(InvalidMedia, match="too short"):
        prepare(pcm(np.zeros(320, np.float32), 16000))
    assert prepare(pcm(np.zeros(321, np.float32), 16000))[0].tokens == 1


def test_b32_a_forbidden_codec_is_never_opened():
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as out:
        track = out.add_stream("adpcm_ms", rate=16000, layout="mono")
        clips._play(out, track, clips.wave(1, 1.0), 16000)
    with pytest.raises(InvalidMedia, match="adpcm_ms"):
        prepare(file.getvalue())


def test_other_forms_are_named():
    with pytest.raises(UnsupportedMediaType, match="FLV"):
        prepare(b"FLV\x01" + bytes(100))


def test_a_video_without_a_sound():
    with pytest.raises(InvalidMedia, match="no sound"):
        prepare(clips.video(1, "mp4", frames=3))


def test_the_sound_of_a_video():
    meta, _, _ = prepare(clips.video(1, "webm", frames=3, sound=1.0))
    assert meta.grid == (100,)
