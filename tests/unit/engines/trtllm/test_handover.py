from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from support.torch_engine import empty
from triptych.engines.adapter.base import read_note, write_note
from triptych.engines.base import Generation, Media, PrefillOutput
from triptych.engines.trtllm import api, requests
from triptych.errors import EngineFailed, TicketLost, WorkerLost
from unit.engines.trtllm.fake_llm import BLOCKS
from unit.engines.trtllm.rooms import Heard


@asynccontextmanager
async def prefilled(room, work, media=()):
    """What prefill gives, for as long as its call is open."""
    heard: asyncio.Queue = asyncio.Queue()
    call = room.engine.generate(Generation(work, "P", tuple(media)), heard.put_nowait)
    task = asyncio.create_task(call)
    waiting = asyncio.create_task(heard.get())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await task
    try:
        yield waiting.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert heard.empty()


def decoding(work, given: PrefillOutput, media=()):
    bare = tuple(Media(one.meta, ()) for one in media)
    return Generation(work, "D", bare, given.kv, given.delta)


async def through(rooms, before, after, work, media=()):
    heard = Heard()
    async with prefilled(before, work, media) as given:
        heard(given.delta)
        await after.engine.generate(decoding(work, given, media), heard)
    return heard


def at_rest(rooms):
    return [llm.free for llm in rooms.world.llms] == [BLOCKS] * len(rooms.world.llms)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"logprobs": 2}])
async def test_two_workers_say_what_one_says(rooms, sampling):
    whole, before, after = (rooms.open(role) for role in ("EPD", "P", "D"))
    work = rooms.work(**sampling)
    alone = await rooms.answer(whole, work)
    heard = await through(rooms, before, after, work)
    assert heard.ids == alone.ids
    assert heard.logprobs == alone.logprobs
    assert heard.deltas[-1].finish == alone.deltas[-1].finish
    assert at_rest(rooms)


async def test_prefill_reports_the_prompt_and_decode_every_token(rooms):
    before, after = rooms.open("P"), rooms.open("D")
    work = rooms.work(return_prompt_ids=True)
    async with prefilled(before, work):
        pass
    heard = Heard()
    async with prefilled(before, work) as given:
        assert given.delta.ids == ()
        assert given.delta.prompt.tokens == 2
        [array] = given.kv
        assert array.dtype == "uint8"
        await after.engine.generate(decoding(work, given), heard)
    assert heard.deltas[0].prompt == given.delta.prompt
    assert heard.deltas[0].prompt.ids == (5, 6)
    assert heard.deltas[0].prompt.cached == 1, "what decode finds in its own cache is nobody's"
    note = requests.unpack_kv_note(api.import_trtllm(), read_note(given.kv, requests.TrtKvNote))
    assert heard.ids[:1] == note.first_gen_tokens
    assert set(heard.deltas[0].timings) == {"import"}


async def test_the_state_comes_over_as_it_was(rooms):
    before = rooms.open("P")
    async with prefilled(before, rooms.work(logprobs=2)) as given:
        note = read_note(given.kv, requests.TrtKvNote)
    [kept] = [call for call in rooms.world.calls if call["told"].request_type == "context_only"]
    told = requests.unpack_kv_note(api.import_trtllm(), note)
    assert isinstance(told.opaque_state, bytes)
    assert told.request_type == "generation_only"
    assert told.ctx_request_id > 2**40
    assert [entry.logprob for entry in told.first_gen_log_probs[0].values()] == [-0.5, -1.5]
    assert told.multimodal_embedding_handles is None
    assert kept["sampling"].max_tokens == 1


@pytest.mark.parametrize("roles", [("EP", "D"), ("P", "D")])
async def test_media_go_as_far_as_prefill(rooms, roles):
    whole = rooms.open("EPD")
    before, after = (rooms.open(role) for role in roles)
    items = rooms.pictures(1, 2)
    if roles[0] == "EP":
        media = await before.encoder.encode(items)
    else:
        media = [rooms.embedding(item.meta) for item in items]
    work = rooms.work([item.meta for item in items])
    alone = await rooms.answer(whole, work, media)
    heard = await through(rooms, before, after, work, media)
    assert heard.ids == alone.ids
    layout = rooms.family.layout(work.prompt, [2, 4], [item.meta for item in items])
    last = rooms.world.calls[-1]
    assert last["told"].request_type == "generation_only"
    assert last["positions"][1] == layout.next_position - len(layout.ids)
    assert last["inputs"].prompt_token_ids == list(layout.ids)
    assert at_rest(rooms)


async def test_a_first_token_that_is_the_last_is_prefills_to_tell(rooms):
    before = rooms.open("P")
    async with prefilled(before, rooms.work(max_tokens=1)) as given:
        assert (len(given.delta.ids), given.delta.finish, given.kv) == (1, "length", ())
        assert given.delta.prompt.tokens == 2
    assert rooms.world.calls[-1]["told"] is None, "nothing is kept for nobody"
    rooms.world.end_after = 0
    async with prefilled(before, rooms.work(logprobs=0)) as given:
        assert given.delta.ids == rooms.model.end_ids[:1]
        assert (given.delta.finish, given.kv) == ("stop", ())
        assert len(given.delta.logprobs) == 1
    assert at_rest(rooms)


async def test_prefill_keeps_its_blocks_until_the_call_is_closed(rooms):
    before = rooms.open("P")
    [llm] = rooms.world.llms
    async with prefilled(before, rooms.work()):
        await asyncio.sleep(0.01)
        assert llm.free < BLOCKS
        assert rooms.world.kept
        assert before.report().running == 1
    assert llm.free == BLOCKS
    assert not rooms.world.kept
    assert before.report().running == 0


@pytest.mark.parametrize("tokens", [1, 6])  # one: nothing is left to hand over
async def test_stale_rows_are_never_found_again(rooms, tokens):
    before = rooms.open("P")
    [item] = rooms.pictures(1)
    media = (rooms.embedding(item.meta),)
    generation = Generation(rooms.work([item.meta], max_tokens=tokens), "P", media)

    async def call():
        await before.engine.generate(generation, lambda given: task.cancel())

    task = asyncio.create_task(call())
    with pytest.raises(asyncio.CancelledError):
        await task
    for known in (False, True):
        async with prefilled(before, generation.work, media) as given:
            assert (given.delta.prompt.cached > 0) == known
    assert at_rest(rooms)


async def test_a_cache_that_is_gone_is_a_lost_ticket(rooms):
    before, after = rooms.open("P"), rooms.open("D")
    work = rooms.work()
    async with prefilled(before, work) as given:
        pass
    with pytest.raises(TicketLost):
        await after.engine.generate(decoding(work, given), Heard())
    assert not after.died.is_set()
    assert (await through(rooms, before, after, work)).ids


async def test_prefills_death_is_decodes_lost_ticket(rooms):
    before, after = rooms.open("P"), rooms.open("D")
    work = rooms.work()
    async with prefilled(before, work) as given:
        rooms.world.llms[0]._alive = False
        with pytest.raises(TicketLost):
            await after.engine.generate(decoding(work, given), Heard())
    assert not after.died.is_set()


async def test_decode_that_is_cancelled_lets_the_transfer_end_first(rooms):
    before, after = rooms.open("P"), rooms.open("D")
    llm = rooms.world.llms[1]
    work = rooms.work(max_tokens=100)
    async with prefilled(before, work) as given:
        rooms.world.gate = asyncio.Event()
        heard = Heard()
        task = asyncio.create_task(after.engine.generate(decoding(work, given), heard))
        while llm.free == BLOCKS:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.free < BLOCKS, "it was aborted while the KV cache was under way"
        assert after.report().running == 1
        rooms.world.gate.set()
        async with asyncio.timeout(5):
            while after.report().running:
                await asyncio.sleep(0.001)
    assert not heard.emitted
    assert at_rest(rooms)


async def test_decode_that_began_is_aborted_at_once(rooms):
    before, after = rooms.open("P"), rooms.open("D")
    work = rooms.work(max_tokens=1000)
    heard = Heard()
    async with prefilled(before, work) as given:
        task = asyncio.create_task(after.engine.generate(decoding(work, given), heard))
        while len(heard.ids) < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert after.report().running == 0
    assert at_rest(rooms)


async def test_a_stream_that_begins_otherwise_is_an_error(rooms, monkeypatch):
    before, after = rooms.open("P"), rooms.open("D")
    llm = rooms.world.llms[1]
    work = rooms.work()
    monkeypatch.setattr(
        llm, "_first", lambda result, told: llm._append(result) or llm._append(result)
    )
    async with prefilled(before, work) as given:
        note = read_note(given.kv, dict)
        rooms.world.kept[note["ctx_request_id"]].first = note["first_gen_tokens"] = [999]
        changed = PrefillOutput(given.delta, (write_note(empty, note),))
        with pytest.raises(EngineFailed, match="begin"):
            await after.engine.generate(decoding(work, changed), Heard())


async def test_every_role_answers_text_alone(rooms):
    alone = await rooms.answer(rooms.open("EPD"), rooms.work())
    for role in ("P", "D", "PD", "EP"):
        assert (await rooms.answer(rooms.open(role), rooms.work())).ids == alone.ids


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": "1.2.0"}, EngineFailed),
        ({"opaque_state": "no base64!"}, TicketLost),
        ({"first_gen_tokens": "x"}, TicketLost),
        ({"more": 1}, TicketLost),
    ],
)
async def test_a_note_that_is_none_is_refused(rooms, change, error):
    before, after = rooms.open("P"), rooms.open("D")
    work = rooms.work()
    async with prefilled(before, work) as given:
        note = read_note(given.kv, dict) | change
        changed = PrefillOutput(given.delta, (write_note(empty, note),))
        with pytest.raises(error):
            await after.engine.generate(decoding(work, changed), Heard())
    assert len(rooms.world.calls) == 1
    assert not after.died.is_set()


async def test_prefill_that_fails_says_so(rooms, monkeypatch):
    before = rooms.open("P")
    [llm] = rooms.world.llms
    monkeypatch.setattr(llm, "_keep", lambda result: result._end("timeout"))
    with pytest.raises(EngineFailed, match="timeout"):
        async with prefilled(before, rooms.work()):
            pass
    monkeypatch.undo()
    assert llm.free == BLOCKS
    rooms.world.kill()
    with pytest.raises(WorkerLost):
        async with prefilled(before, rooms.work()):
            pass


def test_infinite_improbability_is_written_too(world):
    told = api.import_trtllm()
    params = told.disaggregated(
        first_gen_tokens=[3],
        first_gen_log_probs=[{3: told.logprob(logprob=float("-inf"), rank=None)}],
    )
    note = msgspec.json.decode(msgspec.json.encode(requests.pack_kv_note(told, params)))
    [[row]] = note["first_gen_log_probs"]
    assert row[0] == 3
    assert row[1] < -1e38
    with pytest.raises(EngineFailed):
        requests.pack_kv_note(told, None)
