import asyncio

import pytest

from triptych.errors import Draining
from triptych.media import decode_queue


async def steps():
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_at_once_as_there_are_places():
    queue = decode_queue.DecodeQueue(2, lambda: 0)
    waiting = [asyncio.create_task(queue.start("")) for _ in range(3)]
    await steps()
    assert [task.done() for task in waiting] == [True, True, False]
    assert (queue.running, queue.queued) == (2, 1)
    queue.end("")
    await waiting[2]
    assert (queue.running, queue.queued) == (2, 0)


async def test_tenants_take_turns():
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    order = []

    async def ask(tenant):
        await queue.start(tenant)
        order.append(tenant)
        queue.end(tenant)

    await queue.start("first")
    waiting = [asyncio.create_task(ask(tenant)) for tenant in "aaabbc"]
    await steps()
    queue.end("first")
    await asyncio.gather(*waiting)
    assert order == list("abcaba")


async def test_b44_a_later_tenant_waits_for_one_item_of_another():
    """With one place: not for what the other one had in the queue before."""
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("many")
    rest = [asyncio.create_task(queue.start("many")) for _ in range(3)]
    await steps()
    other = asyncio.create_task(queue.start("one"))
    await steps()
    queue.end("many")
    await steps()
    assert other.done()
    assert not any(task.done() for task in rest)
    queue.close()
    await asyncio.gather(*rest, return_exceptions=True)


async def test_b44_what_runs_counts():
    """The tenant with fewer running items goes first, though the other was served longer ago."""
    queue = decode_queue.DecodeQueue(4, lambda: 0)
    for tenant in ("many", "many", "many", "one"):
        await queue.start(tenant)
    rest = [asyncio.create_task(queue.start("many")) for _ in range(2)]
    await steps()
    others = [asyncio.create_task(queue.start("one")) for _ in range(2)]
    await steps()
    queue.end("many")  # two of it still run
    await steps()
    assert [task.done() for task in others] == [True, False]
    assert not any(task.done() for task in rest)
    queue.end("many")
    await steps()
    assert [task.done() for task in rest] == [True, False]
    queue.close()
    await asyncio.gather(*rest, *others, return_exceptions=True)


async def test_alone_a_tenant_has_every_place_and_leaves_nothing_behind():
    queue = decode_queue.DecodeQueue(3, lambda: 0)
    for _ in range(3):
        await queue.start("alone")
    assert queue.running == 3
    for _ in range(3):
        queue.end("alone")
    slots = queue._slots
    assert (slots._queues, slots._held, slots._served) == ({}, {}, {})


async def test_cancelled_as_its_turn_comes_the_place_is_free():
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("")
    second = asyncio.create_task(queue.start(""))
    third = asyncio.create_task(queue.start(""))
    await steps()
    queue.end("")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await third
    assert (queue.running, queue.queued) == (1, 0)


async def test_cancelled_in_line_others_move_up():
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("")
    second = asyncio.create_task(queue.start("a"))
    third = asyncio.create_task(queue.start("b"))
    await steps()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert queue.queued == 1
    queue.end("")
    await third


@pytest.mark.parametrize("others", [0, 1])
async def test_cancelled_in_line_as_another_ends_the_place_is_free(others):
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("")
    second = asyncio.create_task(queue.start("a"))
    rest = [asyncio.create_task(queue.start("a")) for _ in range(others)]
    await steps()
    second.cancel()
    queue.end("")  # before the one who is cancelled has run again
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.gather(*rest)
    assert (queue.running, queue.queued) == (others, 0)


async def test_cancelled_in_line_as_all_is_closed_others_hear_of_it():
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("")
    second, third = (asyncio.create_task(queue.start("")) for _ in range(2))
    await steps()
    second.cancel()
    queue.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(Draining):
        await third
    assert queue.queued == 0


async def test_cached_memory_does_not_count(monkeypatch):
    monkeypatch.setattr(decode_queue, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(decode_queue, "RELEASE_SECONDS", 1000)
    kept = 0
    queue = decode_queue.DecodeQueue(2, lambda: kept)
    queue.hold(150)
    second = asyncio.create_task(queue.start(""))
    await steps()
    assert not second.done()
    kept = 60
    queue.release(0)
    await steps()
    assert second.done()
    queue.close()


async def test_closing_ends_every_wait():
    queue = decode_queue.DecodeQueue(1, lambda: 0)
    await queue.start("")
    waiting = [asyncio.create_task(queue.start(tenant)) for tenant in "ab"]
    await steps()
    queue.close()
    for task in waiting:
        with pytest.raises(Draining):
            await task
    with pytest.raises(Draining):
        await queue.start("")
    assert queue.queued == 0
