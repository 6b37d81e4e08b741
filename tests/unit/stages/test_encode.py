from __future__ import annotations

import asyncio

import pytest

from triptych.engines.base import Media
from triptych.errors import InvalidMedia
from triptych.messages import Job, MediaItem, MediaMeta, Sampling, Work
from triptych.stages.encode import encode


class Encoder:
    """Refuses what is called bad, and takes its time for the others."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def encode(self, items):
        [item] = items
        if item.data == b"bad":
            raise InvalidMedia("It is bad.")
        try:
            await asyncio.sleep(0 if item.data == b"quick" else 60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Media(MediaMeta(item.data, 1), ())]


def job(*data: bytes, items: tuple[int, ...]) -> Job:
    media = tuple(MediaItem("image", at, one) for at, one in enumerate(data))
    return Job(Work("w", (1,), media, Sampling(seed=1)), items=items)


async def test_only_the_items_of_this_hop_in_their_order():
    media, spent = await encode(job(b"bad", b"quick", b"bad", b"quick", items=(3, 1)), Encoder())
    assert [item.meta.key for item in media] == [b"quick", b"quick"]
    assert spent.keys() == {"encode"}
    assert await encode(job(b"bad", items=()), Encoder()) == ((), {})


async def test_a_bad_item_is_named_as_the_client_counts_and_takes_the_others_along():
    encoder = Encoder()
    with pytest.raises(InvalidMedia) as caught:
        await encode(job(b"quick", b"slow", b"bad", items=(1, 2)), encoder)
    assert caught.value.param == "media[2]"
    await asyncio.sleep(0)
    assert encoder.cancelled == 1
