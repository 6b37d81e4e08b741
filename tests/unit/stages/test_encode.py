from __future__ import annotations

import asyncio
import gc
import hashlib
import weakref

import pytest

from triptych.engines.base import Media
from triptych.errors import InvalidMedia, TicketLost
from triptych.media.base import PreparedMedia
from triptych.messages import Job, MediaItem, MediaMeta, PreparedItem, Sampling, Work
from triptych.recipe import Recipes
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeStage
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient


def array(data: bytes) -> Array:
    return Array(memoryview(bytearray(data)), "uint8", (len(data),))


class Pool:
    """What a file shows is what stands before its colon. Refuses what is called bad."""

    queued = running = 0
    counters: dict[str, float] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def prepare(self, item: MediaItem, salt: str, digest: bytes) -> PreparedMedia:
        data = bytes(item.data)
        self.seen.append(data)
        await asyncio.sleep(0)
        if data == b"bad":
            raise InvalidMedia("It is bad.")
        shown = data.split(b":")[0]
        meta = MediaMeta(hashlib.sha256(shown).digest(), 1)
        return PreparedMedia(meta, (array(shown),), 1, item.form == "embeds")


class Encoder:
    recipes = Recipes("r")

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.cancelled = 0

    async def encode(self, items):
        [item] = items
        shown = bytes(item.arrays[0].buffer)
        self.seen.append(shown)
        try:
            await asyncio.sleep(60 if shown == b"slow" else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Media(item.meta, (array(b"rows of " + shown),))]


class Bench:
    def __init__(self, limit: int = 1 << 20) -> None:
        self.pool, self.encoder = Pool(), Encoder()
        self.transfers = TransferClient("inline", "E-0", 1)
        self.cache = EmbeddingCache(limit, limit, 100)
        self.stage = EncodeStage(self.encoder, self.pool, self.cache, self.transfers)

    async def rows(self, *data: bytes, salt: str = "", form: str = "file") -> list[bytes]:
        media, _ = await self.stage.encode(job(*data, salt=salt, form=form))
        return [bytes(item.arrays[0].buffer) for item in media]


def job(*data: bytes, items=None, salt: str = "", form: str = "file") -> Job:
    media = tuple(MediaItem("image", at, one, form) for at, one in enumerate(data))
    items = tuple(range(len(data))) if items is None else items
    return Job(Work("w", (1,), media, Sampling(seed=1), salt), items=items)


async def test_only_the_items_of_this_hop_in_their_order():
    bench = Bench()
    media, spent = await bench.stage.encode(job(b"bad", b"a", b"bad", b"b", items=(3, 1)))
    assert [bytes(item.arrays[0].buffer) for item in media] == [b"rows of b", b"rows of a"]
    assert spent.keys() == {"prepare", "encode"}
    assert await bench.stage.encode(job(b"bad", items=())) == ((), {})


async def test_a_bad_item_is_named_as_the_client_counts_and_takes_the_others_along():
    bench = Bench()
    with pytest.raises(InvalidMedia) as caught:
        await bench.stage.encode(job(b"a", b"slow", b"bad", items=(1, 2)))
    assert caught.value.param == "media[2]"
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.encoder.cancelled == 1


async def test_a_picture_asked_for_fifty_times_at_once_is_decoded_and_encoded_once():
    bench = Bench()
    got = await asyncio.gather(*(bench.rows(b"a") for _ in range(50)))
    assert got == [[b"rows of a"]] * 50
    assert bench.pool.seen == bench.encoder.seen == [b"a"]
    assert bench.cache.misses == 1


async def test_the_same_picture_in_another_file_is_decoded_but_not_encoded():
    bench = Bench()
    got = await asyncio.gather(*(bench.rows(b"a:%d" % n) for n in range(4)))
    assert got == [[b"rows of a"]] * 4
    assert len(bench.pool.seen) == 4
    assert bench.encoder.seen == [b"a"]


async def test_a_known_file_is_not_even_decoded():
    bench = Bench()
    for _ in range(3):
        assert await bench.rows(b"a", b"b") == [b"rows of a", b"rows of b"]
    assert sorted(bench.pool.seen) == sorted(bench.encoder.seen) == [b"a", b"b"]
    assert (bench.cache.hits, bench.cache.misses) == (4, 2)


async def test_with_a_full_cache_every_item_is_encoded_again():
    bench = Bench(limit=0)
    for _ in range(2):
        assert await bench.rows(b"a") == [b"rows of a"]
    assert bench.encoder.seen == [b"a", b"a"]


async def test_B41_tenants_share_nothing_not_even_running_work():
    bench = Bench()
    await asyncio.gather(*(bench.rows(b"a", salt=salt) for salt in ("alice", "bob")))
    await bench.rows(b"a", salt="carol")
    assert bench.encoder.seen == bench.pool.seen == [b"a"] * 3
    assert bench.cache.hits == 0


async def test_the_same_bytes_as_an_embedding_are_something_else():
    bench = Bench()
    assert await bench.rows(b"a", form="embeds") == [b"a"]
    assert bench.encoder.seen == []
    assert len(bench.pool.seen) == 1


async def test_a_failed_item_is_not_cached():
    bench = Bench()
    for _ in range(2):
        with pytest.raises(InvalidMedia):
            await bench.rows(b"bad")
    assert bench.pool.seen == [b"bad", b"bad"]
    assert len(bench.cache) == 0


async def test_items_that_were_decoded_elsewhere_are_fetched_and_cached():
    bench = Bench()
    frontend = TransferClient("inline", "frontend", 1)
    meta = MediaMeta(b"k", 1)
    for _ in range(2):
        async with frontend.offer([array(b"far")]) as ticket:
            item = MediaItem("image", 0, b"", prepared=PreparedItem(meta, ticket, 1))
            work = Work("w", (1,), (item,), Sampling(seed=1))
            [media], _ = await bench.stage.encode(Job(work, items=(0,)))
            assert bytes(media.arrays[0].buffer) == b"rows of far"
    assert bench.encoder.seen == [b"far"]
    assert bench.pool.seen == []


async def test_memory_that_is_revoked_while_encoding_leaves_nothing_in_the_cache():
    bench = Bench()

    class Stale:
        arrays = (array(b"stale"),)

        def check(self):
            raise TicketLost("gone")

        def close(self):
            pass

    async def fetch(_):
        return Stale()

    bench.transfers.fetch = fetch  # type: ignore[method-assign]
    item = MediaItem("image", 0, b"", prepared=PreparedItem(MediaMeta(b"k", 1), None, 1))
    with pytest.raises(TicketLost):
        await bench.stage.encode_alone(item, "")
    assert len(bench.cache) == 0


async def test_a_lost_ticket_fails_no_request_with_a_ticket_of_its_own():
    bench = Bench()
    frontend = TransferClient("inline", "frontend", 1)
    meta = MediaMeta(b"k", 1)
    lost = asyncio.Event()
    stock = bench.transfers.fetch

    async def fetch(ticket):
        if ticket is None:  # the first one's, which is lost while the second waits
            await lost.wait()
            raise TicketLost("gone")
        return await stock(ticket)

    bench.transfers.fetch = fetch  # type: ignore[method-assign]
    async with frontend.offer([array(b"far")]) as ticket:
        first, second = (
            asyncio.ensure_future(
                bench.stage.encode_alone(
                    MediaItem("image", 0, b"", prepared=PreparedItem(meta, given, 1)), ""
                )
            )
            for given in (None, ticket)
        )
        await asyncio.sleep(0)
        lost.set()
        with pytest.raises(TicketLost):
            await first
        assert bytes((await second).arrays[0].buffer) == b"rows of far"


async def test_a_refused_file_is_not_held_by_its_own_error():
    bench = Bench()

    class File(bytearray):
        """Bytes that can be watched."""

    async def refused():
        file = File(b"bad")
        with pytest.raises(InvalidMedia):
            await bench.stage.encode(job(file, b"a"))
        return weakref.ref(file)

    gc.collect()
    gc.disable()
    try:
        watched = await refused()
        for _ in range(5):
            await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()
