from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import reference
from support.pictures import draw, encoded
from triptych.config import Config
from triptych.engines.base import Media
from triptych.engines.torch import families, pictures, weights
from triptych.engines.torch.arrays import view
from triptych.engines.torch.encoder import TorchEncoder
from triptych.engines.torch.family import Family, Pixels
from triptych.errors import (
    EngineFailed,
    ImageTooLarge,
    ImageTooSmall,
    InvalidMedia,
    UnsupportedMediaType,
)
from triptych.messages import MediaItem
from triptych.model import Model, open_model
from triptych.transfer.base import Array

CONFIG = Config()


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
    return Array(memoryview(bytearray(size)), dtype, shape)


def item(index: int, **size: int) -> MediaItem:
    return MediaItem("image", 0, encoded(draw(index, **size)))


class Gated:
    """A family whose forward pass waits until it is let go, and tells its batches."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.hidden = family.hidden
        self.preprocess = family.preprocess
        self.batches: list[int] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None

    def encode(self, module: torch.nn.Module, batch: Sequence[Pixels]) -> list[torch.Tensor]:
        self.batches.append(len(batch))
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return self._family.encode(module, batch)


class Bench:
    """An encoder over a gated family."""

    def __init__(self, model: Model, config: Config = CONFIG) -> None:
        family = families.find(model)
        module = weights.load_part(family, model, "encoder", "cpu", torch.float32)
        self.gated: Any = Gated(family)
        self.encoder = TorchEncoder(self.gated, module, model, config, empty)

    async def start(self, *items: MediaItem) -> asyncio.Task[list[Media]]:
        return asyncio.ensure_future(self.encoder.encode(items))

    async def entered(self) -> None:
        assert await asyncio.to_thread(self.gated.entered.acquire, timeout=60)

    async def ready(self, waiting: int) -> None:
        while len(self.encoder._waiting) < waiting:
            await asyncio.sleep(0.005)

    def let_go(self) -> None:
        self.gated.gate.release(1000)


@pytest.fixture
def bench(model: Model) -> Iterator[Bench]:
    made = Bench(model)
    yield made
    made.let_go()
    made.encoder.close()


async def test_what_waits_is_encoded_in_one_pass_and_equals_stock(
    bench: Bench, model: Model
) -> None:
    first = await bench.start(item(0))
    await bench.entered()
    others = [await bench.start(item(1), item(2)), await bench.start(item(3))]
    await bench.ready(3)
    bench.let_go()
    results = [*await first, *await others[0], *await others[1]]
    assert bench.gated.batches == [1, 3]
    assert bench.encoder.counters == {"encoded_items": 4, "encoder_batches": 2}
    assert (bench.encoder.queued, bench.encoder.running) == (0, 0)
    stock = reference.image_features(model.folder, [draw(i) for i in range(4)])
    for result, rows in zip(results, stock, strict=True):
        assert result.meta.tokens == len(rows)
        assert result.arrays[0].dtype == "float32"
        torch.testing.assert_close(view(result.arrays[0]), rows, atol=2e-5, rtol=1e-5)


async def test_memory_is_made_beside_the_event_loop(bench: Bench) -> None:
    threads = []

    def watched(dtype: str, shape: tuple[int, ...]) -> Array:
        threads.append(threading.current_thread())
        return empty(dtype, shape)

    bench.encoder._empty = watched
    bench.let_go()
    await bench.encoder.encode([item(0), item(1)])
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_identity_and_grid_come_with_the_embedding(bench: Bench, model: Model) -> None:
    bench.let_go()
    (result,) = await bench.encoder.encode([item(3)])
    picture = np.asarray(draw(3))
    assert result.meta.key == pictures.media_key(picture, model.revision)
    assert result.meta.grid == families.find(model).preprocess(picture).grid
    (again,) = await bench.encoder.encode([MediaItem("image", 7, encoded(draw(3), "PNG"))])
    assert again.meta == result.meta


async def test_the_patch_budget_bounds_a_batch(model: Model) -> None:
    patches = families.find(model).preprocess(np.asarray(draw(1))).patches
    torch_settings = msgspec.structs.replace(CONFIG.torch, encode_patches=2 * patches)
    bench = Bench(model, msgspec.structs.replace(CONFIG, torch=torch_settings))
    first = await bench.start(item(1))
    await bench.entered()
    others = await bench.start(*[item(1)] * 5)
    await bench.ready(5)
    bench.let_go()
    assert len(await first) + len(await others) == 6
    assert bench.gated.batches == [1, 2, 2, 1]
    bench.encoder.close()


async def test_a_picture_over_the_budget_goes_alone(model: Model) -> None:
    torch_settings = msgspec.structs.replace(CONFIG.torch, encode_patches=1)
    bench = Bench(model, msgspec.structs.replace(CONFIG, torch=torch_settings))
    bench.let_go()
    assert len(await bench.encoder.encode([item(1), item(2)])) == 2
    assert bench.gated.batches == [1, 1]
    bench.encoder.close()


async def test_a_bad_picture_fails_its_own_call_only(bench: Bench) -> None:
    good = await bench.start(item(0))
    await bench.entered()
    bad = await bench.start(item(1), MediaItem("image", 0, b"<html>"))
    other = await bench.start(item(2))
    with pytest.raises(InvalidMedia):
        await bad
    await bench.ready(1)
    bench.let_go()
    assert len(await good) == len(await other) == 1
    assert bench.encoder.queued == 0


async def test_bad_pictures_by_kind(checkpoints: dict[str, Any]) -> None:
    limits = msgspec.structs.replace(CONFIG.limits, image_pixels=10_000)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    bench = Bench(open_model(checkpoints["qwen2_5_vl"]), config)
    bench.let_go()
    for wrong, given in (
        (ImageTooLarge, item(0, width=101, height=100)),
        (ImageTooSmall, item(0, width=1, height=4096)),
        (UnsupportedMediaType, MediaItem("image", 0, b"GIF89a" + b"\0" * 40)),
        (UnsupportedMediaType, MediaItem("sculpture", 0, b"")),  # type: ignore[arg-type]
    ):
        with pytest.raises(wrong):
            await bench.encoder.encode([given])
    assert bench.gated.batches == []
    bench.encoder.close()


async def test_a_model_without_pictures_says_so(model: Model) -> None:
    bench = Bench(msgspec.structs.replace(model, image_id=None))
    with pytest.raises(UnsupportedMediaType, match="takes no image"):
        await bench.encoder.encode([item(0)])
    bench.encoder.close()


async def test_what_is_cancelled_leaves_the_queue(bench: Bench) -> None:
    first = await bench.start(item(0))
    await bench.entered()
    cancelled, kept = await bench.start(item(1), item(2)), await bench.start(item(3))
    await bench.ready(3)
    assert (bench.encoder.queued, bench.encoder.running) == (3, 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert bench.encoder.queued == 1
    bench.let_go()
    assert len(await first) == len(await kept) == 1
    assert bench.gated.batches == [1, 1]


async def test_cancelling_in_the_forward_pass_harms_nobody(bench: Bench) -> None:
    first = await bench.start(item(0))
    await bench.entered()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    bench.let_go()
    assert len(await bench.encoder.encode([item(1)])) == 1


async def test_a_failed_pass_fails_its_batch_and_the_next_one_works(bench: Bench) -> None:
    bench.gated.error = RuntimeError("out of memory")
    bench.let_go()
    with pytest.raises(EngineFailed, match="RuntimeError"):
        await bench.encoder.encode([item(0)])
    bench.gated.error = None
    assert len(await bench.encoder.encode([item(0)])) == 1
    assert bench.encoder.encoder_batches == 1


async def test_closing_ends_those_who_wait(bench: Bench) -> None:
    first = await bench.start(item(0))
    await bench.entered()
    second = await bench.start(item(1))
    await bench.ready(1)
    bench.let_go()
    bench.encoder.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(await first) == 1


async def test_the_event_loop_is_free_meanwhile(bench: Bench) -> None:
    waiting = await bench.start(item(1))
    await bench.entered()
    await asyncio.sleep(0)  # a loop that waited for the pass would never come back
    assert not waiting.done()
    bench.let_go()
    assert len(await waiting) == 1
