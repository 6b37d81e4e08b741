"""``--encoder native``: vLLM's own tower in a worker of its own, and no file that stays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from contract.engines.kinds import engine_processes
from contract.engines.panels import SECONDS, Panels, lent, prepared, split
from triptych.engines.base import Emit, Generation
from triptych.errors import WorkerLost
from triptych.models.tensors import tensor_view

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def panels(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Panels]:
    panels = Panels("vllm")
    run_dir = str(tmp_path_factory.mktemp("run"))
    panels.config = msgspec.structs.replace(panels.config, encoder="native", run_dir=run_dir)
    yield panels
    await panels.close()
    assert not os.listdir(run_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def towers() -> AsyncIterator[Panels]:
    panels = Panels("torch")
    yield panels
    await panels.close()


def files(panels: Panels) -> list[Path]:
    """Embeddings that lie about."""
    return list(Path(panels.config.run_dir).rglob("*.safetensors"))


async def test_it_encodes_as_our_own_towers(panels: Panels, towers: Panels):
    native, ours = await panels.get("E"), await towers.get("E")
    for mine, other in zip(await native.see(1, 2, 3, 1), await ours.see(1, 2, 3, 1), strict=True):
        assert mine.meta == other.meta
        assert mine.encoded
        [rows], [like] = mine.arrays, other.arrays
        torch.testing.assert_close(tensor_view(rows), tensor_view(like), atol=1e-3, rtol=1e-3)
    assert not files(panels)


async def test_what_it_has_seen_before_it_encodes_again(panels: Panels):
    """vLLM writes nothing for an item that it still knows."""
    native = await panels.get("E")
    [first] = await native.see(4)
    [again] = await native.see(4)
    assert tensor_view(first.arrays[0]).equal(tensor_view(again.arrays[0]))


async def test_cancelled_while_vllm_encodes_it_leaves_nothing(panels: Panels):
    native = await panels.get("E")
    encoder: Any = native.loaded.encoder
    calls = [asyncio.ensure_future(native.see(number)) for number in range(12)]
    while not encoder._engine._llm.get_num_unfinished_requests():
        await asyncio.sleep(0)
    for call in calls[:-1]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(call.cancelled() for call in calls[:-1])
    assert isinstance(results[-1], tuple)
    await all_gone(panels)


async def test_cancelled_before_it_has_read_the_file_it_leaves_nothing(
    panels: Panels, monkeypatch: pytest.MonkeyPatch
):
    native = await panels.get("E")
    encoder: Any = native.loaded.encoder
    engine, written = encoder._engine, []

    async def generate(generation: Generation, emit: Emit) -> None:
        def emitted(answer: Any) -> None:
            written.extend(files(panels))
            call.cancel()

        await engine.generate(generation, emitted)

    monkeypatch.setattr(encoder, "_engine", SimpleNamespace(generate=generate))
    call = asyncio.ensure_future(native.see(7))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert written
    await all_gone(panels)


async def all_gone(panels: Panels) -> None:
    """Neither files nor requests."""
    native = await panels.get("E")
    async with asyncio.timeout(SECONDS):
        while files(panels) or native.loaded.report().queued or native.loaded.report().running:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("apart", [False, True], ids=["E/PD", "E/P/D"])
async def test_prefill_accepts_its_embeddings(panels: Panels, apart: bool):
    """The answers of the whole, which are another picture's when that is given."""
    whole = await panels.get("EPD")
    works = [panels.work(panels.prompt(seed, 40, 2), salt="whole") for seed in (1, 2)]
    expected = [(await whole.answer(work, await whole.see(5, 6))).ids for work in works]
    native = await panels.get("E")
    prefill = await panels.get("P" if apart else "PD")
    decode = await panels.get("D") if apart else prefill
    found = []
    for work, seen in [(works[0], (5, 6)), (works[1], (5, 6)), (works[1], (6, 5))]:
        async with lent(await native.see(*seen), native, prefill) as media:
            if apart:
                found.append((await split(prefill, decode, work, media)).ids)
            else:
                found.append((await prefill.answer(work, media)).ids)
    assert found[:2] == expected
    assert found[2] != expected[1]


async def test_a_dead_encoder_is_reported(panels: Panels):
    await panels.close()  # so that there is one engine alone
    native = await panels.get("E")
    assert native.loaded.died is not None
    await native.see(1)
    [engine] = engine_processes("vllm")
    assert native.loaded.encoder is not None
    call = asyncio.ensure_future(native.loaded.encoder.encode([prepared(native, 2, 560, 560)]))
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        await native.loaded.died.wait()
        with pytest.raises(WorkerLost):
            await call
        with pytest.raises(WorkerLost):
            await native.see(3)
    native.loaded.report()
