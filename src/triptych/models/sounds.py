"""What the families that hear have in common: Whisper's spectra, halved twice."""

from __future__ import annotations

from typing import Any

from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel
from triptych.models.processor_settings import Settings
from triptych.recipe import MelAudio


def mel_audio(settings: Settings, tower: Any, model: Model, tail: int = 0) -> MelAudio:
    """A feature extractor's settings as a recipe; what they leave out is as Whisper's class has it.

    ``tower``: the audio tower's configuration.
    """
    if settings.get("dither"):
        raise UnsupportedModel("the feature extractor's dither is not supported: it is random")
    rate, hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
    mels = settings.get("feature_size", 80)
    if mels != tower.num_mel_bins:
        raise UnsupportedModel(
            f"{model.name}: the feature extractor gives {mels} mels, but the audio tower takes "
            f"{tower.num_mel_bins}"
        )
    return MelAudio(
        rate=rate,
        fft=settings.get("n_fft", 400),
        hop=hop,
        mels=mels,
        max_frames=settings.get("chunk_length", 30) * rate // hop,
        tail=tail,
    )
