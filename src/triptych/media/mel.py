"""Whisper's log-mel spectrum in NumPy, equal to the stock feature extractor's.

The stock one pads every clip to its full length first; this one computes only the frames that hold
sound. The padding's effect on the values is kept: it never raises the loudest.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from triptych.recipe import MelAudio

_FLOOR = 1e-10
_CHUNK = 3000  # frames at a time
_TOP = 8000.0  # Hz: where Whisper's last filter ends, at any rate


def frame_count(samples: int, recipe: MelAudio) -> int:
    """How many frames of the spectrum hold sound."""
    return min(-(-samples // recipe.hop), recipe.max_frames)


def token_count(count: int) -> int:
    """Rows of the embedding of so many frames: the audio encoders halve them twice."""
    return max(0, ((count - 1) // 2 + 1 - 2) // 2 + 1)


def mel_spectrum(wave: NDArray[np.float32], recipe: MelAudio) -> NDArray[np.float32]:
    """Log-mel of a mono wave [samples] at the recipe's rate: [mels, frames + tail].

    Beyond the longest sound the tail is zeros.
    """
    count = frame_count(len(wave), recipe)
    given = count + recipe.tail
    half = recipe.fft // 2
    # The windows of frames past the last still overlap the sound: they count for the loudest value.
    seen = min(max(count + -(-half // recipe.hop), given), recipe.max_frames)
    padded = np.zeros(min(seen * recipe.hop + recipe.fft, recipe.max_frames * recipe.hop))
    padded[: len(wave)] = wave[: len(padded)]
    padded = np.pad(padded, half, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, recipe.fft)[:: recipe.hop][:seen]
    bank = _bank(recipe.fft // 2 + 1, recipe.mels, recipe.rate)
    log = np.empty((recipe.mels, seen), np.float32)
    for at in range(0, seen, _CHUNK):  # all windows of a long clip would fill the memory
        part = np.fft.rfft(windows[at : at + _CHUNK] * _hann(recipe.fft)).astype(np.complex64)
        power = np.abs(part, dtype=np.float64) ** 2
        log[:, at : at + _CHUNK] = np.log10(np.maximum(_FLOOR, bank.T @ power.T))
    loudest = log.max()
    result: NDArray[np.float32] = np.maximum(log[:, :given], loudest - np.float32(8.0))
    result += np.float32(4.0)
    result /= np.float32(4.0)
    return np.pad(result, ((0, 0), (0, given - result.shape[1])))


@lru_cache(4)
def _hann(length: int) -> NDArray[np.float64]:
    return np.hanning(length + 1)[:-1]  # periodic


def _to_mel(hertz: float) -> float:
    """Slaney's scale: straight below 1 kHz, logarithmic above."""
    if hertz < 1000.0:
        return 3.0 * hertz / 200.0
    return float(15.0 + np.log(hertz / 1000.0) * (27.0 / np.log(6.4)))


def _to_hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels - 15.0))
    return np.where(mels >= 15.0, above, 200.0 * mels / 3.0)


@lru_cache(4)
def _bank(bins: int, mels: int, rate: int) -> NDArray[np.float64]:
    """Triangles of equal area between neighbours on the mel scale: [bins, mels]."""
    edges = _to_hertz(np.linspace(_to_mel(0.0), _to_mel(_TOP), mels + 2))
    bin_hertz = np.linspace(0, rate // 2, bins)
    widths = np.diff(edges)
    slopes = edges[None, :] - bin_hertz[:, None]
    down = -slopes[:, :-2] / widths[:-1]
    up = slopes[:, 2:] / widths[1:]
    bank = np.maximum(0.0, np.minimum(down, up))
    return bank * (2.0 / (edges[2:] - edges[:-2]))
