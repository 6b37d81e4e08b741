"""Ten thousand transfers by each of NIXL's ways: nothing is left of them."""

from __future__ import annotations

import random

import pytest
from tests.contract.test_transfer import descriptors, filled, plain, started, until
from tests.contract.transfer_peer import opened

from triptych.transfer.client import TransferClient, readable_transports
from triptych.transfer.nixl import NixlTransport

TRANSFERS = 10_000


def idle(transfers: TransferClient) -> bool:
    """Nothing lent, nothing registered, nothing under way."""
    transfer, counts = transfers.find("nixl"), transfers.counts()
    assert isinstance(transfer, NixlTransport)
    return not (counts.tickets or counts.segments or transfer.operations or transfer.regions)


@pytest.mark.skipif("nixl" not in readable_transports(), reason="NIXL is not installed")
@pytest.mark.parametrize("way", ["nixl-read", "nixl-write", "nixl-near"])
async def test_ten_thousand_transfers_leave_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``Pool.clean`` does not report what it throws away."""
    monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.5)
    owner, reader = opened(way, "owner", 1), opened(way, "reader", 1)
    chance = random.Random(1)

    async def cycle(seed: int) -> None:
        arrays = [filled(owner, "uint8", (chance.randrange(200_000),), seed % 50), plain(b"x")]
        async with owner.offer(arrays) as ticket, reader.borrow(ticket) as fetched:
            fetched.check()
            for got, sent in zip(fetched.arrays, arrays, strict=True):
                assert got.buffer == sent.buffer

    await cycle(0)
    await until(lambda: idle(owner) and idle(reader))
    base = descriptors()
    for seed in range(TRANSFERS):
        await cycle(seed)
    await until(lambda: idle(owner) and idle(reader))
    assert descriptors() <= base
    async with started(way) as peer:  # and it goes on from there
        ticket = await peer.publish(b"after")
        async with reader.borrow(ticket) as fetched:
            assert bytes(fetched.arrays[0].buffer) == b"after"
    await owner.close()
    await reader.close()
