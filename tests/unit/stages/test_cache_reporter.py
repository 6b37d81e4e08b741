"""What an engine reports of its cache, as frontends receive it.

Each guard was switched off once, and the test of it failed: the names of removed blocks not dropped
(``_remove`` without ``_release``), copies not counted, an unknown parent read as a root, changes
sent to a subscriber that is not ready (``watch`` without ``ready``), watchers left by ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from triptych import blocks
from triptych.messages import CacheChange, KvCleared, KvRemoved, KvStored, WatchCache
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.server import CallServer
from triptych.stages import cache_reporter
from triptych.stages.cache_reporter import CacheReporter

SIZE = 4
KEY = b"k" * 32


class Listener:
    """Takes as many changes as it is allowed to."""

    def __init__(self, credit: int = 1000) -> None:
        self.heard: list[CacheChange] = []
        self.credit = credit
        self._granted = asyncio.Event()

    def send(self, answer: CacheChange) -> None:
        assert self.credit > 0, "told more than it wanted to hear"
        self.credit -= 1
        self.heard.append(answer)

    async def ready(self) -> None:
        while not self.credit:
            self._granted.clear()
            await self._granted.wait()

    def grant(self, answers: int) -> None:
        self.credit += answers
        self._granted.set()

    @property
    def held(self) -> set[int]:
        """What a frontend makes of it; it asks again if a number is missing."""
        held: set[int] = set()
        number = None
        for change in self.heard:
            assert change.snapshot or change.sequence == number + 1
            number = change.sequence
            before = set() if change.snapshot else held
            held = (before | {*change.stored}) - {*change.removed}
        return held


def stored(
    name: int, count: int = 1, parent: int | None = None, first: int = 0, **more
) -> KvStored:
    """Blocks named ``name``, ``name + 1`` .. of the tokens ``first``, ``first + 1`` .."""
    tokens = tuple(range(first, first + count * SIZE))
    return KvStored(tuple(range(name, name + count)), parent, tokens, SIZE, **more)


def names(count: int, first: int = 0, salt: str = "", media=()) -> list[int]:
    tokens = range(first, first + count * SIZE)
    return list(blocks.hash_blocks(blocks.hash_salt(salt), tokens, SIZE, media))


@pytest.fixture
async def reporter():
    return CacheReporter(SIZE, 100)


@contextlib.asynccontextmanager
async def watching(reporter: CacheReporter, credit: int = 1000):
    listener = Listener(credit)
    task = asyncio.create_task(reporter.watch(listener))
    await turns()
    yield listener
    task.cancel()
    await asyncio.wait([task])


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_snapshot_comes_first_and_then_changes(reporter):
    reporter.receive([stored(1, 2)])
    await turns()
    async with watching(reporter) as listener:
        assert listener.heard == [CacheChange(2, tuple(names(2)), snapshot=True)]
        reporter.receive([stored(3, 1, parent=2, first=8)])
        await turns()
        reporter.receive([KvRemoved((3,)), KvRemoved((2,))])
        await turns()
        whole = names(3)
    assert listener.heard[1:] == [
        CacheChange(3, (whole[2],)),
        CacheChange(4, (), (whole[2], whole[1])),
    ]


async def test_the_first_change_of_an_empty_cache_is_an_empty_snapshot(reporter):
    async with watching(reporter) as listener:
        assert listener.heard == [CacheChange(1, snapshot=True)]


async def test_names_have_salt_and_media_in_them(reporter):
    media = ((), ((KEY, 5),), ((KEY, 5),))
    async with watching(reporter) as listener:
        reporter.receive([stored(1, 2, salt="tenant", media=media[:2])])
        reporter.receive([stored(3, 1, parent=2, first=8, media=(((KEY, -3),),))])
        await turns()
    assert listener.held == set(names(3, salt="tenant", media=media))


async def test_events_of_one_turn_are_one_change(reporter):
    async with watching(reporter) as listener:
        reporter.receive([stored(1)])
        reporter.receive([stored(2, 1, first=50), KvRemoved((1,))])
        await turns()
        assert listener.heard[1:] == [CacheChange(2, tuple(names(1, 50)))]
        reporter.receive([KvRemoved((2,)), stored(2, 1, first=50)])  # as before
        await turns()
    assert len(listener.heard) == 2


async def test_a_block_that_is_there_twice_is_held_until_both_are_gone(reporter):
    async with watching(reporter) as listener:
        reporter.receive([stored(1), stored(1)])
        await turns()
        reporter.receive([KvRemoved((1,))])
        await turns()
        assert listener.held == set(names(1))
        reporter.receive([KvRemoved((1,))])
        await turns()
        assert listener.held == set()


async def test_two_blocks_of_the_engines_may_have_one_name(reporter):
    """It may distinguish what makes no difference for routing, such as positions."""
    async with watching(reporter) as listener:
        reporter.receive([stored(1), stored(2)])
        await turns()
        reporter.receive([KvRemoved((1,))])
        await turns()
        assert listener.held == set(names(1))
        reporter.receive([KvRemoved((2,))])
        await turns()
        assert listener.held == set()


async def test_a_block_with_an_unknown_parent_is_not_reported(reporter):
    async with watching(reporter) as listener:
        reporter.receive([stored(1, 2), KvCleared(), stored(3, 1, parent=2, first=8)])
        reporter.receive([stored(4, 1, parent=3, first=12), stored(9, 1, first=70)])
        await turns()
        assert listener.held == set(names(1, 70))
        reporter.receive([KvRemoved((3, 4))])  # nor is that it went
        await turns()
    assert listener.held == set(names(1, 70))


async def test_after_a_clear_a_new_snapshot_follows(reporter):
    reporter.receive([stored(1, 2)])
    await turns()
    async with watching(reporter) as listener:
        reporter.receive([KvCleared(), stored(1)])
        await turns()
        assert listener.heard[1:] == [CacheChange(3, tuple(names(1)), snapshot=True)]
        reporter.receive([KvCleared()])
        await turns()
    assert listener.heard[2:] == [CacheChange(4, snapshot=True)]


async def test_blocks_of_another_size_are_not_reported(reporter):
    async with watching(reporter) as listener:
        reporter.receive([KvStored((1,), None, (1, 2), 2)])
        await turns()
    assert listener.held == set()


async def test_a_subscriber_slightly_behind_gets_every_change(reporter):
    async with watching(reporter, credit=1) as listener:
        for number in range(10):
            reporter.receive([stored(number, first=number * 10)])
            await turns()
        assert len(listener.heard) == 1
        listener.grant(100)
        await turns(20)
    assert [change.sequence for change in listener.heard] == list(range(1, 12))
    assert not any(change.snapshot for change in listener.heard[1:])


async def test_a_slow_subscriber_gets_a_new_snapshot_and_no_backlog(reporter):
    async with watching(reporter, credit=1) as slow, watching(reporter) as quick:
        for number in range(80):
            reporter.receive([stored(number, first=number * 10)])
            await turns()
        assert len(slow.heard) == 1
        slow.grant(100)
        await turns()
        assert [change.snapshot for change in slow.heard] == [True, True]
        reporter.receive([KvRemoved((0,))])
        await turns()
    assert len(slow.heard) == 3
    assert slow.held == quick.held == {name for n in range(1, 80) for name in names(1, n * 10)}
    assert len(quick.heard) == 82
    assert reporter.counters["kv_changes_sent"] == 85


async def test_much_at_once_is_named_in_many_turns(monkeypatch):
    """So that the event loop goes on meanwhile."""
    monkeypatch.setattr(cache_reporter, "BLOCKS_PER_TURN", 10)
    reporter = CacheReporter(SIZE, 100)
    async with watching(reporter) as listener:
        reporter.receive([stored(n * 10, 5, first=n * 100) for n in range(8)])
        await turns(20)
    assert [len(change.stored) for change in listener.heard] == [0, 10, 10, 10, 10]


async def test_more_blocks_than_the_engine_has_are_not_reported(reporter):
    """What was missed are removals: to hold on to all would be a leak, and wrong."""
    async with watching(reporter) as listener:
        for number in range(101):
            reporter.receive([stored(number, first=number * 10)])
        await turns()
        assert listener.held == set()
        reporter.receive([stored(500)])
        await turns()
    assert listener.held == set(names(1))


async def test_watchers_are_counted_and_let_go(reporter):
    async with watching(reporter), watching(reporter):
        assert reporter.counters["kv_watchers"] == 2
    assert reporter.counters["kv_watchers"] == 0
    staying = asyncio.create_task(reporter.watch(Listener()))
    await turns()
    reporter.close()
    async with asyncio.timeout(10):
        await staying
        await reporter.watch(Listener())


async def test_over_the_request_plane(reporter):
    """A caller that grants nothing gets its window and no more; one that closes is gone."""

    async def handler(ask, reply):
        assert ask == WatchCache()
        await reporter.watch(reply)

    server = CallServer(handler, "secret", "PD-0", 1)
    connection = await WorkerConnection.open(
        await server.start("127.0.0.1", 0), "secret", "PD-0", 1
    )
    listener, paused = Listener(), Listener()
    call = connection.call(WatchCache(), listener.send)
    slow = connection.call(WatchCache(), paused.send)
    slow.pause()

    async def until(condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)

    await until(lambda: listener.heard and paused.heard)
    for number in range(90):
        reporter.receive([stored(number, first=number * 10)])
        await until(lambda n=number: len(listener.heard) == n + 2)
    assert len(paused.heard) == 64
    for number in range(60):
        reporter.receive([KvRemoved((number,))])
        await until(lambda n=number: len(listener.heard) == n + 92)
    slow.resume()
    await until(lambda: paused.held == listener.held)
    assert [change.snapshot for change in paused.heard] == [True, *[False] * 63, True]
    call.close()
    slow.close()
    await until(lambda: not reporter.counters["kv_watchers"])
    await connection.close()
    await server.close()
