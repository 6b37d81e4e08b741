"""A 1080p JPEG to Qwen2.5-VL's patches: CPU time beside the stock slow processor, and the rate of
the decode pool with one process and with two.

Ours is what runs in a decoding process (decode, resize, media key) and then in the encoder (tone
and patches), each in one thread. The stock one is ``Qwen2VLImageProcessorPil`` with Pillow's own
decoder, and the checkpoint's limits of pixels. Ours resizes as the stock fast processor does, with
torch; so here and there a value differs by a step or two of 255, and no more (checked).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from benchmarks import pictures
from benchmarks.load import cpu_seconds
from benchmarks.record import Figure

MIN_PIXELS, MAX_PIXELS = 3136, 12845056
TARGET = 3.0
STEPS, LEAST_STD = 3, 0.26  # by which values may differ, and what they are divided by
PROCESSES = (1, 2)


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    rounds, count = (5, 8) if quick else (25, 40)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes below
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stock, ours = Stock(), Ours()
        found = {
            "1080p JPEG": _compare(pictures.photo(1, 1920, 1080), stock, ours, rounds),
            "1 MB data URL": asyncio.run(_from_url(stock, ours, rounds)),
            "pool": asyncio.run(_pool(count)),
        }
    finally:
        torch.set_num_threads(threads)
    return _figures(found), found


class Stock:
    def __init__(self) -> None:
        from transformers import Qwen2VLImageProcessorPil

        self._processor: Any = Qwen2VLImageProcessorPil(
            min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
        )

    def patches(self, file: bytes) -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(file)).convert("RGB")
        return self._processor(image, return_tensors="pt")["pixel_values"]


class Ours:
    def __init__(self) -> None:
        from triptych.config import Limits
        from triptych.recipe import GridImage, Normalization, Recipes

        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        self._grid = GridImage(14, 2, MIN_PIXELS, MAX_PIXELS, 3, Normalization(1 / 255, mean, std))
        self.recipes = Recipes("benchmark", image=self._grid)
        self._limits = Limits()

    def decoded(self, file: bytes) -> Any:
        from triptych.media.prepare import prepare

        _, [pixels], _, _ = prepare(
            "image", "file", memoryview(file), self.recipes, self._limits, False
        )
        return pixels

    def patches(self, file: bytes) -> Any:
        import torch

        pixels = self.decoded(file)
        return self.cut(torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()))

    def cut(self, pixels: Any) -> Any:
        import torch

        from triptych.models.patches import patchify_all

        return patchify_all([pixels], self._grid, 2, torch.zeros(1))


def _check(one: Any, other: Any) -> None:
    if one.shape != other.shape or float((one - other).abs().max()) > STEPS / 255 / LEAST_STD:
        raise RuntimeError("the patches are not the stock processor's")


def _compare(file: bytes, stock: Stock, ours: Ours, rounds: int) -> dict[str, Any]:
    _check(stock.patches(file), ours.patches(file))
    ways: dict[str, Callable[[bytes], Any]] = {
        "stock": stock.patches,
        "ours": ours.patches,
        "of these, decoding": ours.decoded,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_cpu_ms(lambda way=way: way(file)))  # type: ignore[misc]
    return {"bytes": len(file), "cpu_ms": times}


def _cpu_ms(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return round(1e3 * (time.process_time() - start), 2)


async def _from_url(stock: Stock, ours: Ours, rounds: int) -> dict[str, Any]:
    """A request's body with a data URL of 1 MB, through a decode pool, to patches."""
    from triptych.api import requests
    from triptych.api.content import MediaPolicy
    from triptych.api.request_body import decode_request
    from triptych.config import CacheSettings, Config
    from triptych.media.pool import DecodePool
    from triptych.messages import MediaItem
    from triptych.models.tensors import tensor_view

    chat_decoder = msgspec.json.Decoder(requests.ChatRequest)
    file = pictures.photo(2, 2880, 1620)
    body = json.dumps(
        {
            "model": "m",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": pictures.data_url(file)}}
                    ],
                }
            ],
        }
    ).encode()
    pool = DecodePool(ours.recipes, Config(decode_processes=1, cache=CacheSettings(decoded=0)))

    async def through() -> Any:
        request, slices = decode_request(body, chat_decoder, len(body), 8 << 20, 1)
        [turn] = requests.to_turns(request.messages, slices, MediaPolicy(True, 1))
        [part] = turn.content
        prepared = await pool.prepare(MediaItem("image", 0, part.source))
        return ours.cut(tensor_view(prepared.arrays[0]))

    def plainly() -> Any:
        parts = json.loads(body)["messages"][0]["content"]
        return stock.patches(base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2]))

    _check(await through(), plainly())
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    me = os.getpid()
    for _ in range(max(2, rounds // 5)):
        start = cpu_seconds(me)
        for _ in range(5):
            await through()
        times["ours"].append(round(1e3 * (cpu_seconds(me) - start) / 5, 2))
        times["stock"].append(median(_cpu_ms(plainly) for _ in range(5)))
    await pool.close()
    return {"bytes": len(file), "body_bytes": len(body), "cpu_ms": times}


async def _pool(count: int) -> dict[str, list[float]]:
    """Pictures a second through pools of one process and of two, in turns."""
    from triptych.config import CacheSettings, Config
    from triptych.media.pool import DecodePool
    from triptych.messages import MediaItem

    ours = Ours()
    file = pictures.photo(1, 1920, 1080)
    # Another comment makes another file of it: none is decoded for two who ask.
    items = [MediaItem("image", 0, _commented(file, number)) for number in range(count)]
    pools = {
        number: DecodePool(
            ours.recipes, Config(decode_processes=number, cache=CacheSettings(decoded=0))
        )
        for number in PROCESSES
    }
    rates: dict[str, list[float]] = {str(number): [] for number in PROCESSES}
    try:
        for turn in range(4):
            for number, pool in pools.items():
                start = time.perf_counter()
                await asyncio.gather(*(pool.prepare(item) for item in items))
                if turn:  # the processes start in the first one
                    rates[str(number)].append(round(count / (time.perf_counter() - start), 1))
    finally:
        for pool in pools.values():
            await pool.close()
    return rates


def _commented(file: bytes, number: int) -> bytes:
    return file[:2] + b"\xff\xfe\x00\x0a%08d" % number + file[2:]


def _figures(found: dict[str, Any]) -> list[Figure]:
    figures = []
    for name, target in (("1080p JPEG", TARGET), ("1 MB data URL", None)):
        times = found[name]["cpu_ms"]
        stock, ours = median(times["stock"]), median(times["ours"])
        detail = f"{ours:.1f} ms of CPU beside {stock:.1f} ms; {found[name]['bytes'] >> 10} KiB"
        figures.append(
            Figure(f"{name} to patches, stock over ours", stock / ours, "x", target, True, detail)
        )
    ours = median(found["1080p JPEG"]["cpu_ms"]["ours"])
    figures.append(Figure("1080p JPEG to patches", 1e3 / ours, "images/s per core"))
    one, two = (median(found["pool"][str(number)]) for number in PROCESSES)
    detail = f"{two:.1f} images/s beside {one:.1f}, to pixels, through the decode pool"
    figures.append(Figure("two processes over one", two / one, "x", detail=detail))
    return figures
