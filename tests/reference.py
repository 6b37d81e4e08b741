"""What plain transformers answers: the measure of every arrangement.

Stock model, stock default image processors (their arithmetic written out, for they need
torchvision), greedy, float32, one request at a time. Knows nothing of Triptych but the checkpoint
folder; expanded prompt ids and decoded pictures (or the inputs that stock processors make of other
media) are given to it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import stock_images


@dataclass(frozen=True)
class Reference:
    ids: list[int]  # generated, with the end token where one came
    logprobs: list[float]  # of ids
    gaps: list[float]  # best logit minus second best, at each step


@functools.lru_cache(maxsize=4)
def stock_model(folder: Path) -> Any:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    name = name.replace("OmniForConditional", "OmniThinkerForConditional")  # who speaks in words
    return (
        getattr(transformers, name)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        .eval()
    )


def image_inputs(folder: Path, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Stock pixel values (and grids or sizes) of RGB pictures; nothing for none."""
    if not pictures:
        return {}
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    return stock_images.inputs(settings, pictures)


def video_inputs(
    folder: Path, clips: Sequence[tuple[np.ndarray, Sequence[float]]]
) -> dict[str, torch.Tensor]:
    """What Qwen-VL's video processors give for clips that are sampled and resized already.

    A clip is uint8 [frames, height, width, 3] and the seconds of its moments. Written out, since
    the stock classes need torchvision.
    """
    file = folder / "video_preprocessor_config.json"
    settings = json.loads(file.read_text())
    patch, merge, moment = (
        settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size")
    )
    scale = 1.0 / settings["rescale_factor"]
    mean = torch.tensor(settings["image_mean"])[:, None, None] * scale
    std = torch.tensor(settings["image_std"])[:, None, None] * scale
    values, grids, seconds = [], [], []
    for pixels, times in clips:
        frames = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - mean) / std
        time, rows, columns = (
            len(frames) // moment,
            frames.shape[2] // patch,
            frames.shape[3] // patch,
        )
        split = frames.view(
            time, moment, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        values.append(split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * rows * columns, -1))
        grids.append([time, rows, columns])
        seconds.append(times[1] - times[0] if len(times) > 1 else 1.0)
    inputs = {
        "pixel_values_videos": torch.cat(values),
        "video_grid_thw": torch.tensor(grids),
        "second_per_grid_ts": torch.tensor(seconds),
    }
    if "second_per_grid_ts" not in inspect.signature(stock_model(folder).forward).parameters:
        del inputs["second_per_grid_ts"]
    return inputs


def video_features(
    folder: Path, clips: Sequence[tuple[np.ndarray, Sequence[float]]]
) -> list[torch.Tensor]:
    """Stock embeddings [tokens, width] of every clip."""
    inputs = video_inputs(folder, clips)
    inputs.pop("second_per_grid_ts", None)
    with torch.inference_mode():
        return _rows(stock_model(folder).get_video_features(**inputs))


def image_features(folder: Path, pictures: Sequence[Image.Image]) -> list[torch.Tensor]:
    """Stock embeddings [tokens, width] of every picture."""
    with torch.inference_mode():
        return _rows(stock_model(folder).get_image_features(**image_inputs(folder, pictures)))


def _rows(output: Any) -> list[torch.Tensor]:
    """Of every item, with what deepstack layers add beside the embedding."""
    rows = list(output.pooler_output)
    if (deep := getattr(output, "deepstack_features", None)) is None:
        return rows
    lengths = [len(row) for row in rows]
    parts = [layer.split(lengths) if isinstance(layer, torch.Tensor) else layer for layer in deep]
    return [torch.cat([row, *more], dim=-1) for row, *more in zip(rows, *parts, strict=True)]


def token_of(folder: Path, kind: str) -> int | None:
    """The placeholder of a kind of media."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("thinker_config", config)
    return config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))


def image_token(folder: Path) -> int:
    token = token_of(folder, "image")
    assert token is not None
    return token


def token_types(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """1 where rows of an image stand, 2 for video, 3 for audio."""
    types = torch.zeros_like(ids, dtype=torch.int)
    for number, kind in enumerate(("image", "video", "audio"), start=1):
        if (token := token_of(folder, kind)) is not None:
            types[ids == token] = number
    return types


def image_lengths(folder: Path, pictures: Sequence[Image.Image]) -> list[int]:
    """Placeholder tokens that every picture takes."""
    return [len(rows) for rows in image_features(folder, pictures)] if pictures else []


def expand(folder: Path, prompt: Sequence[int], pictures: Sequence[Image.Image]) -> list[int]:
    """A prompt with one placeholder for each picture, expanded."""
    token, lengths = image_token(folder), iter(image_lengths(folder, pictures))
    return [i for id in prompt for i in ([id] * next(lengths) if id == token else [id])]


def generate(
    folder: Path | str,
    ids: Sequence[int],
    pictures: Sequence[Image.Image] = (),
    max_tokens: int = 32,
    *,
    inputs: Mapping[str, Any] | None = None,
    ignore_eos: bool = False,
) -> Reference:
    """Greedy continuation of expanded ids with 0 or more RGB pictures, in order.

    ``inputs``: what stock processors make of other media (``pixel_values_videos`` ...).
    """
    model, prompt, inputs = _prepare(folder, ids, pictures, inputs)
    if ignore_eos:
        inputs["eos_token_id"] = model.config.get_text_config().vocab_size  # one that never comes
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
    new = output.sequences[0, len(ids) :].tolist()
    return _reference(new, torch.cat(output.logits))


def follow(
    folder: Path | str,
    ids: Sequence[int],
    generated: Sequence[int],
    pictures: Sequence[Image.Image] = (),
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Reference:
    """The greedy choice after each prefix of ``generated``, in one forward pass.

    Where it equals ``generated``, ``generate`` would give the same tokens: each follows from those
    before it. It costs a tenth.
    """
    model, prompt, inputs = _prepare(folder, [*ids, *generated[:-1]], pictures, inputs)
    with torch.inference_mode():
        output = model(input_ids=prompt, attention_mask=torch.ones_like(prompt), **inputs)
    logits = output.logits[0, len(ids) - 1 :]
    return _reference(logits.argmax(-1).tolist(), logits)


def _prepare(
    folder: Path | str,
    ids: Sequence[int],
    pictures: Sequence[Image.Image],
    inputs: Mapping[str, Any] | None,
) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    folder = Path(folder).resolve()
    model = stock_model(folder)
    found = {**image_inputs(folder, pictures), **(inputs or {})}
    prompt = torch.tensor([list(ids)])
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:  # M-RoPE needs it
        found["mm_token_type_ids"] = token_types(folder, prompt)
    return model, prompt, found


def _reference(new: list[int], logits: torch.Tensor) -> Reference:
    """``logits``: [tokens, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    best = logits.topk(2).values
    return Reference(
        ids=new,
        logprobs=[logprobs[step, id].item() for step, id in enumerate(new)],
        gaps=(best[:, 0] - best[:, 1]).tolist(),
    )
