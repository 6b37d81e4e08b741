import msgspec
import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from support import clips
from triptych.media import mel
from triptych.recipe import MelAudio

RATE = 16000


def recipe(mels=80, seconds=30):
    return MelAudio(RATE, 400, 160, mels, seconds * 100)


def stock(wave, mels, seconds):
    """The stock extractor by torch, by numpy, and how many of its frames hold sound."""
    make = WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    made = make([wave], sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    padded = np.zeros((1, make.n_samples), np.float32)
    padded[0, : len(wave)] = wave
    plain = make._np_extract_fbank_features(padded, "cpu")
    return made["input_features"][0], plain[0], int(made["attention_mask"].sum())


def waves():
    rng = np.random.default_rng(3)
    noise = (0.1 * rng.standard_normal(5 * RATE)).astype(np.float32)
    late = np.zeros(RATE, np.float32)
    late[-150:] = 0.9  # loudest in a frame that is dropped
    yield "chord", clips.wave(3, 3.0)
    yield "silence", np.zeros(RATE, np.float32)
    yield "late", late
    for samples in (400, 481, 1000, 47999, 48001, 5 * RATE - 100, 5 * RATE):
        yield f"noise{samples}", noise[:samples]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("wave", [pytest.param(wave, id=name) for name, wave in waves()])
def test_equals_stock(wave, mels):
    by_torch, by_numpy, frames = stock(wave, mels, 5)
    made = mel.mel_spectrum(wave, recipe(mels, 5))
    assert made.dtype == np.float32
    assert made.shape == (mels, frames)
    assert mel.frame_count(len(wave), recipe(mels, 5)) == frames
    assert np.abs(made - by_numpy[:, :frames]).max() < 1e-6
    assert np.abs(made - by_torch[:, :frames]).max() < 1e-4


def test_what_follows_the_sound_counts_for_the_loudest():
    """The stock extractor finds the loudest value before it drops the padding."""
    wave = np.zeros(RATE, np.float32)
    wave[-60:] = 1.0  # heard a little in the last frame, and more in the next
    _, by_numpy, frames = stock(wave, 80, 2)
    assert by_numpy[:, frames:].max() > by_numpy[:, :frames].max()
    assert np.abs(mel.mel_spectrum(wave, recipe(80, 2)) - by_numpy[:, :frames]).max() < 1e-6


def test_a_tail_is_what_stock_has_beyond_the_sound():
    wave = clips.wave(1, 1.0)
    _, by_numpy, frames = stock(wave, 80, 2)
    made = mel.mel_spectrum(wave, msgspec.structs.replace(recipe(80, 2), tail=3))
    assert made.shape == (80, frames + 3)
    assert np.abs(made - by_numpy[:, : frames + 3]).max() < 1e-6
    longest = clips.wave(1, 2.0)
    made = mel.mel_spectrum(longest, msgspec.structs.replace(recipe(80, 2), tail=3))
    assert made.shape == (80, 203)
    assert not made[:, 200:].any()


def test_a_long_sound_in_pieces_is_the_same():
    wave = clips.wave(1, 3.0)
    whole = mel.mel_spectrum(wave, recipe())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mel, "_CHUNK", 7)
        assert np.abs(mel.mel_spectrum(wave, recipe()) - whole).max() < 1e-6


def test_tokens_are_those_of_the_audio_towers():
    for frames in range(3, 3001):
        halved = (frames - 1) // 2 + 1
        assert mel.token_count(frames) == (halved - 2) // 2 + 1
    assert [mel.token_count(frames) for frames in range(4)] == [0, 0, 0, 1]
