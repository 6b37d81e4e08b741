"""What memory of a GPU adds to the contract: who gets it, who does not, and that it is given back.

It is played in the host's memory (``support.gpus``), so that what is left can be counted; tests/gpu
has what needs a real one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from support.gpus import REAL, OnGpu, PlayedGpu, got, put
from triptych.errors import TicketLost
from triptych.transfer import exchange as exchange_module
from triptych.transfer.cuda import Cuda, CudaError, proved
from triptych.transfer.exchange import Exchange, readable
from triptych.transfer.segment import SLOTS
from triptych.transfer.shm import Address

from .test_transfer import contents, filled, plain, started, until

MIB = 1 << 20

pytestmark = pytest.mark.skipif(REAL is not None, reason="a GPU is there: nothing is played")


class Refusing(PlayedGpu):
    def open(self, handle: bytes) -> int:
        raise CudaError(1, "CUDA_ERROR_INVALID_HANDLE")


class Another(PlayedGpu):
    identity = b"some other GPU.."


@pytest.fixture
def gpu() -> PlayedGpu:
    return PlayedGpu()


@pytest.fixture
async def exchange(gpu: PlayedGpu) -> AsyncIterator[OnGpu]:
    exchange = OnGpu("worker-1", 3, gpu, limit=16 * MIB)
    yield exchange
    await exchange.close()


@pytest.mark.parametrize("by", readable())
async def test_readers_without_a_gpu_get_the_bytes_on_the_host(
    exchange: OnGpu, gpu: PlayedGpu, by: str
) -> None:
    array = filled(exchange, "bfloat16", (3, 700))
    assert array.gpu == 0
    reader = Exchange("auto", "worker-2", 1)
    async with exchange.offer([array, plain(b"beside")], by=by) as ticket:
        assert ticket.transport == by
        assert gpu.copied == 3 * 700 * 2  # by the GPU: the host cannot
        async with reader.borrow(ticket) as fetched:
            assert [one.gpu for one in fetched.arrays] == [None, None]
            assert contents(list(fetched.arrays)) == contents([array, plain(b"beside")])
    await reader.close()


async def test_nothing_is_copied_for_readers_on_the_gpu(exchange: OnGpu, gpu: PlayedGpu) -> None:
    array = filled(exchange, "uint8", (100,))
    async with exchange.offer([array]) as ticket, exchange.borrow(ticket) as fetched:
        assert ticket.transport == "cuda"
        assert fetched.arrays[0].gpu == 0
    assert not gpu.copied


async def test_a_ticket_for_a_gpu_is_lost_on_who_has_none(exchange: OnGpu) -> None:
    """Who came in after it was published: the walk is taken again, by another way."""
    reader = Exchange("auto", "worker-2", 1)
    async with exchange.offer([filled(exchange, "uint8", (100,))]) as ticket:
        with pytest.raises(TicketLost):
            await reader.fetch(ticket)
    await reader.close()


@pytest.mark.parametrize("other", [Another, Refusing])
async def test_what_cannot_be_opened_is_lost(other: type[PlayedGpu]) -> None:
    """Without the comparison of GPUs, or were CUDA's refusal no lost ticket, the first request
    would read another's memory and the second fail for good."""
    reader = OnGpu("worker-2", 1, other())
    async with started("cuda") as peer:
        ticket = await peer.publish(b"there")
        with pytest.raises(TicketLost):
            await reader.fetch(ticket)
    await reader.close()


async def test_a_piece_unlike_its_segment_is_lost(exchange: OnGpu) -> None:
    async with exchange.offer([filled(exchange, "uint8", (100,))]) as ticket:
        old = msgspec.msgpack.decode(ticket.address, type=Address)
        piece = msgspec.structs.replace(old.pieces[0], size=old.pieces[0].size + 64)
        forged = msgspec.msgpack.encode(Address(old.pid, (piece,)))
        with pytest.raises(TicketLost):
            await exchange.fetch(msgspec.structs.replace(ticket, address=forged))


async def test_where_the_gpu_has_no_memory_the_hosts_is_lent(exchange: OnGpu) -> None:
    first = [filled(exchange, "uint8", (6 * MIB,), seed) for seed in range(3)]
    assert [array.gpu for array in first] == [0, 0, None]  # by our limit of 16 MiB
    for array, way in zip(first, ("cuda", "cuda", "shm"), strict=True):
        async with exchange.offer([array]) as ticket, exchange.borrow(ticket) as fetched:
            assert ticket.transport == way
            assert contents(list(fetched.arrays)) == contents([array])


async def test_a_gpu_that_is_full_costs_no_request() -> None:
    exchange = OnGpu("worker-1", 3, PlayedGpu(memory=0), limit=16 * MIB)
    assert filled(exchange, "uint8", (100,)).gpu is None
    assert exchange.counts().segments == 0
    await exchange.close()


async def test_small_arrays_are_not_worth_it(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "proved", lambda number: gpu)
    exchange = Exchange("auto", "worker-1", 1)
    assert await exchange.use_gpu(0, 64 * MIB) == gpu.identity.hex()
    assert exchange.empty("uint8", (MIB,)).gpu is None  # it was not asked for
    assert exchange.empty("uint8", (MIB,), gpu=1).gpu is None  # another's
    assert exchange.empty("uint8", (1000,), gpu=0).gpu is None
    assert exchange.empty("uint8", (0,), gpu=0).gpu is None
    assert exchange.empty("uint8", (MIB,), gpu=0).gpu == 0
    await exchange.close()
    assert not gpu.allocated


async def test_more_tickets_than_a_table_holds_go_over_the_host(exchange: OnGpu) -> None:
    array = filled(exchange, "uint8", (100,))
    tickets = [await exchange.publish([array]) for _ in range(SLOTS + 1)]
    assert {ticket.transport for ticket in tickets[:-1]} == {"cuda"}
    assert tickets[-1].transport == "shm"
    for ticket in (tickets[0], tickets[-1]):
        async with exchange.borrow(ticket) as fetched:
            assert got(fetched.arrays[0]) == got(array)
    for ticket in tickets:
        exchange.release(ticket)


async def test_memory_goes_back_to_the_gpu_when_readers_have_closed_it(
    exchange: OnGpu, gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not promise that freed memory can be read: not freed before GRACE_SECONDS, and
    until then it is taken. Fails without ``_bury``, or where ``_made`` does not count it."""
    monkeypatch.setattr("triptych.transfer.shm.QUIET_SECONDS", 0.05)
    ticket = await exchange.publish([filled(exchange, "uint8", (10 * MIB,))])
    exchange.release(ticket)
    assert exchange._gpu is not None
    await until(lambda: exchange._gpu.pool.empty)  # type: ignore[union-attr]
    assert len(gpu.allocated) == 1
    assert exchange.empty("uint8", (12 * MIB,)).gpu is None
    exchange._gpu._buried[0] = (0.0, exchange._gpu._buried[0][1])  # as if the time were over
    await until(lambda: not gpu.allocated)
    assert exchange.empty("uint8", (12 * MIB,)).gpu == 0


async def test_close_gives_everything_back(gpu: PlayedGpu) -> None:
    exchange = OnGpu("worker-1", 3, gpu)
    await exchange.publish([filled(exchange, "uint8", (100,))])
    mine = filled(exchange, "uint8", (3 * MIB,), 1)
    await exchange.close()
    assert len(gpu.allocated) == 1
    assert got(mine) == random.Random(1).randbytes(3 * MIB)
    del mine
    exchange.counts()
    await exchange.close()
    assert not gpu.allocated


@pytest.mark.parametrize("killed", [True, False])
async def test_handles_are_opened_once_and_closed_with_their_owner(
    killed: bool, gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transfer.maps.SWEEP_SECONDS", 0.05)
    reader = OnGpu("worker-2", 1, gpu)
    async with started("cuda") as peer:
        for _ in range(3):
            ticket = await peer.publish(b"k" * 1000)
            async with reader.borrow(ticket) as fetched, reader.borrow(ticket):
                assert got(fetched.arrays[0]) == b"k" * 1000
            await peer.ask("release", ticket=ticket)
            assert len(gpu.opened) == gpu.opens == 1  # the same memory again
        if killed:
            await peer.kill()
    await until(lambda: not gpu.opened)
    await reader.close()


async def test_whoever_asked_for_a_transport_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "proved", lambda number: pytest.fail("not even tried"))
    exchange = Exchange("shm", "worker-1", 1)
    assert await exchange.use_gpu(0) == ""
    assert exchange.empty("uint8", (MIB,), gpu=0).gpu is None
    await exchange.close()


async def test_a_gpu_that_shares_no_memory_is_said_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int) -> Cuda:
        raise CudaError(1, "no IPC here")

    monkeypatch.setattr(exchange_module, "proved", refuse)
    exchange = Exchange("auto", "worker-1", 1)
    with caplog.at_level(logging.WARNING):
        assert await exchange.use_gpu(0) == ""
    assert "no IPC here" in caplog.text
    array = exchange.empty("uint8", (MIB,), gpu=0)
    put(array, bytes(MIB))
    async with exchange.offer([array], by="cuda") as ticket:
        assert ticket.transport == "shm"
    await exchange.close()


def test_without_cuda_that_is_what_is_said() -> None:
    with pytest.raises(CudaError, match="libcuda"):
        proved(0)
