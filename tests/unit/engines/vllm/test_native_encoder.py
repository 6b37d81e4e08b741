"""What is made of the files that vLLM's tower writes, with someone else at the tower."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from support.torch_engine import empty, frozen
from triptych.engines.base import Media
from triptych.engines.vllm import native_encoder
from triptych.errors import EngineFailed, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models.tensors import tensor_view

MODEL = SimpleNamespace(media_ids={"image": 7, "video": 8})
KEY = b"k" * 32


class Stock:
    """Gives items on as they are."""

    recipes, queued, running = None, 0, 0

    async def encode(self, items):
        return [Media(item.meta, item.arrays, encoded=False) for item in items]


class Tower:
    """Writes as many rows as an item's first number says, each with that number."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, generation, emit):
        self.asked.append(generation)
        [media] = generation.media
        name = media.meta.key.hex()
        await self.go.wait()
        self.write(name, int(tensor_view(media.arrays[0])[0]))
        if media.meta.audio_tokens:
            self.write(f"{name}:sound", media.meta.audio_tokens)

    def write(self, name, number):
        save_file(
            {native_encoder.FILE_TENSOR: torch.full((number, 2), float(number))},
            self.folder / native_encoder.embedding_file_name(name),
        )


def item(rows, told=None, sound=0, kind="image"):
    meta = MediaMeta(KEY, told or rows + sound, kind=kind, audio_tokens=sound)
    return PreparedMedia(meta, (frozen(torch.tensor([rows], dtype=torch.uint8)),), cost=1)


@pytest.fixture
def tower(tmp_path):
    return Tower(tmp_path)


@pytest.fixture
def encoder(tower):
    return native_encoder.NativeEncoder(tower, Stock(), MODEL, tower.folder, empty)


async def test_rows_come_in_memory_and_leave_no_file(encoder, tower):
    made = await encoder.encode([item(3), item(5)])
    assert [media.encoded for media in made] == [True, True]
    assert [media.meta.key for media in made] == [KEY, KEY]
    assert [tensor_view(media.arrays[0]).tolist() for media in made] == [
        [[3.0] * 2] * 3,
        [[5.0] * 2] * 5,
    ]
    assert os.listdir(tower.folder) == []
    assert encoder.counters == {"encoded_items": 2}


async def test_vllm_is_asked_under_a_new_name_each_time(encoder, tower):
    """It writes nothing for what it still knows."""
    await encoder.encode([item(3), item(3)])
    await encoder.encode([item(3)])
    asked = [generation.media[0].meta.key for generation in tower.asked]
    assert len({*asked, KEY}) == 4
    assert {len(key) for key in asked} == {32}
    assert {generation.work.prompt for generation in tower.asked} == {(7,)}


async def test_a_videos_sound_comes_behind_its_frames(encoder, tower):
    [media] = await encoder.encode([item(2, sound=3, kind="video")])
    assert tensor_view(media.arrays[0])[:, 0].tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]
    assert os.listdir(tower.folder) == []


async def test_an_embedding_that_was_not_written_is_an_error(encoder, tower, monkeypatch):
    monkeypatch.setattr(tower, "write", lambda name, number: None)
    with pytest.raises(EngineFailed, match="no embedding"):
        await encoder.encode([item(3)])


async def test_an_embedding_of_another_length_is_an_error(encoder, tower):
    with pytest.raises(EngineFailed, match="3 rows"):
        await encoder.encode([item(3, told=4)])
    assert os.listdir(tower.folder) == []


async def test_one_that_fails_takes_the_others_along(encoder, tower, monkeypatch):
    generate = tower.generate

    async def fail(generation, emit):
        if len(tower.asked) == 1:
            raise WorkerLost("gone")
        await generate(generation, emit)

    monkeypatch.setattr(tower, "generate", fail)
    tower.go.clear()
    with pytest.raises(WorkerLost):
        await encoder.encode([item(3), item(4)])
    assert len(asyncio.all_tasks()) == 1


async def test_cancelled_it_leaves_nothing_even_of_what_is_written_later(
    encoder, tower, monkeypatch
):
    monkeypatch.setattr(native_encoder, "SWEEP_DELAY", 0.01)
    tower.go.clear()
    kept = asyncio.ensure_future(encoder.encode([item(5)]))
    call = asyncio.ensure_future(encoder.encode([item(3)]))
    await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    late = tower.asked[1].media[0].meta.key.hex()
    tower.write(late, 3)
    (tower.folder / f"{native_encoder.embedding_file_name(late)}.part").touch()
    while os.listdir(tower.folder):
        await asyncio.sleep(0.001)
    tower.go.set()
    [media] = await kept
    assert media.arrays[0].shape == (5, 2)
