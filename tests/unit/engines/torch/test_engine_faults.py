"""What must not be let in is refused, and whatever ends early leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch
from tools import tiny

from support.torch_engine import Bench, empty, frozen, prefill, settled, split, whole
from triptych.config import TorchSettings
from triptych.engines.base import Generation, Media
from triptych.engines.torch.engine import TorchEngine
from triptych.errors import ContextLengthExceeded, EngineFailed, InvalidValue, PrefixGone


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tiny.make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def pictured(bench):
    request = next(r for r in bench.prompts(9, pictures=1) if r.pictures)
    return bench.work(request.prompt, request.pictures)


async def refused(engine, work, media, error, **phases):
    with pytest.raises(error) as caught:
        await engine.generate(Generation(work, "PD", media), lambda _: None)
    report = engine.report()
    assert report.queued == report.running == 0
    return caught.value


async def test_what_can_never_fit_is_refused_before_it_is_queued(bench):
    with bench.engine(kv_blocks=4, block_size=4) as engine:
        error = await refused(engine, *bench.work([5] * 10, max_tokens=7), ContextLengthExceeded)
        assert "10 tokens" in error.message
        await refused(engine, *bench.work([5] * 16, max_tokens=None), ContextLengthExceeded)
        await refused(engine, *bench.work([5] * 17, max_tokens=1), ContextLengthExceeded)
        fits = await whole(engine, *bench.work([5] * 10, max_tokens=6, ignore_eos=True))
        assert len(fits.ids) == 6
    with bench.engine() as engine:
        work = bench.work([5] * 10, max_tokens=bench.model.context - 9)
        await refused(engine, *work, ContextLengthExceeded)


async def test_ids_that_are_not_tokens_are_refused(bench):
    with bench.engine() as engine:
        for prompt in ([], [-1], [10**6]):
            await refused(engine, *bench.work(prompt), InvalidValue)
        for bias in ({-1: 1.0}, {10**6: 1.0}):
            await refused(engine, *bench.work([5], logit_bias=bias), InvalidValue)


async def test_embeddings_of_another_shape_are_refused(bench, pictured):
    work, (item,) = pictured
    tokens, width = item.arrays[0].shape
    with bench.engine() as engine:
        for shape in ((tokens - 1, width), (tokens, width + 1), (1, tokens, width)):
            wrong = Media(item.meta, (frozen(torch.zeros(shape)),))
            await refused(engine, work, (wrong,), EngineFailed)
        for media in ((), (item, item)):
            await refused(engine, work, media, EngineFailed)
        await refused(engine, work, (Media(item.meta, ()),), PrefixGone)  # nor is it in the cache
        short = dataclasses.replace(item.arrays[0], buffer=item.arrays[0].buffer[4:])
        await refused(engine, work, (Media(item.meta, (short,)),), EngineFailed)


async def test_a_kv_cache_of_another_shape_is_refused(bench):
    work, media = bench.work([5] * 10)
    with bench.engine(block_size=8) as one, bench.engine(block_size=4) as two:
        handed = await prefill(one, work, media)
        for kv, first in ((handed.kv, handed.delta), ((), handed.delta), (handed.kv, None)):
            with pytest.raises(EngineFailed):
                await two.generate(Generation(work, "D", media, kv, first), lambda _: None)
        assert await settled(two)


async def test_cancelling_frees_every_block_whatever_was_going_on(bench):
    requests = bench.prompts(12, pictures=1)
    with bench.engine(block_size=4, kv_blocks=60, step_tokens=16, max_running=6) as engine:
        for pause in (0, 0.005, 0.02, 0.05):
            works = [
                bench.work(r.prompt, r.pictures, max_tokens=60, ignore_eos=True) for r in requests
            ]
            calls = [asyncio.ensure_future(whole(engine, *work)) for work in works]
            calls += [asyncio.ensure_future(prefill(engine, *work)) for work in works]
            calls += [asyncio.ensure_future(split(engine, engine, *work)) for work in works]
            await asyncio.sleep(pause)
            for call in calls:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(result, asyncio.CancelledError) for result in results)
            assert await settled(engine)
        assert (await whole(engine, *works[0])).ids


async def test_after_a_cancel_returns_nothing_reads_the_media(bench, pictured):
    work, (item,) = pictured
    with bench.engine(step_tokens=1, block_size=1) as engine:
        backing = bytearray(item.arrays[0].buffer)
        shared = memoryview(backing)
        media = (Media(item.meta, (dataclasses.replace(item.arrays[0], buffer=shared),)),)
        call = asyncio.ensure_future(whole(engine, work, media))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        del media, call
        shared.release()
        backing.clear()  # BufferError while somebody still looks at it


async def test_from_the_first_token_on_media_and_kv_can_go(bench, pictured):
    work, (item,) = pictured
    backing = bytearray(item.arrays[0].buffer)
    shared = memoryview(backing)
    seen = []

    def emit(delta):
        if not seen:
            nonlocal generation
            generation = None
            shared.release()
            backing.clear()
        seen.append(delta)

    with bench.engine() as engine:
        generation = Generation(
            work, "PD", (Media(item.meta, (dataclasses.replace(item.arrays[0], buffer=shared),)),)
        )
        call = asyncio.ensure_future(engine.generate(generation, emit))
        await call
    assert len(seen) > 1


async def test_a_request_that_the_model_chokes_on_fails_alone(bench):
    requests = bench.prompts(6, pictures=0)
    works = [bench.work(r.prompt) for r in requests]
    poison = bench.work([250, 251, 252, 253])
    with bench.engine() as engine:
        embed = engine._steps._runner._embed

        def choke(ids, *rest):
            if 251 in ids and 252 in ids:
                raise RuntimeError("not this one")
            return embed(ids, *rest)

        engine._steps._runner._embed = choke
        calls = [whole(engine, *work) for work in [*works, poison]]
        *answers, failed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, EngineFailed)
        assert "not this one" not in failed.message
        assert [a.ids for a in answers] == [bench.expected(r).ids for r in requests]
        assert await settled(engine)


async def test_nan_spoils_no_other_request(bench, pictured):
    work, (item,) = pictured
    bad = Media(item.meta, (frozen(torch.full(item.arrays[0].shape, float("nan"))),))
    good = bench.prompts(4, pictures=0)
    with bench.engine(block_size=4, kv_blocks=40) as engine:
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await whole(engine, work, (bad,))
        assert engine._kv_cache.kv.isfinite().all()
        assert await settled(engine)
        answers = await asyncio.gather(*[whole(engine, *bench.work(r.prompt)) for r in good])
        assert [a.ids for a in answers] == [bench.expected(r).ids for r in good]
        assert (await whole(engine, work, (item,))).ids


async def test_a_broken_device_ends_the_process(bench, caplog):
    ended = threading.Event()
    engine = TorchEngine(
        bench.language, bench.family.layout, bench.model, TorchSettings(), empty, ended.set
    )

    def broken(*_):
        raise RuntimeError("the device is gone")

    runner = engine._steps._runner
    runner._embed = runner.probe = broken
    caught: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, caught.append
    try:
        call = asyncio.ensure_future(whole(engine, *bench.work([5, 6])))
        assert await asyncio.to_thread(ended.wait, 10)
        engine._steps._thread.join()
    finally:
        threading.excepthook = hook
    assert "broke" in caplog.text
    assert not engine._steps.alive
    with pytest.raises(EngineFailed):
        await whole(engine, *bench.work([5, 6]))
    call.cancel()
    engine._loop.call_soon(engine._deliver, [(s, None) for s in engine._scheduler.running])
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.close()


async def test_closing_fails_what_still_runs(bench):
    with bench.engine(max_running=1) as engine:
        works = [bench.work([7, 8, 9], max_tokens=3000, ignore_eos=True) for _ in range(2)]
        calls = [asyncio.ensure_future(whole(engine, *work)) for work in works]
        await asyncio.sleep(0.05)
        engine.close()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineFailed)
        assert engine.report().kv_blocks_free == engine.report().kv_blocks_total
        with pytest.raises(EngineFailed):
            await whole(engine, *works[0])


async def test_an_emit_that_raises_takes_no_token_from_others(bench):
    with bench.engine() as engine:
        loop = asyncio.get_running_loop()
        reported = []
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

        def emit(delta):
            raise ConnectionError

        work, _ = bench.work([5, 6, 7], max_tokens=4, ignore_eos=True)
        calls = [engine.generate(Generation(work, "PD", ()), emit)]
        calls += [whole(engine, *bench.work([9 + i, 8], ignore_eos=True)) for i in range(5)]
        _, *answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [len(a.ids) for a in answers] == [12] * 5
        assert reported


@pytest.mark.parametrize("phases", ["P", "PD", "D"])
async def test_blocks_computed_from_stale_memory_are_not_cached(bench, pictured, phases):
    """A caller that finds its tickets lost cancels itself while the first result is emitted."""
    work, (item,) = pictured
    stale = (Media(item.meta, (frozen(torch.randn(item.arrays[0].shape)),)),)
    with bench.engine(block_size=4) as maker, bench.engine(block_size=4) as engine:
        generation = Generation(work, phases, stale)
        if phases == "D":
            handed = await prefill(maker, work, stale)
            bare = (Media(item.meta, ()),)
            generation = Generation(work, phases, bare, handed.kv, handed.delta)

        async def call():
            task = asyncio.current_task()
            await engine.generate(generation, lambda _: task.cancel())

        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(call())
        assert await settled(engine)
        fresh = await whole(engine, work, (item,))
        assert fresh.deltas[0].prompt.cached == 0
