from __future__ import annotations

import asyncio
import hashlib

import pytest
import torch

from triptych.engines.adapter.base import SamplingRequest
from triptych.engines.base import Generation, Media
from triptych.engines.trtllm.requests import trt_sampling_options
from triptych.errors import EngineFailed, InvalidEmbedding, InvalidMedia, InvalidValue
from triptych.messages import Grammar, Sampling
from triptych.transfer.base import Array
from unit.engines.trtllm.rooms import Heard, Rooms, video


async def test_pictures_go_to_the_engines_own_processor(rooms):
    room = rooms.open("EPD")
    items = rooms.pictures(1, 2, 3)
    media = await room.encoder.encode(items)
    assert [one.encoded for one in media] == [False] * 3
    work = rooms.work([one.meta for one in media], return_prompt_ids=True)
    heard = await rooms.answer(room, work, media)
    layout = rooms.family.layout(work.prompt, [2, 4, 6], [one.meta for one in media])
    assert heard.deltas[0].prompt.ids == layout.ids
    [call] = rooms.world.calls
    assert call["told"] is None
    keys = [item.meta.key.hex() for item in items]
    assert list(call["inputs"].multimodal_params.identity) == keys


async def test_every_picture_and_their_order_matter(rooms):
    room = rooms.open("EPD")
    one, two, three = await room.encoder.encode(rooms.pictures(1, 2, 3))
    work = rooms.work([one.meta, two.meta])
    answers = [
        (await rooms.answer(room, work, media)).ids
        for media in ((one, two), (two, one), (one, three), (one, two))
    ]
    assert answers[0] == answers[3]
    assert len({tuple(ids) for ids in answers}) == 3


async def test_embeddings_go_by_handle_with_positions_and_keys(rooms):
    room = rooms.open("PD")
    items = rooms.pictures(1, 2)
    media = [rooms.embedding(item.meta) for item in items]
    work = rooms.work([one.meta for one in media])
    heard = await rooms.answer(room, work, media)
    assert len(heard.ids) == 6
    [call] = rooms.world.calls
    layout = rooms.family.layout(work.prompt, [2, 4], [one.meta for one in media])
    assert call["inputs"].prompt_token_ids == list(layout.ids)
    where, shift = call["positions"]
    assert torch.equal(where, torch.from_numpy(layout.positions))
    assert shift == layout.next_position - len(layout.ids) != 0
    told = call["told"].multimodal_hashes
    joined = [b"".join(n.to_bytes(4, "big", signed=True) for n in numbers) for numbers in told]
    assert joined == [item.meta.key for item in items]
    assert call["told"].request_type == "context_and_generation"


async def test_an_embedding_is_what_its_rows_are(rooms):
    room = rooms.open("PD")
    first, second = (rooms.embedding(item.meta) for item in rooms.pictures(1, 2))
    work = rooms.work([first.meta])
    one, two, again = [(await rooms.answer(room, work, [m])).ids for m in (first, second, first)]
    assert one == again != two


async def test_lent_rows_are_asked_for_before_anything_is_made_of_them(rooms):
    room = rooms.open("PD")
    [item] = rooms.pictures(1)
    generation = Generation(rooms.work([item.meta]), "PD", (rooms.embedding(item.meta),))
    heard = Heard()

    async def call():
        def stale(answer):
            heard(answer)
            task.cancel()

        await room.engine.generate(generation, stale)

    task = asyncio.create_task(call())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not heard.ids
    assert not rooms.world.calls, "the engine has seen them"


async def test_lent_rows_are_not_read_after_that(rooms):
    room = rooms.open("PD")
    [item] = rooms.pictures(1)
    lent = rooms.embedding(item.meta).arrays[0]
    memory = bytearray(lent.buffer)
    media = Media(item.meta, (Array(memoryview(memory), lent.dtype, lent.shape),))
    work = rooms.work([item.meta])
    alone = await rooms.answer(room, work, [rooms.embedding(item.meta)])
    heard = Heard()

    def given_back(answer):
        memory[:] = bytes(len(memory))
        heard(answer)

    await room.engine.generate(Generation(work, "PD", (media,)), given_back)
    assert heard.ids == alone.ids


@pytest.mark.parametrize("encoded", [False, True])
async def test_a_row_may_be_called_otherwise(rooms, encoded):
    rooms.world.row_id = rooms.model.vocabulary + 1  # as some versions have it
    room = rooms.open("EPD")
    items = rooms.pictures(1, 2)
    media = [rooms.embedding(item.meta) for item in items]
    if not encoded:
        media = await room.encoder.encode(items)
    assert (await rooms.answer(room, rooms.work([item.meta for item in items]), media)).ids


async def test_a_video_in_parts_is_a_handle_for_each(world, folders):
    rooms = Rooms(world, folders["qwen3_vl"])
    room = rooms.open("PD")
    meta = video((2, 4, 6), (0.5, 2.5))
    work = rooms.work([meta])
    try:
        heard = await rooms.answer(room, work, [rooms.embedding(meta)])
        layout = rooms.family.layout(work.prompt, [2], [meta])
        assert len(layout.spans) == 2
        [call] = world.calls
        assert call["inputs"].prompt_token_ids == list(layout.ids)
        handles = call["told"].multimodal_embedding_handles
        assert [handle["tensor_size"] for handle in handles] == [[6, rooms.family.width]] * 2
        first, second = call["told"].multimodal_hashes
        assert first != second
        assert len(heard.ids) == 6
    finally:
        rooms.close()


async def test_what_handles_point_to_is_let_go_once_it_was_read(rooms):
    room = rooms.open("PD")
    [item] = rooms.pictures(1)
    work, left = rooms.work([item.meta]), []

    def emit(delta):
        if delta.ids:
            left.append(sum(1 for memory in rooms.world.lent if memory() is not None))

    await room.engine.generate(Generation(work, "PD", (rooms.embedding(item.meta),)), emit)
    assert len(rooms.world.lent) == 3
    assert left == [0] * 6


async def test_a_whole_video_is_one_handle(rooms):
    room = rooms.open("PD")
    meta = video((2, 4, 6), (0.5, 1.5))
    heard = await rooms.answer(room, rooms.work([meta]), [rooms.embedding(meta)])
    assert len(heard.ids) == 6
    assert len(rooms.world.calls[0]["told"].multimodal_embedding_handles) == 1


async def test_rows_of_another_shape_are_refused_before_the_engine_sees_them(rooms):
    room = rooms.open("PD")
    [item] = rooms.pictures(1)
    with pytest.raises(EngineFailed, match="must have shape"):
        await rooms.answer(room, rooms.work([item.meta]), [rooms.embedding(item.meta, width=3)])
    assert not rooms.world.calls
    assert not room.died.is_set()


async def test_files_and_embeddings_together_are_refused(rooms):
    room = rooms.open("EPD")
    first, second = rooms.pictures(1, 2)
    [shown] = await room.encoder.encode([first])
    work = rooms.work([first.meta, second.meta])
    with pytest.raises(InvalidValue, match="either"):
        await rooms.answer(room, work, [shown, rooms.embedding(second.meta)])


async def test_a_model_that_accepts_no_embeddings_refuses_them(world, folders):
    rooms = Rooms(world, folders["qwen2_vl"])
    room = rooms.open("EPD")
    [item] = rooms.pictures(1)
    try:
        assert room.encoder.recipes.image_embeds is room.encoder.recipes.video_embeds is None
        with pytest.raises(InvalidEmbedding):
            await rooms.answer(room, rooms.work([item.meta]), [rooms.embedding(item.meta)])
        media = await room.encoder.encode([item])
        assert (await rooms.answer(room, rooms.work([item.meta]), media)).ids
    finally:
        rooms.close()


async def test_a_tokenizer_that_reads_other_ids_is_found_out(rooms):
    room = rooms.open("EPD")
    [item] = rooms.pictures(1)
    media = await room.encoder.encode([item])
    rooms.world.unfaithful = {9: 8}
    with pytest.raises(EngineFailed, match="tokenizer"):
        await rooms.answer(room, rooms.work([item.meta]), media)
    with pytest.raises(EngineFailed, match="tokenizer"):
        await rooms.answer(room, rooms.work([item.meta]), [rooms.embedding(item.meta)])
    assert (await rooms.answer(room, rooms.work())).ids, "text needs no second reading"
    assert not room.died.is_set()


async def test_other_media_than_pictures_have_no_files_here(rooms):
    room = rooms.open("EPD")
    assert room.encoder.recipes.video is None
    assert room.encoder.recipes.video_embeds is not None
    meta = video((2, 4, 6), (0.5, 1.5))
    shown = rooms.embedding(meta)
    unencoded = type(shown)(meta, shown.arrays, encoded=False)
    with pytest.raises(InvalidMedia, match="video"):
        await rooms.answer(room, rooms.work([meta]), [unencoded])


async def test_the_prefix_cache_knows_media_by_their_key(rooms):
    room = rooms.open("PD")
    [item] = rooms.pictures(1)
    other = type(item.meta)(hashlib.sha256(b"x").digest(), item.meta.tokens, item.meta.grid)

    async def cached(meta):
        heard = await rooms.answer(room, rooms.work([meta]), [rooms.embedding(meta)])
        return heard.deltas[0].prompt.cached > 0

    assert [await cached(meta) for meta in (item.meta, item.meta, other)] == [False, True, False]


@pytest.mark.parametrize(
    ("grammar", "guided"),
    [
        (Grammar("json", "{}"), {"json": "{}"}),
        (Grammar("regex", "a+"), {"regex": "a+"}),
        (Grammar("choice", '["a","\\"b"]'), {"grammar": 'root ::= "a" | "\\"b"'}),
    ],
)
def test_a_grammar_becomes_guided_decoding(rooms: Rooms, grammar: Grammar, guided):
    request = SamplingRequest(Sampling(seed=1, grammar=grammar), rooms.model, 5)
    assert trt_sampling_options(request)["guided_decoding"] == guided


async def test_a_guided_request_reaches_the_engine(rooms: Rooms):
    room = rooms.open("EPD")
    work = rooms.work([], grammar=Grammar("regex", "a+"))
    await rooms.answer(room, work, [])
    assert rooms.world.calls[0]["sampling"].guided_decoding.regex == "a+"
