"""Sounds made of tones and noise, and what stock and our own preparation make of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.torch_engine import frozen
from triptych.media import audio, mel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.recipe import MelAudio

RATE = 16_000


@functools.lru_cache(maxsize=256)
def wave(seed: int, seconds: float) -> np.ndarray:
    """Mono sound, float32 [samples]: three gliding tones, a little noise, and an abrupt end."""
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    sound = draw.normal(0, 0.02, len(time))
    for _ in range(3):
        start, glide, beat = draw.uniform(150, 3000), draw.uniform(-200, 400), draw.uniform(1, 9)
        loud = 0.2 * (1 + np.sin(2 * np.pi * beat * time))
        sound += loud * np.sin(2 * np.pi * (start + glide * time) * time)
    return sound.astype(np.float32)


@functools.lru_cache(maxsize=4)
def extractor(folder: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(folder)


def stock_inputs(folder: Path, waves: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """``input_features`` [items, mels, most frames] and ``feature_attention_mask``; or nothing."""
    if not waves:
        return {}
    found = extractor(folder)(
        list(waves),
        sampling_rate=RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {
        "input_features": found["input_features"],
        "feature_attention_mask": found["attention_mask"],
    }


def prepared(sound: np.ndarray, recipe: MelAudio) -> PreparedMedia:
    """A sound as the decode pool gives it."""
    spectrum, tokens = audio.to_spectrum(sound, recipe)
    return _item(torch.from_numpy(spectrum), tokens, recipe)


def with_stock_spectrum(folder: Path, sound: np.ndarray, recipe: MelAudio) -> PreparedMedia:
    """The same, but for the spectrum, which is the stock extractor's to the last bit."""
    inputs = stock_inputs(folder, [sound])
    frames = int(inputs["feature_attention_mask"].sum())
    spectrum = torch.nn.functional.pad(inputs["input_features"][0], (0, recipe.tail))
    return _item(spectrum[:, : frames + recipe.tail], mel.token_count(frames), recipe)


def _item(spectrum: torch.Tensor, tokens: int, recipe: MelAudio) -> PreparedMedia:
    frames = spectrum.shape[1] - recipe.tail
    key = hashlib.sha256(spectrum.contiguous().numpy().tobytes()).digest()
    return PreparedMedia(MediaMeta(key, tokens, (frames,), "audio"), (frozen(spectrum),), frames)
