from __future__ import annotations

import asyncio

import pytest

from triptych.engines.base import Generation
from triptych.engines.trtllm import monitor
from triptych.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InvalidValue,
    UnsupportedParameter,
    WorkerLost,
)
from triptych.messages import PromptInfo
from unit.engines.trtllm.fake_llm import BLOCKS
from unit.engines.trtllm.fake_parameters import RequestError
from unit.engines.trtllm.rooms import Heard


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_stream_arrives_token_by_token_with_its_prompt_once(rooms):
    room = rooms.open("EPD")
    heard = await rooms.answer(room, rooms.work(return_prompt_ids=True))
    assert [len(delta.ids) for delta in heard.deltas] == [1] * 6
    assert [delta.finish for delta in heard.deltas] == [None] * 5 + ["length"]
    told = [delta.prompt for delta in heard.deltas]
    assert told == [PromptInfo(2, 0, (5, 6))] + [None] * 5
    assert set(heard.deltas[0].timings) == {"prefill"}
    assert set(heard.deltas[-1].timings) == {"decode"}
    assert room.report().counters["generated_tokens"] == 6


async def test_end_tokens_end_a_stream_and_are_emitted(rooms):
    rooms.world.end_after = 2
    room = rooms.open("EPD")
    heard = await rooms.answer(room, rooms.work())
    assert heard.ids[2:] == [rooms.model.end_ids[0]]
    assert heard.deltas[-1].finish == "stop"
    sampling = rooms.world.calls[-1]["sampling"]
    assert sampling.stop_token_ids == list(rooms.model.end_ids)


async def test_ignored_end_tokens_leave_the_clients_own(rooms):
    rooms.world.end_after = 2
    room = rooms.open("EPD")
    free = await rooms.answer(room, rooms.work(ignore_eos=True))
    assert (len(free.ids), free.deltas[-1].finish) == (6, "length")
    heard = await rooms.answer(room, rooms.work(ignore_eos=True, stop_token_ids=(33,)))
    assert (heard.ids[2:], heard.deltas[-1].finish) == ([33], "stop")


async def test_seeds_matter_only_where_tokens_are_drawn(rooms):
    room = rooms.open("EPD")

    async def ids(**sampling):
        return (await rooms.answer(room, rooms.work(**sampling))).ids

    assert await ids(seed=1) == await ids(seed=2)
    drawn = await ids(seed=1, temperature=1.0)
    assert drawn == await ids(seed=1, temperature=1.0)
    assert drawn != await ids(seed=2, temperature=1.0)
    assert await ids(seed=2**64 - 1, temperature=1.0)


async def test_sampling_parameters_have_the_engines_names(rooms):
    room = rooms.open("EPD")
    work = rooms.work(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={44: 100.0},
        max_tokens=None,
        min_tokens=7,
    )
    heard = await rooms.answer(room, rooms.work(logit_bias={44: 100.0}))
    assert set(heard.ids) == {44}
    task = asyncio.create_task(rooms.answer(room, work))
    await until(lambda: len(rooms.world.calls) == 2)
    task.cancel()
    await asyncio.wait({task})
    sent = rooms.world.calls[-1]["sampling"]
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.7, 0.9, 5, 0.1)
    assert (sent.presence_penalty, sent.frequency_penalty) == (0.2, 0.3)
    assert sent.repetition_penalty == 1.1
    assert sent.min_tokens == 7
    assert sent.max_tokens == rooms.model.context - 2
    assert (sent.detokenize, sent.add_special_tokens) == (False, False)


@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids", "prompt_logprobs"])
async def test_what_the_engine_has_no_option_for_is_refused(rooms, field):
    room = rooms.open("EPD")
    value = {"bad_words": ((4,),), "allowed_token_ids": (4,), "prompt_logprobs": 0}[field]
    with pytest.raises(UnsupportedParameter) as refused:
        await rooms.answer(room, rooms.work(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize("best", [0, 1, 3])
async def test_logprobs_are_of_the_chosen_token_and_the_best(rooms, best):
    room = rooms.open("EPD")
    heard = await rooms.answer(room, rooms.work(logprobs=best))
    assert len(heard.logprobs) == len(heard.ids) == 6
    for id, told in zip(heard.ids, heard.logprobs, strict=True):
        assert told.logprob == -0.5
        assert [entry.logprob for entry in told.top] == [-0.5, -1.5, -2.5][:best]
        assert not told.top or told.top[0].id == id


async def test_the_prefix_cache_is_the_tenants_own(rooms):
    room = rooms.open("EPD")

    async def cached(salt):
        heard = await rooms.answer(room, rooms.work(salt=salt))
        return heard.deltas[0].prompt.cached

    assert [await cached(salt) for salt in ("", "", "a", "a", "b")] == [0, 1, 0, 1, 0]
    assert rooms.world.calls[0]["salt"] is None
    assert room.report().counters["cached_tokens"] == 2


async def test_what_does_not_fit_is_refused_before_the_engine_sees_it(rooms):
    room = rooms.open("EPD", max_model_len=64, engine_args="--max_num_tokens 32")
    for work, error in (
        (rooms.work(max_tokens=63), ContextLengthExceeded),
        (rooms.work(logit_bias={rooms.model.vocabulary: 1.0}), InvalidValue),
    ):
        with pytest.raises(error):
            await rooms.answer(room, work)
    item = rooms.pictures(1)[0]
    long = rooms.work([item.meta] * 6, max_tokens=1)
    media = [rooms.embedding(item.meta)] * 6
    assert 32 < 6 * item.meta.tokens < 63
    with pytest.raises(ContextLengthExceeded):
        await rooms.answer(room, long, media)
    assert not rooms.world.calls
    chunked = rooms.open(
        "EPD", max_model_len=64, engine_args="--max_num_tokens 64 --enable_chunked_prefill"
    )
    assert (await rooms.answer(chunked, long, media)).ids


async def test_cancelling_aborts_and_frees_everything(rooms, monkeypatch):
    monkeypatch.setattr(monitor, "CHECK_INTERVAL", 0.001)
    room = rooms.open("EPD")
    [llm] = rooms.world.llms
    heard = Heard()
    work = rooms.work(max_tokens=1000)
    task = asyncio.create_task(room.engine.generate(Generation(work, "PD", ()), heard))
    await until(lambda: len(heard.ids) > 2)
    assert llm.free < BLOCKS
    assert room.report().running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.free == BLOCKS
    assert room.report().queued == room.report().running == 0
    await until(lambda: room.report().kv_blocks_free == room.report().kv_blocks_total == BLOCKS)


async def test_sixteen_at_once_are_sixteen_streams(rooms):
    room = rooms.open("EPD")
    works = [rooms.work(seed=n, temperature=1.0) for n in range(16)]
    alone = [(await rooms.answer(room, work)).ids for work in works]
    together = await asyncio.gather(*(rooms.answer(room, work) for work in works))
    assert [heard.ids for heard in together] == alone
    assert len({tuple(ids) for ids in alone}) == 16


async def test_the_engines_end_is_the_workers(rooms):
    room = rooms.open("EPD")
    heard = Heard()
    work = rooms.work(max_tokens=1000)
    task = asyncio.create_task(room.engine.generate(Generation(work, "PD", ()), heard))
    await until(lambda: len(heard.ids) > 2)
    assert not room.died.is_set()
    rooms.world.kill()
    with pytest.raises(WorkerLost):
        await task
    assert room.died.is_set()
    with pytest.raises(WorkerLost):
        await rooms.answer(room, rooms.work())


async def test_an_idle_engines_end_is_noticed(rooms, monkeypatch):
    monkeypatch.setattr(monitor, "CHECK_INTERVAL", 0.001)
    room = rooms.open("EPD")
    await rooms.answer(room, rooms.work())
    assert not room.died.is_set()
    rooms.world.kill()
    async with asyncio.timeout(5):
        await room.died.wait()


async def test_a_call_that_finds_the_engine_gone_dies_too(rooms):
    room = rooms.open("EPD")
    rooms.world.kill()
    with pytest.raises(WorkerLost):
        await rooms.answer(room, rooms.work())
    assert room.died.is_set()


async def test_a_request_that_fails_leaves_the_engine_alive(rooms, monkeypatch):
    room = rooms.open("EPD")
    [llm] = rooms.world.llms

    def refuse(result):
        raise RequestError("no room for it")

    monkeypatch.setattr(llm, "_step", refuse)
    with pytest.raises(EngineFailed, match="no room for it"):
        await rooms.answer(room, rooms.work())
    monkeypatch.undo()
    assert not room.died.is_set()
    assert llm.free == BLOCKS


@pytest.mark.parametrize("reason", ["timeout", "cancelled", None])
async def test_an_end_that_is_none_is_an_error(rooms, monkeypatch, reason):
    room = rooms.open("EPD")
    [llm] = rooms.world.llms
    monkeypatch.setattr(llm, "_step", lambda result: result._end(reason))
    with pytest.raises(EngineFailed):
        await rooms.answer(room, rooms.work())
    assert not room.died.is_set()
