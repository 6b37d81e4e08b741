import asyncio

import pytest

from triptych.errors import Draining
from triptych.media import decode_queue


async def steps():
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_at_once_as_there_are_places():
    gate = decode_queue.DecodeQueue(2, lambda: 0)
    waiting = [asyncio.create_task(gate.take("")) for _ in range(3)]
    await steps()
    assert [task.done() for task in waiting] == [True, True, False]
    assert (gate.running, gate.queued) == (2, 1)
    gate.end("")
    await waiting[2]
    assert (gate.running, gate.queued) == (2, 0)


async def test_tenants_take_turns():
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    order = []

    async def ask(tenant):
        await gate.take(tenant)
        order.append(tenant)
        gate.end(tenant)

    await gate.take("first")
    waiting = [asyncio.create_task(ask(tenant)) for tenant in "aaabbc"]
    await steps()
    gate.end("first")
    await asyncio.gather(*waiting)
    assert order == list("abcaba")


async def test_b44_who_comes_later_waits_for_one_item_of_another_tenant():
    """With one place: not for what the other one had in the queue before."""
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("many")
    rest = [asyncio.create_task(gate.take("many")) for _ in range(3)]
    await steps()
    other = asyncio.create_task(gate.take("one"))
    await steps()
    gate.end("many")
    await steps()
    assert other.done()
    assert not any(task.done() for task in rest)
    gate.close()
    await asyncio.gather(*rest, return_exceptions=True)


async def test_b44_what_runs_counts():
    """The tenant with fewer running items goes first, though the other was served longer ago."""
    gate = decode_queue.DecodeQueue(4, lambda: 0)
    for tenant in ("many", "many", "many", "one"):
        await gate.take(tenant)
    rest = [asyncio.create_task(gate.take("many")) for _ in range(2)]
    await steps()
    others = [asyncio.create_task(gate.take("one")) for _ in range(2)]
    await steps()
    gate.end("many")  # two of it still run
    await steps()
    assert [task.done() for task in others] == [True, False]
    assert not any(task.done() for task in rest)
    gate.end("many")
    await steps()
    assert [task.done() for task in rest] == [True, False]
    gate.close()
    await asyncio.gather(*rest, *others, return_exceptions=True)


async def test_alone_a_tenant_has_every_place_and_leaves_nothing_behind():
    gate = decode_queue.DecodeQueue(3, lambda: 0)
    for _ in range(3):
        await gate.take("alone")
    assert gate.running == 3
    for _ in range(3):
        gate.end("alone")
    assert not gate._tenants


async def test_cancelled_as_its_turn_comes_the_place_is_free():
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("")
    second = asyncio.create_task(gate.take(""))
    third = asyncio.create_task(gate.take(""))
    await steps()
    gate.end("")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await third
    assert (gate.running, gate.queued) == (1, 0)


async def test_cancelled_in_line_others_move_up():
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("")
    second = asyncio.create_task(gate.take("a"))
    third = asyncio.create_task(gate.take("b"))
    await steps()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert gate.queued == 1
    gate.end("")
    await third


@pytest.mark.parametrize("others", [0, 1])
async def test_cancelled_in_line_as_another_ends_the_place_is_free(others):
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("")
    second = asyncio.create_task(gate.take("a"))
    rest = [asyncio.create_task(gate.take("a")) for _ in range(others)]
    await steps()
    second.cancel()
    gate.end("")  # before the one who is cancelled has run again
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.gather(*rest)
    assert (gate.running, gate.queued) == (others, 0)


async def test_cancelled_in_line_as_all_is_closed_others_hear_of_it():
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("")
    second, third = (asyncio.create_task(gate.take("")) for _ in range(2))
    await steps()
    second.cancel()
    gate.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(Draining):
        await third
    assert gate.queued == 0


async def test_what_the_cache_keeps_does_not_count(monkeypatch):
    monkeypatch.setattr(decode_queue, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(decode_queue, "STALL_SECONDS", 1000)
    kept = 0
    gate = decode_queue.DecodeQueue(2, lambda: kept)
    gate.hold(150)
    second = asyncio.create_task(gate.take(""))
    await steps()
    assert not second.done()
    kept = 60
    gate.give_back(0)
    await steps()
    assert second.done()
    gate.close()


async def test_closed_nobody_waits():
    gate = decode_queue.DecodeQueue(1, lambda: 0)
    await gate.take("")
    waiting = [asyncio.create_task(gate.take(tenant)) for tenant in "ab"]
    await steps()
    gate.close()
    for task in waiting:
        with pytest.raises(Draining):
            await task
    with pytest.raises(Draining):
        await gate.take("")
    assert gate.queued == 0
