"""What transformers' default image processors give, written out, since they need torchvision.

Torch's resizing of 8-bit pixels, their fused tone in float32, their order: those of
Qwen2VLImageProcessor, CLIPImageProcessor and LlavaNextImageProcessor. Rules that are not theirs
alone are transformers' own. Golden tensors hold this to the processors; knows nothing of Triptych.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_transforms import divide_to_patches, get_resize_output_image_size
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, ChannelDimension
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

Settings = Mapping[str, Any]
FIRST = ChannelDimension.FIRST


def inputs(settings: Settings, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Of RGB pictures, by the processor that ``image_processor_type`` names."""
    name = settings["image_processor_type"]
    images = [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]
    if name.startswith("Qwen2VL"):
        return _grids(settings, images)
    if name.startswith("LlavaNext"):
        return _strips(settings, images)
    squares = [_square(settings, image) for image in images]
    return {"pixel_values": torch.stack([_toned(settings, square) for square in squares])}


def _resized(settings: Settings, image: Tensor, height: int, width: int) -> Tensor:
    """uint8 [3, height, width]."""
    if tuple(image.shape[1:]) == (height, width):
        return image
    mode = {2: "bilinear", 3: "bicubic"}[settings.get("resample", 3)]
    return torch.nn.functional.interpolate(
        image.contiguous()[None], (height, width), mode=mode, align_corners=False, antialias=True
    )[0]


def _toned(settings: Settings, image: Tensor) -> Tensor:
    factor = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_normalize", True):
        return image * factor if settings.get("do_rescale", True) else image
    scale = 1.0 / factor if settings.get("do_rescale", True) else 1.0
    mean = torch.tensor(settings.get("image_mean", OPENAI_CLIP_MEAN)) * scale
    std = torch.tensor(settings.get("image_std", OPENAI_CLIP_STD)) * scale
    return image.float().sub_(mean[:, None, None]).div_(std[:, None, None])


def _grids(settings: Settings, images: list[Tensor]) -> dict[str, Tensor]:
    patch, merge = settings.get("patch_size", 14), settings.get("merge_size", 2)
    repeat = settings.get("temporal_patch_size", 2)
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    most = settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    values, grids = [], []
    for image in images:
        sides = smart_resize(*image.shape[1:], patch * merge, least, most)
        toned = _toned(settings, _resized(settings, image, *sides))
        rows, columns = (side // patch for side in sides)
        split = toned.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        ordered = split.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        repeated = ordered.expand(-1, -1, -1, -1, -1, repeat, -1, -1)
        values.append(repeated.reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


def _square(settings: Settings, image: Tensor) -> Tensor:
    short, side = settings["size"]["shortest_edge"], settings["crop_size"]["height"]
    sides = get_resize_output_image_size(
        image, size=short, default_to_square=False, input_data_format=FIRST
    )
    whole = _resized(settings, image, *sides)
    top, left = (int((length - side) / 2.0) for length in sides)
    return whole[:, top : top + side, left : left + side]


def _strips(settings: Settings, images: list[Tensor]) -> dict[str, Tensor]:
    short, side = settings["size"]["shortest_edge"], settings["crop_size"]["height"]
    made = []
    for image in images:
        best = select_best_resolution(tuple(image.shape[1:]), settings["image_grid_pinpoints"])
        tall, wide = get_patch_output_size(image, best, input_data_format=FIRST)
        left, right = (best[1] - wide) // 2, (best[1] - wide + 1) // 2
        top, bottom = (best[0] - tall) // 2, (best[0] - tall + 1) // 2
        fitted = _resized(settings, image, tall, wide)
        sheet = torch.nn.functional.pad(fitted, (left, right, top, bottom))
        parts = [_resized(settings, image, short, short), *divide_to_patches(sheet, side)]
        tiles = [_toned(settings, _square(settings, part)) for part in parts]
        made.append(torch.stack(tiles))
    most = max(len(tiles) for tiles in made)
    padded = [
        torch.cat([tiles, tiles.new_zeros(most - len(tiles), *tiles.shape[1:])]) for tiles in made
    ]
    sizes = torch.tensor([tuple(image.shape[1:]) for image in images])
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
