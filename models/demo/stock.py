"""What plain transformers answers to the questions that a server was asked: float32, greedy.

Pictures and sounds go in as stock processors make them of the decoded files. Frames of a clip are
those that Triptych's preparation chooses and resizes, which golden tensors hold equal to the stock
video processor's; that one needs torchvision.
"""

from __future__ import annotations

import io
import sys
import wave
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from models.demo.asking import MAX_TOKENS, Answer, Question
from models.demo.files import File
from triptych import models
from triptych.checkpoint import open_model, read_json
from triptych.config import Limits
from triptych.media.prepare import prepare
from triptych.recipe import Recipes

TESTS = Path(__file__).parents[2] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import reference  # noqa: E402
from support import sounds  # noqa: E402


def answer(folder: Path, one: Question, prompt_ids: Sequence[int]) -> Answer:
    """``prompt_ids``: with a placeholder for every row of the media, as the server tells them."""
    given = inputs(folder.resolve(), one.every_file)
    found = reference.generate(folder, prompt_ids, max_tokens=MAX_TOKENS, inputs=given)
    return Answer("", tuple(found.ids), tuple(prompt_ids), tuple(found.logprobs))


def inputs(folder: Path, files: Sequence[File]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if seen := [_picture(file) for file in files if file.kind == "image"]:
        made |= reference.image_inputs(folder, seen)
    if clips := [_frames(folder, file) for file in files if file.kind == "video"]:
        made |= reference.video_inputs(folder, clips)
        settings = read_json(folder / "video_preprocessor_config.json")
        seconds = settings["temporal_patch_size"] / settings.get("fps", 2)
        made["video_second_per_grid"] = torch.full((len(clips),), float(seconds))
    if heard := [_samples(file) for file in files if file.kind == "audio"]:
        made |= sounds.stock_inputs(folder, heard)
    return made


def _picture(file: File) -> Image.Image:
    return Image.open(io.BytesIO(file.data)).convert("RGB")


def _samples(file: File) -> NDArray[np.float32]:
    with wave.open(io.BytesIO(file.data)) as opened:
        data = opened.readframes(opened.getnframes())
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def _frames(folder: Path, file: File) -> tuple[NDArray[np.uint8], Sequence[float]]:
    """uint8 [frames, height, width, 3], and when the moments begin."""
    data = memoryview(file.data)
    meta, arrays, _, _ = prepare("video", "file", data, _recipes(folder), Limits(), False)
    return arrays[0], meta.times


@cache
def _recipes(folder: Path) -> Recipes:
    return models.find_family(open_model(folder)).recipes
