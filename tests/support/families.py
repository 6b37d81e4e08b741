"""Requests with every kind of media that a family takes, and what plain transformers answers.

Files are made here; what stock transformers takes in their place comes from its own processors
where these run without torchvision, and else from what our sandbox decodes, which golden tensors
hold equal to the stock processors'.
"""

from __future__ import annotations

import base64
import io
import random
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from tools import tiny

import reference
from support import clips, pictures, sounds
from support.mixed import Mixed
from support.requests64 import words
from support.servers import text_part
from support.torch_engine import frozen
from triptych.config import Limits
from triptych.media.base import PreparedMedia
from triptych.media.prepare import prepare
from triptych.messages import MediaKind

COUNT = 32
TOKENS = 10
SIZES = ((56, 84), (120, 40), (97, 131), (160, 120))
SECONDS = (0.3, 0.7, 1.1, 2.2)


@dataclass(frozen=True, eq=False)
class Shown:
    """One media file, and what is in it for stock processors."""

    kind: MediaKind
    data: bytes
    content: Any = None  # an image, or samples

    @property
    def part(self) -> dict[str, Any]:
        mime = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}[self.kind]
        url = f"data:{mime};base64,{base64.b64encode(self.data).decode()}"
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": url}}


@cache
def image(number: int) -> Shown:
    picture = pictures.draw(number, *SIZES[number % len(SIZES)])
    return Shown("image", pictures.encoded(picture), picture)


@cache
def video(number: int, sound: float = 0.0) -> Shown:
    frames = 20 + 13 * (number % 4)
    form = "webm" if number % 3 == 2 and not sound else "mp4"
    width, height = SIZES[number % len(SIZES)]
    size = {"width": width // 2 * 2, "height": height // 2 * 2}
    return Shown("video", clips.video(number, form, frames=frames, fps=10, sound=sound, **size))


@cache
def audio(number: int) -> Shown:
    """16 bit and 16 kHz, so that no engine resamples."""
    samples = np.round(sounds.wave(number, SECONDS[number % len(SECONDS)]) * 16000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, sounds.RATE, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    return Shown("audio", file.getvalue(), samples.astype(np.float32) / 32768)


@cache
def slow_video(number: int) -> Shown:
    """Of two frames a second: an engine that samples so many sees all of them."""
    width, height = SIZES[number % len(SIZES)]
    size = {"width": width // 2 * 2, "height": height // 2 * 2}
    return Shown("video", clips.video(number, "mp4", frames=8 + 2 * (number % 4), fps=2, **size))


SHOW: dict[MediaKind, Callable[[int], Shown]] = {"image": image, "video": video, "audio": audio}


@dataclass(frozen=True)
class Asked:
    turns: list[dict[str, Any]]
    media: list[Shown]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "messages": self.turns,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }

    def embedded(self, family: str) -> Asked:
        """The same with embeddings instead of files."""
        embeddings = iter([embeds_part(family, shown) for shown in self.media])
        turns = [
            turn
            if isinstance(turn["content"], str)
            else turn
            | {
                "content": [
                    part if part["type"] == "text" else next(embeddings) for part in turn["content"]
                ]
            }
            for turn in self.turns
        ]
        return Asked(turns, self.media)


@lru_cache
def bench(family: str) -> Mixed:
    return Mixed(tiny.ensure_checkpoint(family))


@lru_cache
def kinds(family: str) -> tuple[MediaKind, ...]:
    recipes = bench(family).family.recipes
    return tuple(kind for kind in SHOW if getattr(recipes, kind) is not None)


@lru_cache
def mixed(
    family: str, count: int = COUNT, slow: bool = False, only: tuple[MediaKind, ...] = ()
) -> tuple[Asked, ...]:
    """Thirty-two requests: each kind alone, several of one, kinds mixed over turns, words alone.

    ``slow``: with clips that every engine's own sampling sees whole; ``only``: of these kinds.
    """
    rng = random.Random(f"{family}")
    taken = only or kinds(family)
    show = SHOW | {"video": slow_video} if slow else SHOW
    asked = [_asked(rng, [[kind]], show) for kind in taken for _ in range(3)]
    asked += [_asked(rng, [[kind, kind]], show) for kind in taken]
    asked += [_asked(rng, [[]], show), _asked(rng, [[], []], show)]
    while len(asked) < count:
        turns = [[rng.choice(taken) for _ in range(rng.randint(0, 2))] for _ in range(2)]
        asked.append(_asked(rng, turns, show))
    return tuple(asked)


@lru_cache
def same_words(family: str) -> dict[MediaKind, tuple[Asked, ...]]:
    """By kind: requests that differ in nothing but what is in their one media item."""
    return {
        kind: tuple(
            Asked([{"role": "user", "content": [shown.part, text_part("Which is it?")]}], [shown])
            for shown in map(SHOW[kind], range(20, 40, 4))
        )
        for kind in kinds(family)
    }


def _asked(
    rng: random.Random,
    turns: list[list[MediaKind]],
    show: Mapping[MediaKind, Callable[[int], Shown]],
) -> Asked:
    made: list[dict[str, Any]] = []
    media: list[Shown] = []
    for number, given in enumerate(turns):
        if number:
            made.append({"role": "assistant", "content": words(rng, 4)})
        parts = []
        for kind in given:
            media.append(show[kind](rng.randrange(12)))
            parts.append(media[-1].part)
        parts.insert(rng.randint(0, len(parts)), text_part(words(rng, rng.choice([3, 12]))))
        made.append({"role": "user", "content": parts})
    return Asked(made, media)


@cache
def prepared(family: str, shown: Shown) -> PreparedMedia:
    """As the sandbox gives it."""
    recipes = bench(family).family.recipes
    data = memoryview(shown.data)
    meta, arrays, cost, _ = prepare(shown.kind, "file", data, recipes, Limits(), False)
    return PreparedMedia(meta, tuple(frozen(torch.from_numpy(a.copy())) for a in arrays), cost)


def embeds_part(family: str, shown: Shown) -> dict[str, Any]:
    """An embedding as a client that has run the encoder would send it."""
    item = prepared(family, shown)
    [rows] = bench(family).encode([item])
    tensors = {f"{shown.kind}_embeds": rows.contiguous()}
    if len(item.meta.grid) == 3:
        tensors[f"{shown.kind}_grid_thw"] = torch.tensor([item.meta.grid])
    if family == "llama4":
        tensors["aspect_ratios"] = torch.tensor([item.meta.grid])
    if item.meta.times:
        tensors["video_times"] = torch.tensor(item.meta.times, dtype=torch.float64)
    kind = f"{shown.kind}_embeds"
    return {"type": kind, kind: base64.b64encode(save(tensors)).decode()}


def _pixels(item: PreparedMedia) -> np.ndarray:
    [array, *_] = item.arrays
    return np.frombuffer(array.buffer, np.uint8).reshape(array.shape).copy()


def _images(family: str, folder: Path, shown: Sequence[Shown]) -> dict[str, Any]:
    contents: list[Image.Image] = [one.content for one in shown]
    if family == "llama4":
        tiles = np.concatenate([_pixels(prepared(family, one)) for one in shown])
        values = torch.from_numpy(tiles).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
        half = torch.tensor(0.5, dtype=torch.bfloat16)
        return {"pixel_values": values.sub(half).div(half).float()}
    return reference.image_inputs(folder, contents)


def _videos(family: str, folder: Path, shown: Sequence[Shown]) -> dict[str, Any]:
    items = [prepared(family, one) for one in shown]
    if family == "llava_next_video":
        recipe = bench(family).family.recipes.video
        frames = torch.from_numpy(np.stack([_pixels(item) for item in items])).float()
        mean, std = (
            255 * torch.tensor(v) for v in (recipe.square.tone.mean, recipe.square.tone.std)
        )
        return {"pixel_values_videos": ((frames - mean) / std).permute(0, 1, 4, 2, 3)}
    inputs = reference.video_inputs(folder, [(_pixels(item), item.meta.times) for item in items])
    if "omni" in family:
        inputs["video_second_per_grid"] = torch.ones(len(items))
    return inputs


def stock_inputs(family: str, media: Sequence[Shown]) -> dict[str, Any]:
    folder = bench(family).folder
    inputs: dict[str, Any] = {}
    if seen := [one for one in media if one.kind == "image"]:
        inputs |= _images(family, folder, seen)
    if seen := [one for one in media if one.kind == "video"]:
        inputs |= _videos(family, folder, seen)
    if heard := [one.content for one in media if one.kind == "audio"]:
        inputs |= sounds.stock_inputs(folder, heard)
    return inputs


def expected(
    family: str, asked: Asked, ids: Sequence[int], generated: Sequence[int] = ()
) -> reference.Reference:
    """What transformers goes on with after the expanded prompt; after ``generated``, if given."""
    inputs, folder = stock_inputs(family, asked.media), bench(family).folder
    if generated:
        return reference.follow(folder, ids, generated, inputs=inputs)
    return reference.generate(folder, ids, max_tokens=TOKENS, inputs=inputs, ignore_eos=True)
