"""Runs the stock processors and keeps what they give: tests/goldens/*.npz.

Needs torch, torchvision and transformers, and nothing of Triptych. Give the folder to write to.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
import transformers
from transformers import (
    CLIPImageProcessor,
    Llama4ImageProcessor,
    LlavaNextImageProcessor,
    LlavaNextVideoVideoProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.goldens import digest, frames, picture

KEPT = 600  # values of a result that are kept beside its digest
SMALL = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 24}}
VIDEOS = [
    (Qwen2VLVideoProcessor, SMALL, [(4, 120, 160), (5, 360, 640), (2, 31, 95), (2, 720, 1280)]),
    (Qwen2VLVideoProcessor, {}, [(2, 240, 320), (3, 1080, 1920)]),
    (
        Qwen3VLVideoProcessor,
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 2 * 60}},
        [(4, 120, 160), (5, 360, 640), (7, 300, 200), (2, 20, 90), (2, 720, 1280)],
    ),
    (Qwen3VLVideoProcessor, {}, [(2, 240, 320), (6, 480, 854)]),
    (LlavaNextVideoVideoProcessor, {}, [(3, 120, 160), (2, 360, 641), (2, 500, 224)]),
    (
        LlavaNextVideoVideoProcessor,
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        [(2, 120, 160), (2, 720, 1280)],
    ),
]
PICTURES = [(336, 336), (300, 500), (700, 340), (1000, 1000), (120, 90), (50, 1200), (672, 1344)]
PICTURES += [(337, 335), (1, 1), (2000, 300)]
TILED = [
    {"max_patches": 4},
    {"max_patches": 16},
    {"max_patches": 4, "resize_to_max_canvas": True},
]

HALF = [0.5, 0.5, 0.5]
ODD = {
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 9},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.1, 0.2, 0.3],
    "rescale_factor": 1 / 127,
    "resample": 2,
    "patch_size": 7,
    "temporal_patch_size": 1,
}
QWEN3 = {
    "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    "patch_size": 16,
    "image_mean": HALF,
    "image_std": HALF,
}
CAPPED = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16}}
SHAPES = [(1, 1), (1, 200), (3, 7), (28, 28), (29, 83), (56, 84), (333, 111), (480, 640)]
SHAPES += [(97, 1201), (1013, 1009)]
STRIPS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
SMALL_STRIPS = [[height // 6, width // 6] for height, width in STRIPS]


def square(short, side=None):
    side = side or short
    return {"size": {"shortest_edge": short}, "crop_size": {"height": side, "width": side}}


IMAGES = [
    (Qwen2VLImageProcessor, {}, [*SHAPES, (1080, 1920), (2400, 1800)]),
    (Qwen2VLImageProcessor, CAPPED, SHAPES),
    (Qwen2VLImageProcessor, QWEN3, [*SHAPES, (1080, 1920)]),
    (Qwen2VLImageProcessor, ODD, SHAPES),
    (Qwen2VLImageProcessor, {"do_normalize": False}, SHAPES[4:6]),
    (CLIPImageProcessor, square(336), [*SHAPES, (1080, 1920), (336, 336)]),
    (CLIPImageProcessor, square(112), SHAPES),
    (CLIPImageProcessor, square(70, 56), SHAPES),
    (
        LlavaNextImageProcessor,
        square(336) | {"image_grid_pinpoints": STRIPS},
        [*SHAPES, (1080, 1920), (672, 336)],
    ),
    (
        LlavaNextImageProcessor,
        square(56) | {"image_grid_pinpoints": SMALL_STRIPS},
        [*SHAPES, (57, 110), (110, 57), (168, 168)],
    ),
    (LlavaNextImageProcessor, square(70, 56) | {"image_grid_pinpoints": SMALL_STRIPS}, SHAPES),
]


def entry(processor, settings, shape, values, **result):
    """``values``: uint8 result, float result. Both are digested; of both some values are kept."""
    name = f"{processor.__name__}{len(KEEP)}"
    raw, toned = values
    step = max(1, raw.size // KEPT)
    KEEP[name] = np.stack([raw.reshape(-1)[::step].astype(np.float32), toned.reshape(-1)[::step]])
    result |= {"shape": list(raw.shape), "digest": digest(raw)}
    return {
        "name": name,
        "processor": processor.__name__,
        "settings": settings,
        "shape": list(shape),
        "result": result,
        "step": step,
    }


def videos():
    for processor, settings, shapes in VIDEOS:
        make = processor(**settings)
        for shape in shapes:
            given = torch.from_numpy(frames(*shape)).permute(0, 3, 1, 2).contiguous()
            common = {"videos": [given], "do_sample_frames": False, "return_tensors": "pt"}
            raw = make(**common, do_rescale=False, do_normalize=False)
            toned = make(**common)
            grid = raw.get("video_grid_thw")
            yield entry(
                processor,
                settings,
                shape,
                (raw["pixel_values_videos"].numpy(), toned["pixel_values_videos"].numpy()),
                grid=grid[0].tolist() if grid is not None else None,
            )


def pictures():
    for settings in TILED:
        make = Llama4ImageProcessor(**settings)
        for shape in PICTURES:
            given = torch.from_numpy(picture(*shape)).permute(2, 0, 1).contiguous()
            raw = make(given, do_rescale=False, do_normalize=False, return_tensors="pt")
            toned = make(given, return_tensors="pt")
            yield entry(
                Llama4ImageProcessor,
                settings,
                shape,
                (raw["pixel_values"].numpy(), toned["pixel_values"].float().numpy()),
                ratio=raw["aspect_ratios"][0].tolist(),
            )


def images():
    for processor, settings, shapes in IMAGES:
        make = processor(**settings)
        for shape in shapes:
            given = torch.from_numpy(picture(*shape)).permute(2, 0, 1).contiguous()
            common = {"input_data_format": "channels_first", "return_tensors": "pt"}
            raw = make(given, **common, do_rescale=False, do_normalize=False)
            toned = make(given, **common)
            about = {name: raw[name][0].tolist() for name in raw if name != "pixel_values"}
            values = raw["pixel_values"].numpy()
            yield entry(
                processor, settings, shape, (values, toned["pixel_values"].numpy()), **about
            )


TOTALS = [*range(1, 150), 299, 300, 301, 900, 1801, 8999]
RATES = [7.5, 24.0, 25.0, 30000 / 1001, 60.0]


def samples():
    """Which frames stock takes: for each, flat indices; result.counts says how many a clip gave.

    0: the processor refused the clip. Given are clips of every TOTALS and RATES.
    """
    for processor in (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor):
        make = processor(do_sample_frames=True)
        flat, counts = [], []
        for rate in RATES:
            for total in TOTALS:
                about = VideoMetadata(total_num_frames=total, fps=rate)
                try:
                    taken = [int(index) for index in make.sample_frames(about, fps=2)]
                except (ValueError, ZeroDivisionError):
                    taken = []
                flat += taken
                counts.append(len(taken))
        KEEP[processor.__name__] = np.array(flat, np.int16)
        yield {
            "name": processor.__name__,
            "processor": processor.__name__,
            "settings": {"fps": 2},
            "shape": [len(RATES), len(TOTALS)],
            "result": {"rates": RATES, "totals": TOTALS, "counts": counts},
            "step": 1,
        }


KEEP: dict = {}


def write(path, goldens):
    KEEP.clear()
    about = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "goldens": list(goldens),
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **KEEP)
    print(path, path.stat().st_size, len(KEEP), {k: v for k, v in about.items() if k != "goldens"})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "videos.npz", videos())
    write(folder / "llama4.npz", pictures())
    write(folder / "samples.npz", samples())
    write(folder / "images.npz", images())
