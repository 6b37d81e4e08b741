"""The byte budget of loaded media: bounded by request and in all, waited for, and released."""

import asyncio

import pytest

from support.fetching import Fetching, InProcessClient
from support.origin import NamedGate, Origin, reply
from triptych.config import CacheSettings, Config, Limits
from triptych.errors import MediaTooLarge, Overloaded
from triptych.sources.budget import MediaBudget
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UploadStore


def config(seconds=0.05, room=100, **more):
    limits = Limits(request_media_bytes=60, loaded_media_bytes=room, fetch_seconds=seconds)
    return Config(limits=limits, cache=CacheSettings(fetched=0), **more)


def held(budget):
    return budget.counters["loaded_bytes"]


async def test_one_requests_bytes_are_bounded_and_released():
    budget = MediaBudget(config())
    with budget.reserve("a") as reservation:
        await reservation.add(40)
        with pytest.raises(MediaTooLarge):
            await reservation.add(21)
        await reservation.add(20)
        assert held(budget) == 60
        reservation.shrink_to(10)
        assert held(budget) == 10
    assert (held(budget), budget.counters["loaded_peak_bytes"]) == (0, 60)


async def test_a_request_over_the_budget_waits_but_not_for_ever():
    budget = MediaBudget(config())
    with budget.reserve("a") as first, budget.reserve("a") as second, budget.reserve("b") as third:
        await first.add(60)
        with pytest.raises(Overloaded):
            await second.add(50)
        assert second.size == 0
        waiting = asyncio.create_task(third.add(50))
        await asyncio.sleep(0)
        assert not waiting.done()
        first.shrink_to(0)
        await waiting
    assert held(budget) == 0


async def test_with_several_keys_none_can_have_the_whole_budget():
    budget = MediaBudget(config(api_key="one,two"))
    with budget.reserve("a") as first, budget.reserve("a") as second, budget.reserve("b") as third:
        await first.add(50)
        with pytest.raises(Overloaded):
            await second.add(1)
        await third.add(50)


async def test_every_source_uses_the_budget(tmp_path):
    (tmp_path / "a").write_bytes(bytes(30))
    settings, uploads = config(5, 200, allowed_media_path=str(tmp_path)), UploadStore(1 << 20, 60)
    sources = MediaLoader(settings, uploads, client=InProcessClient(NamedGate()))
    async with Origin({"/a": reply(200, bytes(30))}) as origin:
        for source in (origin.url("/a"), f"file://{tmp_path}/a", uploads.put("a", bytes(30)).id):
            with sources.reserve("a\n") as reservation:
                for count in (1, 2):
                    assert (
                        len(await sources.load(source, "image", "file", "a\n", reservation)) == 30
                    )
                    assert sources.counters["loaded_bytes"] == 30 * count
                with pytest.raises(MediaTooLarge):
                    await sources.load(source, "image", "file", "a\n", reservation)
            assert sources.counters["loaded_bytes"] == 0
        assert (
            len(await sources.load(b"x" * 90, "image", "file", "a\n", reservation)) == 90
        )  # its body's
    await sources.close()


async def test_a_body_uses_the_budget_while_it_comes_in():
    """Not before: to say how long it is costs a server nothing."""
    came = asyncio.Event()

    async def slow(writer, asked):
        writer.write(reply(200, bytes(50), Content_Length="60"))
        await came.wait()
        writer.write(bytes(10))

    async with Origin({"/a": slow, "/b": slow}) as origin, Fetching(config(seconds=1)) as f:
        first = asyncio.create_task(f.get(origin.url("/a")))
        while not held(f.budget):
            await asyncio.sleep(0.001)
        assert held(f.budget) <= 60
        came.set()
        assert len(await first) == 60
        assert held(f.budget) == 0
        with f.budget.reserve("other") as reservation:
            await reservation.add(60)
            with pytest.raises(Overloaded):
                await f.get(origin.url("/b"))
        assert held(f.budget) == 0


async def test_a_second_waiter_for_the_same_fetch_holds_it_too():
    go = asyncio.Event()

    async def slow(writer, asked):
        await go.wait()
        writer.write(reply(200, bytes(20)))

    async with Origin({"/a": slow}) as origin, Fetching(config(seconds=5)) as f:
        holds = [f.budget.reserve("tenant") for _ in range(3)]
        waiting = [
            f.fetcher.fetch(origin.url("/a"), "tenant\n", reservation) for reservation in holds
        ]
        tasks = [asyncio.create_task(one) for one in waiting]
        while not origin.asked:
            await asyncio.sleep(0.001)
        tasks[0].cancel()  # the one that asked first: the others fetch on
        await asyncio.sleep(0)
        go.set()
        assert [len(data) for data in await asyncio.gather(*tasks[1:])] == [20, 20]
        assert [reservation.size for reservation in holds] == [0, 20, 20]
        assert held(f.budget) == 40
        for reservation in holds:
            reservation.shrink_to(0)
        assert held(f.budget) == 0
