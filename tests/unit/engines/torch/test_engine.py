"""Whatever the engine does inside, its tokens are those of plain transformers."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from tools import tiny

from support import torch_engine
from support.torch_engine import Bench, empty, prefill, settled, split, whole
from triptych.messages import Sampling, Work

TIGHT = {"step_tokens": 24, "kv_blocks": 64, "block_size": 4, "max_running": 8}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava"])
def bench(request, tmp_path_factory) -> Bench:
    return Bench(
        tiny.make_checkpoint(request.param, tmp_path_factory.mktemp("model") / request.param)
    )


@pytest.fixture(scope="module")
def requests(bench):
    """Requests with 0 to 2 pictures, and what transformers answers."""
    return [(r, bench.expected(r)) for r in bench.prompts(14, pictures=2)]


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 24}, {"block_size": 4}, TIGHT], ids=str)
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(bench, requests, settings):
    with bench.engine(**settings) as engine:
        calls = [whole(engine, *bench.work(r.prompt, r.pictures, logprobs=2)) for r, _ in requests]
        answers = await asyncio.gather(*calls)
        for answer, (_, expected) in zip(answers, requests, strict=True):
            assert answer.ids == expected.ids
            found = [value.logprob for value in answer.logprobs]
            assert found == pytest.approx(expected.logprobs, abs=1e-4)
            assert all(v.top[0].logprob >= v.top[1].logprob for v in answer.logprobs)
        assert await settled(engine)


async def test_preempted_sequences_continue_with_the_same_tokens(bench):
    requests = bench.prompts(10, pictures=0, seed=5)
    with bench.engine(block_size=4, kv_blocks=40) as engine:
        works = [bench.work(r.prompt, max_tokens=60, ignore_eos=True) for r in requests]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        assert await settled(engine)
        assert engine.report().counters["preemptions"] > 0
    with bench.engine() as engine:
        alone = [await whole(engine, *work) for work in works]
    assert [a.ids for a in answers] == [a.ids for a in alone]


async def test_sequences_can_be_moved_out_at_any_time(bench, requests):
    """Amid their prompt, with pictures still to come, and while they decode."""
    draw, moved = random.Random(2), set()
    with bench.engine(block_size=4, step_tokens=12) as engine:
        scheduler = engine._scheduler
        schedule = scheduler.schedule

        def disturbed():
            if scheduler.running and draw.random() < 0.3:
                victim = draw.choice(scheduler.running)
                moved.add((victim.computed < victim.prompt, bool(victim.media)))
                scheduler._preempt(victim)
            return schedule()

        scheduler.schedule = disturbed
        works = [bench.work(r.prompt, r.pictures) for r, _ in requests]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        assert await settled(engine)
    assert {(True, True), (False, False)} <= moved
    assert [a.ids for a in answers] == [expected.ids for _, expected in requests]


async def test_a_second_time_most_of_the_prompt_is_known(bench, requests):
    with bench.engine(block_size=4) as engine:
        works = [bench.work(r.prompt, r.pictures) for r, _ in requests]
        for again in (False, True):
            answers = await asyncio.gather(*[whole(engine, *work) for work in works])
            assert [a.ids for a in answers] == [expected.ids for _, expected in requests]
            for answer in answers if again else ():
                info = answer.deltas[0].prompt
                assert info.cached == (info.tokens - 1) // 4 * 4
        assert await settled(engine)


async def test_the_next_turn_finds_the_answer_of_the_last(bench):
    request = bench.prompts(1, pictures=0)[0]
    with bench.engine(block_size=4) as engine:
        answer = await whole(engine, *bench.work(request.prompt, max_tokens=20, ignore_eos=True))
        grown = request.prompt + answer.ids + [150, 151, 152]
        follow = await whole(engine, *bench.work(grown))
        # the last token's keys and values were never computed
        known = (len(request.prompt) + len(answer.ids) - 1) // 4 * 4
        assert follow.deltas[0].prompt.cached == known
        assert follow.ids == bench.expected(type(request)(grown, [])).ids


async def test_the_cache_is_shared_by_no_other_picture_tenant_or_setting(bench):
    request = next(r for r in bench.prompts(9, pictures=1) if r.pictures)
    image = request.pictures[0].transpose(0)
    mirrored = type(request)(request.prompt, [image])
    with bench.engine(block_size=4) as engine:
        await whole(engine, *bench.work(request.prompt, request.pictures))
        other = await whole(engine, *bench.work(mirrored.prompt, mirrored.pictures))
        assert other.ids == bench.expected(mirrored).ids
        before = request.prompt.index(bench.image_id)
        assert other.deltas[0].prompt.cached == before // 4 * 4
        tenant = await whole(engine, *bench.work(request.prompt, request.pictures, salt="b"))
        assert tenant.deltas[0].prompt.cached == 0
    with bench.engine(block_size=4, prefix_cache=False) as engine:
        for _ in range(2):
            answer = await whole(engine, *bench.work(request.prompt, request.pictures))
            assert answer.deltas[0].prompt.cached == 0


@pytest.mark.parametrize("settings", [{"block_size": 8}, TIGHT], ids=str)
async def test_prefill_and_decode_apart_give_the_same(bench, requests, settings):
    seeded = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 1}
    works = [bench.work(r.prompt, r.pictures, logprobs=1) for r, _ in requests]
    works += [
        bench.work(r.prompt, r.pictures, seed=i, **seeded) for i, (r, _) in enumerate(requests)
    ]
    with bench.engine(**settings) as one, bench.engine(**settings) as two, bench.engine() as both:
        apart = await asyncio.gather(*[split(one, two, *work) for work in works])
        together = await asyncio.gather(*[whole(both, *work) for work in works])
        for a, b in zip(apart, together, strict=True):
            assert a.ids == b.ids
            assert a.deltas[-1].finish == b.deltas[-1].finish
            assert [v.logprob for v in a.logprobs] == pytest.approx(
                [v.logprob for v in b.logprobs], abs=1e-4
            )
        for answer, (_, expected) in zip(apart, requests, strict=False):
            assert answer.ids == expected.ids
        assert await settled(one)
        assert await settled(two)
    assert len({tuple(a.ids) for a in apart[len(requests) :]}) > 1


async def test_memory_is_allocated_outside_the_event_loop(bench, monkeypatch):
    threads = []

    def watched(dtype, shape):
        threads.append(threading.current_thread())
        return empty(dtype, shape)

    monkeypatch.setattr(torch_engine, "empty", watched)
    with bench.engine() as engine:
        handed = await prefill(engine, *bench.work((1, 2, 3)))
        assert handed.kv
    assert len(threads) == 1
    assert threading.current_thread() not in threads


async def test_a_context_that_the_cache_shortens_is_reported(bench, caplog):
    whole = bench.model.context
    with caplog.at_level("WARNING"), bench.engine(block_size=4, kv_blocks=whole // 4):
        assert not caplog.records
    with caplog.at_level("WARNING"), bench.engine(block_size=4, kv_blocks=40):
        [record] = caplog.records
    for word in ("160", str(whole), "--torch-kv-blocks", "--kv-cache-bytes"):
        assert word in record.getMessage()


async def test_decode_copies_only_blocks_that_it_does_not_know(bench):
    request = bench.prompts(1, pictures=0, seed=3)[0]
    with bench.engine(block_size=4) as one, bench.engine(block_size=4) as two:
        work = bench.work(request.prompt)
        first = await split(one, two, *work)
        loaded = []
        load = two._kv_cache.load
        two._kv_cache.load = lambda source, blocks: (
            loaded.append(len(blocks)),
            load(source, blocks),
        )
        second = await split(one, two, *work)
        assert second.ids == first.ids == bench.expected(request).ids
        assert loaded == [1 if len(request.prompt) % 4 else 0]


async def test_seeded_tokens_do_not_depend_on_the_batch(bench, requests):
    works = [
        bench.work(r.prompt, r.pictures, seed=i, temperature=1.0, top_k=40)
        for i, (r, _) in enumerate(requests)
    ]
    with bench.engine(**TIGHT) as engine:
        crowd = await asyncio.gather(*[whole(engine, *work) for work in works])
    with bench.engine() as engine:
        alone = [await whole(engine, *work) for work in works]
    assert [a.ids for a in crowd] == [a.ids for a in alone]


async def test_the_first_delta_has_the_prompt_and_the_last_has_the_timings(bench):
    request = next(r for r in bench.prompts(9, pictures=1) if r.pictures)
    work, media = bench.work(request.prompt, request.pictures, max_tokens=4, ignore_eos=True)
    with bench.engine() as engine:
        answer = await whole(engine, work, media)
    first, last = answer.deltas[0], answer.deltas[-1]
    assert first.prompt.tokens == len(first.prompt.ids)
    assert first.prompt.ids.count(bench.image_id) == media[0].meta.tokens
    assert set(first.timings) == {"queue", "prefill"}
    assert set(last.timings) == {"decode"}
    assert [d.prompt for d in answer.deltas[1:]] == [None] * 3
    assert [d.finish for d in answer.deltas] == [None, None, None, "length"]


async def test_end_tokens_and_stop_tokens_end_a_stream(bench):
    request = bench.prompts(1, pictures=0)[0]
    end = bench.model.end_ids[0]
    force = {"logit_bias": {end: 1000.0}, "max_tokens": 3}
    with bench.engine() as engine:
        ended = await whole(engine, *bench.work(request.prompt, **force))
        assert ended.ids == [end]
        assert ended.deltas[-1].finish == "stop"
        assert set(ended.deltas[-1].timings) == {"queue", "prefill", "decode"}
        ignored = await whole(engine, *bench.work(request.prompt, ignore_eos=True, **force))
        assert ignored.ids == [end] * 3
        assert ignored.deltas[-1].finish == "length"
        plain = await whole(engine, *bench.work(request.prompt, ignore_eos=True))
        stop = plain.ids[3]
        stopped = await whole(
            engine, *bench.work(request.prompt, ignore_eos=True, stop_token_ids=(stop,))
        )
        assert stopped.ids == plain.ids[: plain.ids.index(stop) + 1]
        assert stopped.deltas[-1].finish == "stop"
        only = await prefill(engine, *bench.work(request.prompt, **force))
        assert only.delta.finish == "stop"
        assert only.kv == ()
        assert await settled(engine)


async def test_without_max_tokens_the_context_is_the_end(bench):
    with bench.engine(block_size=4, kv_blocks=8) as engine:
        work = Work("w", (5, 6, 7), (), Sampling(seed=1, temperature=0, ignore_eos=True))
        answer = await whole(engine, work, ())
        assert len(answer.ids) == 8 * 4 - 3
        assert answer.deltas[-1].finish == "length"
        assert await settled(engine)
