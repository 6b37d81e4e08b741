from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

import reference
from support.pictures import draw
from support.torch_engine import empty, prepared
from triptych import models
from triptych.checkpoint import Model
from triptych.config import TorchSettings
from triptych.engines.base import Media
from triptych.engines.torch import weights
from triptych.engines.torch.encoder import TorchEncoder, with_embeds_recipes
from triptych.errors import ContextLengthExceeded, EngineFailed
from triptych.media.base import PreparedMedia
from triptych.models.family import Family
from triptych.models.tensors import tensor_view
from triptych.recipe import EmbedsFormat
from triptych.transfer.base import Array

SETTINGS = TorchSettings()
CONTEXT = 300


class Gated:
    """A family whose forward pass waits until it is released, and records its batches."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.width = family.width
        self.recipes = family.recipes
        self.batches: list[int] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.refused: list[bytes] = []  # media keys of items that no pass can take

    def encode(self, module: torch.nn.Module, batch: Sequence[PreparedMedia]) -> list[torch.Tensor]:
        self.batches.append(len(batch))
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        if any(item.meta.key in self.refused for item in batch):
            raise IndexError("no such patch")
        return self._family.encode(module, batch)


class Bench:
    """An encoder over a gated family."""

    def __init__(self, model: Model, settings: TorchSettings = SETTINGS) -> None:
        family = models.find_family(model)
        module = weights.load_part(family, model, "encoder", "cpu", torch.float32)
        self.gated: Any = Gated(family)
        self.encoder = TorchEncoder(self.gated, module, CONTEXT, settings, empty)

    def item(self, index: int) -> PreparedMedia:
        return prepared(self.encoder.recipes.image, draw(index))

    async def start(self, *items: PreparedMedia) -> asyncio.Task[list[Media]]:
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
    first = await bench.start(bench.item(0))
    await bench.entered()
    others = [await bench.start(bench.item(1), bench.item(2)), await bench.start(bench.item(3))]
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
        torch.testing.assert_close(tensor_view(result.arrays[0]), rows, atol=2e-5, rtol=1e-5)


async def test_memory_is_allocated_outside_the_event_loop(bench: Bench) -> None:
    threads = []

    def watched(dtype: str, shape: tuple[int, ...]) -> Array:
        threads.append(threading.current_thread())
        return empty(dtype, shape)

    bench.encoder._empty = watched
    bench.let_go()
    await bench.encoder.encode([bench.item(0), bench.item(1)])
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_the_meta_of_an_item_is_not_changed(bench: Bench) -> None:
    bench.let_go()
    item = bench.item(3)
    (result,) = await bench.encoder.encode([item])
    assert result.meta == item.meta


async def test_media_too_long_for_any_prompt_are_refused_before_decoding(bench: Bench) -> None:
    item = bench.item(0)
    for tokens in (CONTEXT, 10**6):
        long = msgspec.structs.replace(item.meta, tokens=tokens)
        with pytest.raises(ContextLengthExceeded, match=str(tokens)):
            await bench.encoder.encode([item, PreparedMedia(long, item.arrays, item.cost)])
    assert bench.encoder.queued == 0
    assert bench.gated.batches == []


async def test_a_batch_holds_one_kind(bench: Bench) -> None:
    first = await bench.start(bench.item(0))
    await bench.entered()
    spoken = PreparedMedia(msgspec.structs.replace(bench.item(1).meta, kind="audio"), (), 1)
    mixed = await bench.start(bench.item(1), bench.item(2))
    other = await bench.start(spoken)
    last = await bench.start(bench.item(3))
    await bench.ready(4)
    bench.let_go()
    assert len(await first) + len(await mixed) + len(await last) == 4
    with pytest.raises(EngineFailed):  # neither family has ears
        await other
    assert bench.gated.batches == [1, 3, 1]


def test_recipes_say_which_embeddings_are_accepted(bench: Bench, model: Model) -> None:
    recipes = bench.encoder.recipes
    merge = 0 if model.family == "llava" else 2
    assert recipes.revision == model.revision
    assert recipes.image_embeds == EmbedsFormat(bench.gated.width, "float32", merge)
    assert (recipes.video_embeds is None) == (recipes.video is None)
    assert recipes.audio_embeds is None
    deep = with_embeds_recipes(bench.gated.recipes, 256, "bfloat16")
    assert deep.image_embeds == EmbedsFormat(256, "bfloat16", merge)


async def test_the_patch_budget_bounds_a_batch(model: Model) -> None:
    cost = prepared(models.find_family(model).recipes.image, draw(1)).cost
    bench = Bench(model, TorchSettings(encode_patches=2 * cost))
    first = await bench.start(bench.item(1))
    await bench.entered()
    others = await bench.start(*[bench.item(1)] * 5)
    await bench.ready(5)
    bench.let_go()
    assert len(await first) + len(await others) == 6
    assert bench.gated.batches == [1, 2, 2, 1]
    bench.encoder.close()


async def test_a_picture_over_the_budget_goes_alone(model: Model) -> None:
    bench = Bench(model, TorchSettings(encode_patches=1))
    bench.let_go()
    assert len(await bench.encoder.encode([bench.item(1), bench.item(2)])) == 2
    assert bench.gated.batches == [1, 1]
    bench.encoder.close()


async def test_a_cancelled_request_leaves_the_queue(bench: Bench) -> None:
    first = await bench.start(bench.item(0))
    await bench.entered()
    cancelled, kept = (
        await bench.start(bench.item(1), bench.item(2)),
        await bench.start(bench.item(3)),
    )
    await bench.ready(3)
    assert (bench.encoder.queued, bench.encoder.running) == (3, 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert bench.encoder.queued == 1
    bench.let_go()
    assert len(await first) == len(await kept) == 1
    assert bench.gated.batches == [1, 1]


async def test_a_request_cancelled_in_the_forward_pass_waits_for_its_end(bench: Bench) -> None:
    """The pass still reads the item's memory, which the caller gives back afterwards."""
    first = await bench.start(bench.item(0))
    await bench.entered()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0.01)
        assert not first.done()
    bench.let_go()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(await bench.encoder.encode([bench.item(1)])) == 1


async def test_an_item_that_fails_the_pass_fails_no_other_item(bench: Bench, caplog) -> None:
    first = await bench.start(bench.item(0))
    await bench.entered()
    bad = bench.item(2)
    bench.gated.refused = [bad.meta.key]
    before, itself, after = [await bench.start(i) for i in (bench.item(1), bad, bench.item(3))]
    await bench.ready(3)
    bench.let_go()
    with pytest.raises(EngineFailed, match="IndexError"):
        await itself
    assert len([*await first, *await before, *await after]) == 3
    assert bench.gated.batches == [1, 3, 1, 1, 1]
    assert bench.encoder.counters == {"encoded_items": 3, "encoder_batches": 3}
    assert "no such patch" in caplog.text
    assert (bench.encoder.queued, bench.encoder.running) == (0, 0)
    assert len(await bench.encoder.encode([bench.item(1), bench.item(3)])) == 2
    assert bench.gated.batches[5:] == [2]


async def test_a_request_cancelled_between_items_leaves_the_queue(bench: Bench) -> None:
    bench.gated.refused = [bench.item(1).meta.key]
    both = await bench.start(bench.item(1), bench.item(2))
    await bench.entered()
    bench.let_go()
    with pytest.raises(EngineFailed):
        await both
    assert (bench.encoder.queued, bench.encoder.running) == (0, 0)


async def test_a_batch_that_fails_as_all_is_closed_ends(bench: Bench) -> None:
    bench.gated.error = RuntimeError("out of memory")
    both = await bench.start(bench.item(0), bench.item(1))
    await bench.entered()
    bench.let_go()
    bench.encoder.close()
    with pytest.raises(EngineFailed, match="RuntimeError"):
        await both


async def test_a_failed_pass_fails_its_item_and_the_next_one_works(bench: Bench) -> None:
    bench.gated.error = RuntimeError("out of memory")
    bench.let_go()
    with pytest.raises(EngineFailed, match="RuntimeError"):
        await bench.encoder.encode([bench.item(0)])
    bench.gated.error = None
    assert len(await bench.encoder.encode([bench.item(0)])) == 1
    assert bench.encoder.counters["encoder_batches"] == 1


async def test_closing_ends_all_waits(bench: Bench) -> None:
    first = await bench.start(bench.item(0))
    await bench.entered()
    second = await bench.start(bench.item(1))
    await bench.ready(1)
    bench.let_go()
    bench.encoder.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(await first) == 1


async def test_the_event_loop_is_free_meanwhile(bench: Bench) -> None:
    waiting = await bench.start(bench.item(1))
    await bench.entered()
    await asyncio.sleep(0)  # a loop that waited for the pass would never come back
    assert not waiting.done()
    bench.let_go()
    assert len(await waiting) == 1
