from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from triptych.errors import ServiceError, TicketLost
from triptych.messages import Ticket
from triptych.transfer import segment as segment_module
from triptych.transfer import shm as shm_module
from triptych.transfer.base import Array
from triptych.transfer.segment import SLOTS, NotASegment, Segment, SegmentMaps
from triptych.transfer.shm import ShmAddress, ShmTransport

MIB = 1 << 20
LIBC = segment_module._libc


@pytest.fixture
async def shm() -> AsyncIterator[ShmTransport]:
    transfer = ShmTransport("worker-1", 1, limit=16 * MIB)
    yield transfer
    await transfer.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps_of_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:triptych")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


def address(ticket: Ticket) -> ShmAddress:
    return msgspec.msgpack.decode(ticket.address, type=ShmAddress)


def moved(ticket: Ticket, **changes: int) -> Ticket:
    """The ticket with a forged first piece."""
    old = address(ticket)
    piece = msgspec.structs.replace(old.pieces[0], **changes)
    forged = ShmAddress(old.pid, (piece, *old.pieces[1:]))
    return msgspec.structs.replace(ticket, address=msgspec.msgpack.encode(forged))


async def test_a_second_publish_of_the_same_size_makes_no_segment(shm: ShmTransport) -> None:
    nonces = set()
    for _ in range(3):
        ticket = await shm.publish([shm.empty("uint8", (MIB,))])
        nonces.add(address(ticket).pieces[0].nonce)
        shm.release(ticket)
    assert len(nonces) == 1
    assert (shm.segments, shm.pool.idle) == (0, 1)


async def test_after_a_quiet_time_no_segment_and_no_descriptor_is_left(
    shm: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_module, "IDLE_SECONDS", 0.1)
    base, mapped = descriptors(), maps_of_segments()
    ticket = await shm.publish([shm.empty("uint8", (MIB,))])
    never_published = shm.empty("uint8", (MIB,))
    assert descriptors() == base + 2
    shm.release(ticket)
    del never_published
    await until(lambda: descriptors() == base)
    await until(lambda: maps_of_segments() == mapped)
    ticket = await shm.publish([shm.empty("uint8", (MIB,))])  # and it goes on from there
    assert shm.segments == 1


async def test_lent_arrays_are_published_where_they_are(
    shm: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "write", lambda *_: pytest.fail("was copied"))
    arrays = [shm.empty("float32", (n,)) for n in (10, 20_000, 30)]
    ticket = await shm.publish(arrays)
    assert len(address(ticket).pieces) == shm.segments == 3
    both = [Array(arrays[1].buffer[:4], "int32", (1,)), Array(arrays[1].buffer[64:], "uint8", ())]
    both[1] = Array(both[1].buffer, "uint8", (both[1].buffer.nbytes,))
    assert len(address(await shm.publish(both)).pieces) == 1


async def test_memory_stays_while_the_owner_looks_at_it(shm: ShmTransport) -> None:
    """An embedding that is cached is offered again and again without being copied."""
    array = shm.empty("uint8", (1000,))
    array.buffer[:] = b"e" * 1000
    for _ in range(3):
        ticket = await shm.publish([array])
        shm.release(ticket)
        other = shm.empty("uint8", (1000,))
        other.buffer[:] = b"x" * 1000
    assert bytes(array.buffer) == b"e" * 1000
    assert shm.segments == 2


async def test_more_tickets_than_a_table_holds(shm: ShmTransport) -> None:
    array = shm.empty("uint8", (10,))
    array.buffer[:] = b"0123456789"
    tickets = [await shm.publish([array]) for _ in range(SLOTS + 2)]
    assert shm.segments == 3  # the last two were copied
    for ticket in (tickets[0], tickets[-1]):
        assert bytes((await shm.fetch(ticket)).arrays[0].buffer) == b"0123456789"
    for ticket in tickets:
        shm.release(ticket)
    assert shm.segments == 1


async def test_f18_no_memory_is_a_503_for_one_request() -> None:
    shm = ShmTransport("worker-1", 1, limit=3 * MIB)
    first = await shm.publish([shm.empty("uint8", (2 * MIB,))])
    array = shm.empty("uint8", (2 * MIB,))  # plain memory: engines need not know
    array.buffer[:3] = b"abc"
    with pytest.raises(ServiceError) as caught:
        await shm.publish([array])
    assert (caught.value.status, caught.value.code) == (503, "service_unavailable")
    assert shm.tickets == shm.segments == 1
    shm.release(first)
    ticket = await shm.publish([array])
    assert bytes((await shm.fetch(ticket)).arrays[0].buffer[:3]) == b"abc"
    await shm.close()


async def test_a_publish_that_fails_leaves_no_trace(shm: ShmTransport) -> None:
    array = shm.empty("uint8", (10,))
    huge = Array(memoryview(bytearray(17 * MIB)), "uint8", (17 * MIB,))
    for _ in range(SLOTS + 1):
        with pytest.raises(ServiceError):
            await shm.publish([array, huge])
    await shm.publish([array])  # the table is not full, so it is not copied
    assert shm.segments == shm.tickets == 1


async def test_forged_places_are_lost(shm: ShmTransport) -> None:
    ticket = await shm.publish([shm.empty("uint8", (100,))])
    slot = address(ticket).pieces[0].slot
    for forged in (
        moved(ticket, slot=SLOTS),
        moved(ticket, slot=-1),
        moved(ticket, slot=slot - 1),
        moved(ticket, size=1 << 40),
        moved(ticket, fd=0),
        moved(ticket, fd=-5),
        # A place that no ticket has holds 0.
        msgspec.structs.replace(moved(ticket, slot=slot - 1), serial=0),
        msgspec.structs.replace(ticket, serial=ticket.serial + 1),
        msgspec.structs.replace(ticket, epoch=2),
        msgspec.structs.replace(ticket, expires=float("nan")),
        msgspec.structs.replace(
            ticket, address=msgspec.msgpack.encode(ShmAddress(os.getpid(), ()))
        ),
        msgspec.structs.replace(
            ticket, address=msgspec.msgpack.encode(ShmAddress(os.getpid(), ())), parts=(), size=0
        ),
    ):
        with pytest.raises(TicketLost):
            await shm.fetch(forged)


async def test_expiry_frees_in_any_order(shm: ShmTransport) -> None:
    long = await shm.publish([shm.empty("uint8", (10,))], lifetime=60)
    short = await shm.publish([shm.empty("uint8", (10,))], lifetime=0.02)
    await until(lambda: shm.tickets == 1)
    await shm.fetch(long)
    with pytest.raises(TicketLost):
        await shm.fetch(short)
    assert shm.segments == 1


async def test_close_gives_everything_back() -> None:
    base = len(os.listdir("/proc/self/fd"))
    mapped = maps_of_segments()
    shm = ShmTransport("worker-1", 1)
    for size in (10, 100_000, 2 * MIB):
        ticket = await shm.publish([shm.empty("uint8", (size,))])
        (await shm.fetch(ticket)).close()
    await shm.close()
    assert shm.tickets == shm.segments == shm.pool.idle == 0
    assert len(os.listdir("/proc/self/fd")) == base
    # What ran in a thread is let go by the loop's next turns.
    await until(lambda: maps_of_segments() == mapped)


async def test_maps_are_cached_expired_and_limited() -> None:
    maps, segments = SegmentMaps(limit=2), [Segment(65536, epoch=1) for _ in range(3)]

    async def find(segment: Segment) -> object:
        return await maps.find(os.getpid(), segment.fd, segment.nonce, 1, segment.capacity)

    first = await find(segments[0])
    assert await find(segments[0]) is first
    await find(segments[1])
    assert await find(segments[0]) is first
    await find(segments[2])  # drops the one that was not used longest
    assert len(maps) == 2
    assert await find(segments[0]) is first
    segments[0].close()
    maps.sweep()
    assert len(maps) == 1
    with pytest.raises(NotASegment):
        await find(segments[0])
    segments[2].close()
    with pytest.raises(NotASegment):
        await find(segments[2])
    assert len(maps) == 0
    maps.close()


async def test_large_memory_is_not_freed_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freeing takes the kernel 0.7 ms a MiB: the loop would stall."""
    gc.collect()  # what earlier tests left is not ours to count
    freed_by = []
    munmap = segment_module._libc.munmap

    def watch(*arguments: int) -> None:
        if arguments[1] >= 2 * MIB:
            freed_by.append(threading.current_thread())
        munmap(*arguments)

    monkeypatch.setattr(segment_module, "_libc", SimpleNamespace(munmap=watch, mmap=LIBC.mmap))
    owner, reader = ShmTransport("worker-1", 1, idle_limit=0), ShmTransport("worker-2", 1)
    ticket = await owner.publish([owner.empty("uint8", (2 * MIB,))])
    (await reader.fetch(ticket)).close()

    def carried() -> bool:
        """Whether the futures that brought it from the thread where it was made still hold it."""
        (attached,) = reader._maps._maps.values()
        return any("Future" in type(one).__name__ for one in gc.get_referrers(attached))

    await until(lambda: not carried())
    owner.release(ticket)
    await until(lambda: len(freed_by) >= 1)
    reader._maps.sweep()
    await until(lambda: len(freed_by) >= 2)
    assert threading.main_thread() not in freed_by
    await owner.close()
    await reader.close()
