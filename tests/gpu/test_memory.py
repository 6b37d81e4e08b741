"""Real memory of a GPU between processes: every byte, and nothing left. ``make test-gpu`` runs it.

The transfer contract runs on it too (tests/contract/test_transfer.py, its variant ``cuda``).
"""

from __future__ import annotations

import ctypes
import random

import pytest

from contract.test_transfer import contents, filled, started, until
from support.gpus import REAL, OnGpu, got
from triptych.errors import TicketLost
from triptych.transfer.cuda_driver import open_shareable_gpu

pytestmark = pytest.mark.skipif(REAL is None, reason="there is no GPU")

MIB = 1 << 20
LARGE = 154 * MIB  # the KV cache of a 1080p picture in a 7B model


def free_bytes() -> int:
    assert REAL is not None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with REAL._current():
        REAL._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def test_another_process_opens_our_memory() -> None:
    assert REAL is not None
    assert open_shareable_gpu(0).identity == REAL.identity


async def test_the_engines_tensors_are_the_memory_itself() -> None:
    """What torch writes there another process reads, and what is made from it keeps it."""
    import torch

    from triptych.models.tensors import synchronize, tensor_view

    owner = OnGpu("worker-1", 1)
    array = owner.empty("bfloat16", (77, 1000))
    tensor = tensor_view(array)
    assert (tensor.device.type, tensor.dtype) == ("cuda", torch.bfloat16)
    chance = torch.Generator("cuda").manual_seed(3)
    tensor.copy_(torch.randn(77, 1000, generator=chance, device="cuda"))
    synchronize(tensor.device)
    written = tensor.view(torch.uint8).cpu().numpy().tobytes()
    async with started("cuda") as peer, owner.offer([array]) as ticket:
        assert await peer.read(ticket) == [("bfloat16", (77, 1000), written)]
    del array
    assert owner.counts().segments == 1
    del tensor
    assert owner.counts().segments == 0
    await owner.close()


async def test_large_memory_comes_whole_and_is_read_by_the_engine() -> None:
    from triptych.models.tensors import tensor_view

    reader = OnGpu("worker-2", 1)
    data = random.Random(7).randbytes(8 * MIB) * (LARGE // (8 * MIB))
    async with started("cuda") as peer:
        ticket = await peer.publish(data[: 8 * MIB])
        async with reader.borrow(ticket) as fetched:
            copied = tensor_view(fetched.arrays[0]).clone()
            assert copied.cpu().numpy().tobytes() == data[: 8 * MIB]
            fetched.check()
    owner = OnGpu("worker-1", 1)
    array = filled(owner, "uint8", (LARGE,))
    async with owner.offer([array]) as ticket, owner.borrow(ticket) as fetched:
        assert got(fetched.arrays[0]) == got(array)
    await owner.close()
    await reader.close()


async def test_killing_an_owner_takes_nothing_from_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.transfer.segment.MAP_SWEEP_SECONDS", 0.2)
    reader = OnGpu("worker-2", 1)
    base = free_bytes()
    async with started("cuda") as peer:
        ticket = await peer.publish(b"k" * (16 * MIB))
        other = await peer.publish(b"o" * (4 * MIB))
        fetched = await reader.fetch(ticket)
        await peer.kill()
        assert got(fetched.arrays[0]) == b"k" * (16 * MIB)
        for lost in (ticket, other):
            with pytest.raises(TicketLost):
                await reader.fetch(lost)
        fetched.close()
        del fetched
    await until(lambda: free_bytes() >= base)  # the owner's context and all its memory
    await reader.close()


async def test_a_reader_that_is_killed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.2)
    monkeypatch.setattr("triptych.transfer.cuda.FREE_DELAY_SECONDS", 0.2)
    base = free_bytes()
    owner = OnGpu("worker-1", 1)
    ticket = await owner.publish([filled(owner, "uint8", (16 * MIB,))])
    async with started("cuda") as peer:
        await peer.ask("fetch", ticket=ticket, keep=True)
        await peer.kill()
    owner.release(ticket)
    await until(lambda: free_bytes() >= base)
    await owner.close()


async def test_freed_memory_can_be_read_by_processes_that_have_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA does not promise it, and we wait with freeing; but a reader that is late meets no fault,
    which would end all that its process does on the GPU: the table informs it."""
    reader = OnGpu("worker-2", 1)
    async with started("cuda") as peer:
        ticket = await peer.publish(b"k" * (16 * MIB))
        fetched = await reader.fetch(ticket)
        await peer.ask("release", ticket=ticket)
        await peer.ask("close")
        assert got(fetched.arrays[0]) == b"k" * (16 * MIB)
        with pytest.raises(TicketLost):
            fetched.check()
        fetched.close()
    owner = OnGpu("worker-1", 1)
    array = filled(owner, "uint8", (MIB,))  # and the GPU still works here
    assert contents([array])[0][2] == random.Random(0).randbytes(MIB)
    await owner.close()
    await reader.close()


async def test_ten_thousand_hand_overs_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.2)
    monkeypatch.setattr("triptych.transfer.cuda.FREE_DELAY_SECONDS", 0.2)
    base = free_bytes()
    owner = OnGpu("worker-1", 1)
    async with started("cuda") as peer:
        for turn in range(10_000):
            array = filled(owner, "uint8", (1000 + turn,), turn)
            async with owner.offer([array]) as ticket:
                [(_, _, data)] = await peer.read(ticket)
                assert data == random.Random(turn).randbytes(1000 + turn)
            del array
        assert (await peer.ask("counts"))["segments"] == 0
    assert owner.counts().tickets == owner.counts().segments == 0
    await until(lambda: free_bytes() >= base)
    await owner.close()
