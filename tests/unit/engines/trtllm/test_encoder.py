from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from triptych.engines.base import Media
from triptych.errors import ContextLengthExceeded, EngineFailed, InvalidMedia, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.models.tensors import tensor_view
from unit.engines.trtllm.rooms import video


async def test_pictures_stay_as_they_were_prepared(rooms):
    room = rooms.open("EPD")
    items = rooms.pictures(1, 2)
    kept = await room.encoder.encode(items)
    for item, media in zip(items, kept, strict=True):
        [before], [after] = item.arrays, media.arrays
        assert bytes(after.buffer) == bytes(before.buffer)
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert not after.buffer.readonly, "it is the item's own memory"
    assert room.report().counters["images_passed"] == 2
    assert room.report().running == 0


@pytest.mark.parametrize("settings", [{}, {"encoder": "native"}])
async def test_what_fits_in_no_prompt_is_refused(rooms, settings):
    room = rooms.open("EPD" if not settings else "E", max_model_len=8, **settings)
    [item] = rooms.pictures(1)
    with pytest.raises(ContextLengthExceeded):
        await room.encoder.encode([resized(item, 8)])


def resized(item: PreparedMedia, tokens: int) -> PreparedMedia:
    return PreparedMedia(msgspec.structs.replace(item.meta, tokens=tokens), item.arrays, item.cost)


async def test_the_engines_own_encoder_gives_ordinary_embeddings(rooms):
    room = rooms.open("E", encoder="native")
    assert room.engine is None
    items = rooms.pictures(1, 2, 3)
    media = await room.encoder.encode(items)
    for item, one in zip(items, media, strict=True):
        assert one.encoded
        [rows] = one.arrays
        assert rows.shape == (item.meta.tokens, rooms.family.width)
        assert rows.dtype == "bfloat16"
    tensors = [tensor_view(one.arrays[0]) for one in media]
    assert not torch.equal(tensors[0], tensors[1])
    assert not rooms.world.memory, "handles that nobody opened"
    assert room.report().counters["encoded_items"] == 3


async def test_apart_or_not_the_same_is_seen(rooms):
    whole, apart, after = rooms.open("EPD"), rooms.open("E", encoder="native"), rooms.open("PD")
    items = rooms.pictures(1, 2)
    work = rooms.work([item.meta for item in items])
    heard = await rooms.answer(after, work, await apart.encoder.encode(items))
    shown = await rooms.answer(whole, work, await whole.encoder.encode(items))
    assert heard.ids == shown.ids
    assert len(heard.ids) == 6


async def test_every_handle_is_opened_even_of_a_process_that_left(rooms):
    room = rooms.open("E", encoder="native")
    rooms.world.gate = asyncio.Event()
    task = asyncio.create_task(room.encoder.encode(rooms.pictures(1, 2)))
    while room.report().running < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0)
    rooms.world.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.report().counters["encoded_items"] == 2, "it reads the items no more"
    assert not rooms.world.memory
    assert room.report().running == 0


async def test_an_embedding_of_another_size_is_an_error(rooms):
    room = rooms.open("E", encoder="native")
    [item] = rooms.pictures(1)
    with pytest.raises(EngineFailed, match="of shapes"):
        await room.encoder.encode([resized(item, item.meta.tokens + 1)])
    assert not rooms.world.memory
    assert await room.encoder.encode([item])


async def test_the_native_encoder_takes_pictures_alone(rooms):
    room = rooms.open("E", encoder="native")
    assert room.encoder.recipes.image is not None
    assert room.encoder.recipes.image_embeds is not None
    assert room.encoder.recipes.video is None
    assert room.encoder.recipes.video_embeds is not None, "a client may bring those"
    meta = video((2, 4, 6), (0.5, 1.5))
    arrays = rooms.embedding(meta).arrays
    with pytest.raises(InvalidMedia):
        await room.encoder.encode([PreparedMedia(meta, arrays, 1)])


async def test_the_native_encoders_end_is_the_workers(rooms):
    room = rooms.open("E", encoder="native")
    [item] = rooms.pictures(1)
    [media] = await room.encoder.encode([item])
    assert isinstance(media, Media)
    rooms.world.kill()
    with pytest.raises(WorkerLost):
        await room.encoder.encode([item])
    assert room.died.is_set()
    with pytest.raises(WorkerLost):
        await room.encoder.encode([item])
