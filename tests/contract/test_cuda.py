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
from triptych.transfer import client as client_module
from triptych.transfer.client import TransferClient, readable_transports
from triptych.transfer.cuda_driver import CudaError, CudaGpu, open_shareable_gpu
from triptych.transfer.segment import SLOTS
from triptych.transfer.shm import ShmAddress

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
async def transfers(gpu: PlayedGpu) -> AsyncIterator[OnGpu]:
    transfers = OnGpu("worker-1", 3, gpu, limit=16 * MIB)
    yield transfers
    await transfers.close()


@pytest.mark.parametrize("by", readable_transports())
async def test_readers_without_a_gpu_get_the_bytes_on_the_host(
    transfers: OnGpu, gpu: PlayedGpu, by: str
) -> None:
    array = filled(transfers, "bfloat16", (3, 700))
    assert array.gpu == 0
    reader = TransferClient("auto", "worker-2", 1)
    async with transfers.offer([array, plain(b"beside")], by=by) as ticket:
        assert ticket.transport == by
        assert gpu.copied == 3 * 700 * 2  # by the GPU: the host cannot
        async with reader.borrow(ticket) as fetched:
            assert [one.gpu for one in fetched.arrays] == [None, None]
            assert contents(list(fetched.arrays)) == contents([array, plain(b"beside")])
    await reader.close()


async def test_nothing_is_copied_for_readers_on_the_gpu(transfers: OnGpu, gpu: PlayedGpu) -> None:
    array = filled(transfers, "uint8", (100,))
    async with transfers.offer([array]) as ticket, transfers.borrow(ticket) as fetched:
        assert ticket.transport == "cuda"
        assert fetched.arrays[0].gpu == 0
    assert not gpu.copied


async def test_a_ticket_for_a_gpu_is_lost_in_a_process_without_one(transfers: OnGpu) -> None:
    """A reader that joined after it was published: the request migrates, by another transport."""
    reader = TransferClient("auto", "worker-2", 1)
    async with transfers.offer([filled(transfers, "uint8", (100,))]) as ticket:
        with pytest.raises(TicketLost):
            await reader.fetch(ticket)
    await reader.close()


@pytest.mark.parametrize("other", [Another, Refusing])
async def test_memory_that_cannot_be_opened_is_lost(other: type[PlayedGpu]) -> None:
    """Without the comparison of GPUs, or were CUDA's refusal no lost ticket, the first request
    would read another's memory and the second fail for good."""
    reader = OnGpu("worker-2", 1, other())
    async with started("cuda") as peer:
        ticket = await peer.publish(b"there")
        with pytest.raises(TicketLost):
            await reader.fetch(ticket)
    await reader.close()


async def test_a_piece_unlike_its_segment_is_lost(transfers: OnGpu) -> None:
    async with transfers.offer([filled(transfers, "uint8", (100,))]) as ticket:
        old = msgspec.msgpack.decode(ticket.address, type=ShmAddress)
        piece = msgspec.structs.replace(old.pieces[0], size=old.pieces[0].size + 64)
        forged = msgspec.msgpack.encode(ShmAddress(old.pid, (piece,)))
        with pytest.raises(TicketLost):
            await transfers.fetch(msgspec.structs.replace(ticket, address=forged))


async def test_where_the_gpu_has_no_memory_the_hosts_is_lent(transfers: OnGpu) -> None:
    first = [filled(transfers, "uint8", (6 * MIB,), seed) for seed in range(3)]
    assert [array.gpu for array in first] == [0, 0, None]  # by our limit of 16 MiB
    for array, way in zip(first, ("cuda", "cuda", "shm"), strict=True):
        async with transfers.offer([array]) as ticket, transfers.borrow(ticket) as fetched:
            assert ticket.transport == way
            assert contents(list(fetched.arrays)) == contents([array])


async def test_a_full_gpu_fails_no_request() -> None:
    transfers = OnGpu("worker-1", 3, PlayedGpu(memory=0), limit=16 * MIB)
    assert filled(transfers, "uint8", (100,)).gpu is None
    assert transfers.counts().segments == 0
    await transfers.close()


async def test_small_arrays_are_not_worth_it(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "open_shareable_gpu", lambda number: gpu)
    transfers = TransferClient("auto", "worker-1", 1)
    assert await transfers.use_gpu(0, 64 * MIB) == gpu.identity.hex()
    assert transfers.empty("uint8", (MIB,)).gpu is None  # it was not asked for
    assert transfers.empty("uint8", (MIB,), gpu=1).gpu is None  # another's
    assert transfers.empty("uint8", (1000,), gpu=0).gpu is None
    assert transfers.empty("uint8", (0,), gpu=0).gpu is None
    assert transfers.empty("uint8", (MIB,), gpu=0).gpu == 0
    await transfers.close()
    assert not gpu.allocated


async def test_more_tickets_than_a_table_holds_go_over_the_host(transfers: OnGpu) -> None:
    array = filled(transfers, "uint8", (100,))
    tickets = [await transfers.publish([array]) for _ in range(SLOTS + 1)]
    assert {ticket.transport for ticket in tickets[:-1]} == {"cuda"}
    assert tickets[-1].transport == "shm"
    for ticket in (tickets[0], tickets[-1]):
        async with transfers.borrow(ticket) as fetched:
            assert got(fetched.arrays[0]) == got(array)
    for ticket in tickets:
        transfers.release(ticket)


async def test_memory_goes_back_to_the_gpu_when_readers_have_closed_it(
    transfers: OnGpu, gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not promise that freed memory can be read: not freed before GRACE_SECONDS, and
    until then it is in use. Fails without ``_bury``, or where ``_made`` does not count it."""
    monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.05)
    ticket = await transfers.publish([filled(transfers, "uint8", (10 * MIB,))])
    transfers.release(ticket)
    assert transfers._gpu is not None
    await until(lambda: not transfers._gpu.pool.bytes)  # type: ignore[union-attr]
    assert len(gpu.allocated) == 1
    assert transfers.empty("uint8", (12 * MIB,)).gpu is None
    discarded = transfers._gpu._discarded
    discarded[0] = (0.0, discarded[0][1])  # as if the time were over
    await until(lambda: not gpu.allocated)
    assert transfers.empty("uint8", (12 * MIB,)).gpu == 0


async def test_close_gives_everything_back(gpu: PlayedGpu) -> None:
    transfers = OnGpu("worker-1", 3, gpu)
    await transfers.publish([filled(transfers, "uint8", (100,))])
    mine = filled(transfers, "uint8", (3 * MIB,), 1)
    await transfers.close()
    assert len(gpu.allocated) == 1
    assert got(mine) == random.Random(1).randbytes(3 * MIB)
    del mine
    transfers.counts()
    await transfers.close()
    assert not gpu.allocated


@pytest.mark.parametrize("killed", [True, False])
async def test_handles_are_opened_once_and_closed_with_their_owner(
    killed: bool, gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transfer.segment.MAP_SWEEP_SECONDS", 0.05)
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


async def test_a_transport_that_was_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        client_module, "open_shareable_gpu", lambda number: pytest.fail("not even tried")
    )
    transfers = TransferClient("shm", "worker-1", 1)
    assert await transfers.use_gpu(0) == ""
    assert transfers.empty("uint8", (MIB,), gpu=0).gpu is None
    await transfers.close()


async def test_a_gpu_that_cannot_share_memory_is_reported_and_not_used_for_transfer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int) -> CudaGpu:
        raise CudaError(1, "no IPC here")

    monkeypatch.setattr(client_module, "open_shareable_gpu", refuse)
    transfers = TransferClient("auto", "worker-1", 1)
    with caplog.at_level(logging.WARNING):
        assert await transfers.use_gpu(0) == ""
    assert "no IPC here" in caplog.text
    array = transfers.empty("uint8", (MIB,), gpu=0)
    put(array, bytes(MIB))
    async with transfers.offer([array], by="cuda") as ticket:
        assert ticket.transport == "shm"
    await transfers.close()


def test_without_cuda_the_error_says_so() -> None:
    with pytest.raises(CudaError, match="libcuda"):
        open_shareable_gpu(0)
