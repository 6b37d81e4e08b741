"""Sound files, and the audio tracks of videos, to the spectrum that an audio encoder takes.

Decoding stops as soon as it has produced more sound than is allowed, whatever the header says. Runs
in the sandbox; does not know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from triptych.config import Limits
from triptych.errors import AudioTooLong, InvalidMedia
from triptych.media import mel
from triptych.media.container import (
    AUDIO_CODECS,
    AUDIO_CONTAINERS,
    check_codec,
    counts_samples,
    detect_container,
    open_container,
    wav_rate,
)
from triptych.messages import MediaMeta
from triptych.recipe import AudioRecipe

_RATES = range(1000, 768_001)  # Hz that a header may claim: outside, it is forged
_MAX_CHANNELS = 16
_RESAMPLED_AT_ONCE = 32  # decoded frames: a call of the resampler costs as much as its work


def prepare_audio(
    data: memoryview, recipe: AudioRecipe, limits: Limits
) -> tuple[MediaMeta, list[NDArray[Any]], int]:
    """Meta without its key, the file's sound as a log-mel spectrum, and how many frames it has."""
    wave = decode_audio(data, AUDIO_CONTAINERS, recipe, limits)
    if wave is None:
        raise InvalidMedia("The file has no sound in it.")
    spectrum, tokens = to_spectrum(wave, recipe)
    frames = spectrum.shape[1] - recipe.tail
    return MediaMeta(b"", tokens, (frames,), "audio"), [spectrum], frames


def to_spectrum(wave: NDArray[np.float32], recipe: AudioRecipe) -> tuple[NDArray[np.float32], int]:
    """A wave's spectrum and how many rows its embedding has."""
    tokens = mel.token_count(mel.frame_count(len(wave), recipe))
    if not tokens:
        raise InvalidMedia(f"The sound is too short: {len(wave)} samples at {recipe.rate} Hz.")
    return mel.mel_spectrum(wave, recipe), tokens


def decode_audio(
    data: memoryview, containers: frozenset[str], recipe: AudioRecipe, limits: Limits
) -> NDArray[np.float32] | None:
    """The file's first audio track, mono at the recipe's rate, [samples]; None: no sound in it."""
    max_seconds = min(limits.audio_seconds, recipe.max_frames * recipe.hop / recipe.rate)
    form = detect_container(data)
    if form == "wav":
        _check_rate(wav_rate(data))  # libav takes a rate over 2**31 for no WAV at all
    with open_container(data, "audio", containers, limits) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        check_codec(stream, AUDIO_CODECS, "audio")
        _check_stream(stream)
        recording = _Recording(max_seconds, recipe.rate)
        # Mix down to one channel before the rate changes: half the work, and the mean of both.
        resampler = av.AudioResampler("fltp", "mono", recipe.rate)
        for piece in _mono(container, stream, recording):
            _resample(resampler, piece, recording)
        _resample(resampler, None, recording)
        wave = recording.wave()
        if stream.duration is not None and stream.time_base and counts_samples(data, form):
            claimed = float(stream.duration * stream.time_base)
            if claimed > 1.1 * wave.size / recipe.rate + 1:
                raise InvalidMedia(f"The sound is cut short: its header says {claimed:g} seconds.")
    return wave if wave.size else None


class _Recording:
    """The sound decoded so far, and the bound on it."""

    def __init__(self, seconds: float, rate: int) -> None:
        self._seconds = seconds
        self._max_samples = int(seconds * rate)
        self._pieces: list[NDArray[np.float32]] = []
        self._samples = 0

    def check(self, seconds: float) -> None:
        """Check the length before resampling: a forged rate would make much of little."""
        if seconds > self._seconds + 1:
            self._refuse()

    def add(self, piece: NDArray[np.float32]) -> None:
        self._samples += piece.size
        if self._samples > self._max_samples:
            self._refuse()
        self._pieces.append(piece)

    def wave(self) -> NDArray[np.float32]:
        return np.concatenate([np.empty(0, np.float32), *self._pieces])

    def _refuse(self) -> None:
        raise AudioTooLong(
            f"The sound is longer than {self._seconds:g} seconds, the most that is taken."
        )


def _check_stream(stream: AudioStream) -> None:
    _check_rate(stream.codec_context.sample_rate)
    channels = stream.codec_context.channels
    if not 1 <= channels <= _MAX_CHANNELS:
        raise InvalidMedia(f"The sound has {channels} channels: 1 to {_MAX_CHANNELS} are taken.")


def _check_rate(rate: int | None) -> None:
    if rate is not None and rate not in _RATES:
        raise AudioTooLong(
            f"The sound's header says {rate} samples a second: {_RATES[0]} to {_RATES[-1]} are "
            "taken."
        )


def _mono(
    container: InputContainer, stream: AudioStream, recording: _Recording
) -> Iterator[AudioFrame]:
    """The decoder's frames with the mean of their channels, at their own rate."""
    stream.codec_context.thread_count = 1
    plain = av.AudioResampler("fltp")  # of any sample format: keeps rate and channels
    rate, samples = stream.codec_context.sample_rate, 0
    pieces: list[NDArray[np.float32]] = []
    for frame in container.decode(stream):
        if frame.sample_rate != rate or frame.layout.nb_channels > _MAX_CHANNELS:
            raise InvalidMedia("The sound changes its rate or channels midway.")
        samples += frame.samples
        recording.check(samples / rate)
        parts = [frame] if frame.format.name == "fltp" else plain.resample(frame)
        for part in parts:  # [channels, samples] each
            pieces.append(part.to_ndarray().mean(axis=0, dtype=np.float32))
        if len(pieces) >= _RESAMPLED_AT_ONCE:
            yield _to_frame(pieces, rate)
            pieces.clear()
    if pieces:
        yield _to_frame(pieces, rate)


def _to_frame(pieces: list[NDArray[np.float32]], rate: int) -> AudioFrame:
    frame = AudioFrame.from_ndarray(np.concatenate(pieces)[None], "fltp", "mono")
    frame.sample_rate = rate
    return frame


def _resample(
    resampler: av.AudioResampler, frame: AudioFrame | None, recording: _Recording
) -> None:
    for part in resampler.resample(frame):
        recording.add(part.to_ndarray()[0].copy())
