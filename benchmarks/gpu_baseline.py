"""The torch engine on a GPU, untuned: Qwen2.5-VL-7B shapes, random bfloat16 weights.

    python -m benchmarks.gpu_baseline OUT.json COMMIT [TINY_CHECKPOINT ...]

Encode, prefill and decode times as a base line for later work. Needs no checkpoint; needs no more
than torch, transformers, tokenizers, msgspec and numpy. With folders of tiny Qwen-VL checkpoints it
first compares the engine's greedy tokens on the GPU with those of transformers there, in float32.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from triptych import models
from triptych.checkpoint import Model, open_model
from triptych.config import TorchSettings
from triptych.engines.base import Generation, Media
from triptych.engines.torch import weights
from triptych.engines.torch.attention import ATTENTION_NAME
from triptych.engines.torch.encoder import TorchEncoder
from triptych.engines.torch.engine import TorchEngine
from triptych.engines.torch.memory import count_blocks
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, MediaItem, MediaKind, MediaMeta, Sampling, Work
from triptych.models import patches
from triptych.models.family import Family
from triptych.models.tensors import tensor_view
from triptych.recipe import GridImage, GridVideo
from triptych.transfer.base import Array

CONFIG: dict[str, Any] = {  # the shapes of Qwen2.5-VL-7B
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
ROUNDS = 5


def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="triptych-7b-"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


def random_part(build: Callable[[], torch.nn.Module], device: str) -> torch.nn.Module:
    """The module with small random bfloat16 weights on the device; its buffers stay as built."""
    with weights.EmptyWeights():
        module = build()
    for inner in module.modules():
        for name, value in list(inner.named_parameters(recurse=False)):
            made = torch.empty(value.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
            setattr(inner, name, torch.nn.Parameter(made, requires_grad=False))
    return module.to(device).eval()


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape)) * {"bfloat16": 2, "float32": 4, "uint8": 1}[dtype]
    return Array(memoryview(bytearray(size)), dtype, shape)


def median_ms(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 2)


def encode_times(model: Model, device: str) -> list[tuple[str, float, str]]:
    family = models.find_family(model)
    module = random_part(lambda: family.build_encoder(), device)
    weights.set_attention(module, "sdpa")
    rng, figures = np.random.default_rng(0), []
    with torch.inference_mode():
        for side, count in ((640, 1), (1008, 1), (1008, 8)):
            items = [picture(family, rng, side, side)] * count
            ms = median_ms(lambda items=items: family.encode(module, items))
            what = f"encode {count} x {side}x{side} ({items[0].meta.tokens * count} tokens)"
            figures.append((what, ms, "ms"))
    return figures


def picture(family: Family, rng: np.random.Generator, height: int, width: int) -> PreparedMedia:
    """Noise, as the decode pool gives it."""
    recipe = family.recipes.image
    assert isinstance(recipe, GridImage)
    unit = recipe.patch * recipe.merge
    pixels = rng.integers(0, 256, (height // unit * unit, width // unit * unit, 3), np.uint8)
    return ready(pixels, (1, len(pixels) // recipe.patch, pixels.shape[1] // recipe.patch), "image")


def ready(
    pixels: np.ndarray, grid: tuple[int, int, int], kind: MediaKind, times: tuple[float, ...] = ()
) -> PreparedMedia:
    array = Array(memoryview(pixels.tobytes()), "uint8", pixels.shape)
    key = hashlib.sha256(array.buffer).digest()
    patches = grid[0] * grid[1] * grid[2]
    return PreparedMedia(MediaMeta(key, patches // 4, grid, kind, times), (array,), patches)


class Probe:
    """Generations through the engine, with the times at which their tokens came."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.number = 0

    def work(self, tokens: int, new: int, media: tuple[MediaItem, ...] = ()) -> Work:
        self.number += 1
        rng = np.random.default_rng(self.number)
        prompt = [int(i) for i in rng.integers(0, 150000, tokens)]
        for item in media:
            prompt[item.at] = CONFIG["image_token_id"]
        sampling = Sampling(seed=0, max_tokens=new, temperature=0.0, ignore_eos=True)
        return Work(f"w{self.number}", tuple(prompt), media, sampling)

    async def run(self, work: Work, media: tuple[Media, ...] = ()) -> list[float]:
        times, start = [], time.perf_counter()

        def emit(delta: Any) -> None:
            if isinstance(delta, Delta) and delta.ids:
                times.append(time.perf_counter() - start)

        await self.engine.generate(Generation(work, "PD", media), emit)
        return times

    async def first_ms(self, tokens: int, rounds: int = ROUNDS) -> float:
        times = [(await self.run(self.work(tokens, 1)))[0] for _ in range(rounds + 2)]
        return round(1000 * statistics.median(times[2:]), 2)

    async def picture_first_ms(self, rows: int, text: int) -> float:
        """Prefill of a picture's embedding and some text; the encoder is timed elsewhere."""
        side = int(rows**0.5)
        array = empty("bfloat16", (side * side, 3584))
        times = []
        for i in range(ROUNDS + 2):
            meta = MediaMeta(bytes([i]) * 32, side * side, (1, 2 * side, 2 * side))
            item = MediaItem("image", 4, b"")
            times.append((await self.run(self.work(text, 1, (item,)), (Media(meta, (array,)),)))[0])
        return round(1000 * statistics.median(times[2:]), 2)

    async def decode_ms(self, batch: int, context: int, new: int = 48) -> float:
        """Median time between tokens while all streams of the batch decode."""
        streams = await asyncio.gather(*(self.run(self.work(context, new)) for _ in range(batch)))
        begin = max(times[0] for times in streams)
        gaps = [
            later - sooner
            for times in streams
            for sooner, later in itertools.pairwise(times)
            if sooner > begin
        ]
        return round(1000 * statistics.median(gaps), 2)

    async def throughput(self, requests: int, tokens: int, new: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(self.run(self.work(tokens, new)) for _ in range(requests)))
        return round(requests * new / (time.perf_counter() - start), 1)


async def language_times(model: Model, device: str) -> list[tuple[str, float, str]]:
    family = models.find_family(model)
    module = random_part(lambda: family.build_language(), device)
    weights.set_attention(module, ATTENTION_NAME)
    language = family.language(module)
    settings = TorchSettings(step_tokens=8192, prefix_cache=False)
    blocks = count_blocks(32 << 30, language, settings)
    settings = msgspec.structs.replace(settings, kv_blocks=blocks)
    engine = TorchEngine(language, family.layout, model, settings, empty)
    probe = Probe(engine)
    try:
        await probe.run(probe.work(64, 4))
        figures = [
            ("prefill 4096 text tokens", await probe.first_ms(4096), "ms"),
            ("TTFT, 512 text tokens", await probe.first_ms(512), "ms"),
            ("prefill 1296 image + 64 text", await probe.picture_first_ms(1296, 64), "ms"),
        ]
        for batch in (1, 32, 128):
            step = await probe.decode_ms(batch, 1500)
            figures.append((f"decode step, batch {batch}, context 1500", step, "ms"))
        rate = await probe.throughput(128, 512, 128)
        return [*figures, ("128 requests, 512 in, 128 out", rate, "tok/s")]
    finally:
        engine.close()


async def compare_tiny(path: str, device: str) -> dict[str, int]:
    """Greedy tokens of pictures and clips at once, in chunks, beside transformers', in float32."""
    model, family = open_model(path), models.find_family(open_model(path))
    module = weights.load_part(family, model, "encoder", device, torch.float32)
    spoken = weights.load_part(
        family, model, "language", device, torch.float32, attention=ATTENTION_NAME
    )
    settings = TorchSettings(step_tokens=48)
    encoder = TorchEncoder(family, module, model.context, settings, empty)
    language = family.language(spoken)
    engine = TorchEngine(language, family.layout, model, settings, empty)
    stock = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    stock = stock.to(device).eval()

    async def one(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        item = clip(family, rng) if seed % 2 else picture(family, rng, 128, 64 + 32 * seed)
        [media] = await encoder.encode([item])
        kind = item.meta.kind
        prompt = (5, 6, 7, model.media_ids[kind], *range(20, 60 + seed))
        sampling = Sampling(seed=0, max_tokens=24, temperature=0.0, ignore_eos=True)
        ids: list[int] = []
        work = Work(f"t{seed}", prompt, (MediaItem(kind, 3, b""),), sampling)
        await engine.generate(Generation(work, "PD", (media,)), lambda d: ids.extend(d.ids))
        laid = torch.tensor([family.layout(prompt, (3,), (media.meta,)).ids], device=device)
        with torch.inference_mode():
            want = stock.generate(
                input_ids=laid,
                attention_mask=torch.ones_like(laid),
                mm_token_type_ids=(laid == model.media_ids[kind]).int() * (1 + seed % 2),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=-1,
                **stock_inputs(model, family, item, device),
            )[0, laid.shape[1] :].tolist()
        return ids == want

    equal = await asyncio.gather(*(one(seed) for seed in range(8)))
    engine.close()
    encoder.close()
    return {"requests": len(equal), "equal_to_transformers": sum(equal)}


def clip(family: Family, rng: np.random.Generator) -> PreparedMedia:
    recipe = family.recipes.video
    assert isinstance(recipe, GridVideo)
    side = 4 * recipe.patch
    pixels = rng.integers(0, 256, (6, side, side, 3), np.uint8)
    return ready(pixels, (3, 4, 4), "video", (0.0, 1.0, 2.0))


def stock_inputs(model: Model, family: Family, item: PreparedMedia, device: str) -> dict[str, Any]:
    """What stock processors would give; that patches are theirs is tested elsewhere."""
    recipe = family.recipes.image if item.meta.kind == "image" else family.recipes.video
    assert isinstance(recipe, GridImage | GridVideo)
    values = patches.patchify_all(
        [tensor_view(item.arrays[0])], recipe, 2, torch.empty(0, device=device)
    )
    grid = torch.tensor([item.meta.grid], device=device)
    if item.meta.kind == "image":
        return {"pixel_values": values, "image_grid_thw": grid}
    timed = {"second_per_grid_ts": torch.tensor([1.0])} if model.family == "qwen2_5_vl" else {}
    return {"pixel_values_videos": values, "video_grid_thw": grid, **timed}


def result(figures: list[tuple[str, float, str]], commit: str, details: Any) -> dict[str, Any]:
    """In the shape of benchmarks.record, which may not be there where the GPU is."""
    empty = {"target": None, "at_least": False, "met": None, "detail": ""}
    return {
        "name": "gpu_baseline",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": "python -m benchmarks.gpu_baseline OUT.json COMMIT TINY_CHECKPOINT ...",
        "machine": {
            "cpu": f"a machine with one {torch.cuda.get_device_name()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
        "figures": [{"what": w, "found": f, "unit": u} | empty for w, f, u in figures],
        "details": details,
    }


def main() -> None:
    out, commit, device = Path(sys.argv[1]), sys.argv[2], "cuda"
    details: dict[str, Any] = {"shapes": "Qwen2.5-VL-7B", "weights": "random bfloat16"}
    figures: list[tuple[str, float, str]] = []
    for path in sys.argv[3:]:
        name = open_model(path).family
        equal = details[f"tiny_{name}_float32"] = asyncio.run(compare_tiny(path, device))
        share = equal["equal_to_transformers"] / equal["requests"]
        figures.append((f"tiny {name}, float32: requests equal to transformers", share, ""))
    model = open_model(folder())
    torch.manual_seed(0)
    figures += encode_times(model, device)
    torch.cuda.empty_cache()
    figures += asyncio.run(language_times(model, device))
    text = json.dumps(result(figures, commit, details), indent=2)
    out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
