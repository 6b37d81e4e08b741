"""Media that are decoded beside the frontend travel by ticket, and nothing of them stays behind."""

import asyncio

import pytest

from triptych.config import Config
from triptych.errors import InvalidMedia
from triptych.media.base import Prepared
from triptych.messages import MediaItem, MediaMeta
from triptych.processor import decoding
from triptych.processor.decoding import Decoding
from triptych.recipe import Recipes
from triptych.transfer.base import Array
from triptych.transfer.exchange import Exchange


class Pool:
    made = 0
    counters: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, recipes, config):
        Pool.made += 1
        self.recipes = recipes
        self.closed = False

    async def prepare(self, item, salt):
        data = bytes(item.data)
        await asyncio.sleep(60 if data == b"slow" else 0)
        if data == b"bad":
            raise InvalidMedia("It is bad.")
        array = Array(memoryview(bytearray(data)), "uint8", (len(data),))
        return Prepared(MediaMeta(data, 1), (array,), 7, item.form == "embeds")

    async def close(self):
        self.closed = True


@pytest.fixture
async def made(monkeypatch):
    monkeypatch.setattr(decoding, "DecodePool", Pool)
    Pool.made = 0
    exchange = Exchange("shm", "frontend", 1)
    recipes = Recipes("a revision")

    async def ask():
        return recipes

    one = Decoding(Config(), ask, exchange)
    yield one
    await one.close()


def items(*data, form="file"):
    return tuple(MediaItem("image", at, each, form) for at, each in enumerate(data))


async def test_files_become_tickets_that_a_reader_can_follow_while_the_scope_is_open(made):
    reader = Exchange("shm", "E-0", 1)
    async with made.prepared(items(b"one", b"two", form="embeds"), "") as got:
        assert made.tickets == 2
        for item, data in zip(got, (b"one", b"two"), strict=True):
            assert (item.data, item.prepared.cost) == (b"", 7)
            assert item.prepared.encoded
            assert item.prepared.meta.key == data
            async with reader.borrow(item.prepared.ticket) as fetched:
                assert bytes(fetched.arrays[0].buffer) == data
        assert [item.at for item in got] == [0, 1]
    assert made.tickets == 0
    await reader.close()
    assert Pool.made == 1


async def test_a_bad_item_is_named_and_takes_the_others_along(made):
    with pytest.raises(InvalidMedia) as caught:
        async with made.prepared(items(b"one", b"slow", b"bad"), ""):
            pytest.fail("nothing is ready")
    assert caught.value.param == "media[2]"
    assert made.tickets == 0


async def test_who_is_cancelled_leaves_no_ticket(made):
    async def use():
        async with made.prepared(items(b"one", b"slow"), ""):
            pytest.fail("nothing is ready")

    task = asyncio.ensure_future(use())
    await asyncio.sleep(0.05)
    assert made.tickets == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.tickets == 0


async def test_what_an_encoder_takes_as_it_is_stays_as_it_is():
    async def ask():
        return Recipes("")

    one = Decoding(Config(), ask, Exchange("shm", "frontend", 1))
    async with one.prepared(items(b"one"), "") as got:
        assert got == items(b"one")
    await one.close()
