"""Media that the frontend decodes travel by ticket, and nothing of them stays behind."""

import asyncio
import gc
import sys
import weakref
from contextlib import AsyncExitStack

import pytest

from triptych.api import process
from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidMedia, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.messages import GetRecipes, MediaItem, MediaMeta
from triptych.pipeline import decoding
from triptych.pipeline.decoding import FrontendDecoding
from triptych.recipe import Recipes
from triptych.topology import Role
from triptych.transfer import client
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient
from triptych.transfer.file import FileTransport
from triptych.transfer.registry import TransferEndpoint, common_transport


class Pool:
    made = 0
    counters: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, recipes, config):
        Pool.made += 1

    async def prepare(self, item, salt):
        data = bytes(item.data)
        await asyncio.sleep(60 if data == b"slow" else 0)
        if data == b"bad":
            raise InvalidMedia("It is bad.")
        array = Array(memoryview(bytearray(data)), "uint8", (len(data),))
        return PreparedMedia(MediaMeta(data, 1), (array,), 7, item.form == "embeds")

    async def close(self):
        pass


class Encoders:
    """A membership with one encoder, which says how it wants its media."""

    def __init__(self, recipes):
        self.recipes = recipes
        self.asked = self.closed = 0

    def choose(self, role, item=None, avoided=()):
        assert role == "E"
        return self

    def common_transport(self, *publishers):
        return "shm"

    def call(self, ask, on_answer):
        assert isinstance(ask, GetRecipes)
        self.asked += 1
        if self.recipes is not None:
            on_answer(self.recipes)
        return self

    async def done(self):
        if self.recipes is None:
            await asyncio.sleep(60)

    def close(self):
        self.closed += 1


@pytest.fixture
async def encoders():
    return Encoders(Recipes("a revision"))


@pytest.fixture
async def made(monkeypatch, encoders):
    monkeypatch.setattr(decoding, "DecodePool", Pool)
    monkeypatch.setattr(decoding, "RECIPES_SECONDS", 0.05)
    Pool.made = 0
    one = FrontendDecoding(Config(), encoders, Role("E"), TransferClient("shm", "frontend", 1))
    yield one
    await one.close()


def items(*data, form="file"):
    return tuple(MediaItem("image", at, each, form) for at, each in enumerate(data))


async def test_files_become_tickets_that_a_reader_can_follow_until_they_are_closed(made, encoders):
    reader = TransferClient("shm", "E-0", 1)
    for _ in range(2):
        offered = await made.offer(items(b"one", b"two", form="embeds"), "")
        assert made.tickets == 2
        for item, data in zip(offered.items, (b"one", b"two"), strict=True):
            assert (item.data, item.prepared.cost) == (b"", 7)
            assert item.prepared.encoded
            assert item.prepared.meta.key == data
            async with reader.borrow(item.prepared.ticket) as fetched:
                assert bytes(fetched.arrays[0].buffer) == data
        assert [item.at for item in offered.items] == [0, 1]
        offered.close()
        offered.close()
        assert made.tickets == 0
    await reader.close()
    assert (Pool.made, encoders.asked, encoders.closed) == (1, 1, 1)


async def test_a_bad_item_is_named_and_takes_the_others_along(made):
    with pytest.raises(InvalidMedia) as caught:
        await made.offer(items(b"one", b"slow", b"bad"), "")
    assert caught.value.param == "media[2]"
    assert made.tickets == 0


async def test_a_refused_file_is_not_held_by_its_own_error(made):
    class File(bytearray):
        """Bytes that can be watched."""

    async def refused():
        file = File(b"bad")
        with pytest.raises(InvalidMedia):
            await made.offer(items(file, b"one"), "")
        return weakref.ref(file)

    gc.collect()
    gc.disable()
    try:
        watched = await refused()
        await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()


async def test_a_cancelled_call_leaves_no_ticket(made):
    task = asyncio.ensure_future(made.offer(items(b"one", b"slow"), ""))
    await asyncio.sleep(0.05)
    assert made.tickets == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.tickets == 0


async def test_what_an_encoder_takes_as_it_is_stays_as_it_is(made, encoders):
    encoders.recipes = Recipes("")
    assert await made.offer(items(b"one"), "") is None
    assert Pool.made == 0


async def test_an_encoder_that_says_nothing_is_lost_and_another_may_be_asked(made, encoders):
    recipes, encoders.recipes = encoders.recipes, None
    with pytest.raises(WorkerLost):
        await made.offer(items(b"one"), "")
    assert encoders.closed == 1
    encoders.recipes = recipes
    offered = await made.offer(items(b"one"), "")
    assert made.tickets == 1
    offered.close()


@pytest.fixture
def _broken_nixl(monkeypatch):
    """It is installed, and does not load."""
    monkeypatch.setattr(client, "is_installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)


@pytest.mark.usefixtures("_broken_nixl")
async def test_nixl_that_does_not_load_is_left_out(monkeypatch, encoders, caplog):
    """The encoder is on another host and could read by it. Off: ``_transport`` checks nothing, and
    requests with media fail."""
    monkeypatch.setattr(decoding, "DecodePool", Pool)
    elsewhere = TransferEndpoint("elsewhere", "", ("nixl", "inline"))
    encoders.common_transport = lambda own: common_transport([own, elsewhere])
    one = FrontendDecoding(Config(), encoders, Role("E"), TransferClient("auto", "frontend", 1))
    for offered in await asyncio.gather(*(one.offer(items(b"one"), "") for _ in range(3))):
        assert [item.prepared.ticket.transport for item in offered.items] == ["inline"]
        offered.close()
    assert caplog.text.count("transport 'nixl' does not work here") == 1
    await one.close()


@pytest.mark.usefixtures("_broken_nixl")
@pytest.mark.parametrize(("shared", "transport"), [(True, "file"), (False, "inline")])
async def test_a_frontend_opens_its_folder_to_compare_it(
    monkeypatch, encoders, tmp_path, shared, transport
):
    """Off: ``_transport`` opens nothing, and does not know its folder's id."""
    monkeypatch.setattr(decoding, "DecodePool", Pool)
    transfers = TransferClient("auto", "frontend", 1, transfer_folder=str(tmp_path / "shared"))
    encoder = FileTransport(tmp_path / ("shared" if shared else "local"), "E-0", 1)
    await encoder.open()
    elsewhere = TransferEndpoint("elsewhere", "", ("file", "inline"), encoder.folder_id)
    encoders.common_transport = lambda own: common_transport([own, elsewhere])
    one = FrontendDecoding(Config(), encoders, Role("E"), transfers)
    offered = await one.offer(items(b"one"), "")
    assert [item.prepared.ticket.transport for item in offered.items] == [transport]
    offered.close()
    await one.close()
    await encoder.close()


@pytest.mark.usefixtures("_broken_nixl")
async def test_a_frontend_that_must_use_nixl_ends_where_that_does_not_load(encoders):
    """Off: ``process._decoding`` checks no transport."""
    config = Config(pattern="E/PD", transport="nixl", decode_at="frontend")
    async with AsyncExitStack() as scope:
        with pytest.raises(InvalidConfig, match="nixl_cu13"):
            await process._decoding(config, encoders, scope)
