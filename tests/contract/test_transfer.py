"""What every transport must do, for readers in this process and in another."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.gpus import got, put
from triptych.errors import TicketLost, rebuild_error
from triptych.messages import Failure, Ticket
from triptych.transfer.base import DTYPE_BYTES, Array, byte_count
from triptych.transfer.client import TransferClient, readable_transports
from triptych.transfer.registry import TRANSPORTS

from .transfer_peer import opened

Read = Callable[[Ticket], Awaitable[list[tuple[str, tuple[int, ...], bytes]]]]

# NIXL by both of its ways: a reader that READs, and one that has the owner WRITE. A GPU that is not
# there is played by ``support.gpus``.
VARIANTS = ["cuda", "file", "inline", "nixl-read", "nixl-write", "shm"]
# A transport whose owner can take memory back; the others' tickets carry their own bytes.
REVOCABLE = [name for name in VARIANTS if name != "inline"]
# And whose readers look at the owner's own memory, so that they can lose it while they do.
IN_PLACE = ["cuda", "nixl-near", "shm"]  # near: on the owner's host, which is the rule
MOVED = ["nixl-read", "nixl-write"]
COPIED = ["file", "inline"]  # whose memory is the process's own and never revoked


def test_every_transport_is_under_this_contract() -> None:
    assert {name.partition("-")[0] for name in VARIANTS} == set(TRANSPORTS)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def named_memory(pid: int) -> set[str]:
    """Of a process: memory that has a name, and so would outlive it. Not by listing /dev/shm, where
    other processes come and go."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {path for path in paths if not path.endswith("(deleted)")}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def plain(data: bytes, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Array:
    return Array(memoryview(data), dtype, (len(data),) if shape is None else shape)


def filled(transfers: TransferClient, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    array = transfers.empty(dtype, shape)
    put(array, random.Random(seed).randbytes(array.buffer.nbytes))
    return array


def contents(arrays: list[Array]) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(array.dtype, array.shape, got(array)) for array in arrays]


class Peer:
    """The test's end of transfer_peer.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for name, value in arguments.items():
            if isinstance(value, Ticket):
                arguments[name] = base64.b64encode(msgspec.msgpack.encode(value)).decode()
        self.process.stdin.write(msgspec.json.encode({"do": do, **arguments}) + b"\n")
        answer = msgspec.json.decode(await self.process.stdout.readline())
        if code := answer.get("error"):
            raise rebuild_error(Failure(503, code, "the peer said so"))
        return answer["value"]

    async def publish(self, data: bytes, **arguments: Any) -> Ticket:
        answer = await self.ask("publish", data=base64.b64encode(data).decode(), **arguments)
        return msgspec.msgpack.decode(base64.b64decode(answer), type=Ticket)

    async def read(self, ticket: Ticket) -> list[tuple[str, tuple[int, ...], bytes]]:
        return [
            (dtype, tuple(shape), base64.b64decode(data))
            for dtype, shape, data in await self.ask("fetch", ticket=ticket)
        ]

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def started(transport: str, *name: str) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("transfer_peer.py")),
        transport,
        *name,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=64 << 20,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:  # it hangs, which its test reported: the next ones must not
                process.kill()
                await process.wait()


@pytest.fixture(params=VARIANTS)
def transport(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("TEST_TRANSFER_FOLDER", str(tmp_path / "shared"))
    if request.param.startswith("nixl") and "nixl" not in readable_transports():
        pytest.skip("NIXL is not installed")
    return str(request.param)


@pytest.fixture
async def transfers(transport: str) -> AsyncIterator[TransferClient]:
    transfers = opened(transport, "worker-1", epoch=3)
    yield transfers
    await transfers.close()


@pytest.fixture
async def peer(transport: str) -> AsyncIterator[Peer]:
    async with started(transport) as peer:
        yield peer


@pytest.fixture(params=["same", "beside", "apart"])
async def read(
    request: pytest.FixtureRequest, transfers: TransferClient, transport: str
) -> AsyncIterator[Read]:
    """Reads a ticket: with the owner's own transfers, another one, or another process's."""
    # Auto reads any transport that it has a device for, whatever its own.
    reader = transport if transport in (*MOVED, "cuda") else "auto"

    async def by(
        reader: TransferClient, ticket: Ticket
    ) -> list[tuple[str, tuple[int, ...], bytes]]:
        async with reader.borrow(ticket) as fetched:
            found = contents(list(fetched.arrays))
            fetched.check()
            return found

    if request.param == "apart":
        async with started(reader) as peer:
            yield peer.read
    elif request.param == "beside":
        other = opened(reader, "worker-2", epoch=1)
        yield lambda ticket: by(other, ticket)
        await other.close()
    else:
        yield lambda ticket: by(transfers, ticket)


async def test_round_trip_of_every_dtype_and_shape(transfers: TransferClient, read: Read) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 5), (7, 3), (2, 3, 5, 7)]
    arrays = [
        filled(transfers, dtype, shape, seed)
        for seed, (dtype, shape) in enumerate((d, s) for d in DTYPE_BYTES for s in shapes)
    ]
    async with transfers.offer(arrays) as ticket:
        assert ticket.size == sum(byte_count(a.dtype, a.shape) for a in arrays)
        assert await read(ticket) == contents(arrays)


async def test_round_trip_of_memory_from_elsewhere(transfers: TransferClient, read: Read) -> None:
    own = filled(transfers, "float32", (33, 5))
    arrays = [plain(b"read-only"), own, plain(bytearray(b"\1\0" * 70), "int16", (70,))]
    async with transfers.offer(arrays) as ticket:
        assert await read(ticket) == contents(arrays)


async def test_round_trip_of_large_and_of_no_arrays(transfers: TransferClient, read: Read) -> None:
    for arrays in (
        [],
        [transfers.empty("bfloat16", (0, 8))],
        [plain(random.Random(1).randbytes(3 << 20)), filled(transfers, "uint8", (2 << 20,))],
    ):
        async with transfers.offer(arrays) as ticket:
            assert await read(ticket) == contents(arrays)


async def test_slices_of_one_array_are_arrays_too(transfers: TransferClient, read: Read) -> None:
    whole = filled(transfers, "uint8", (1000,))
    arrays = [
        replace(whole, buffer=whole.buffer[500:], shape=(500,)),
        replace(whole, buffer=whole.buffer[4:8], dtype="float32", shape=(1,)),
    ]
    async with transfers.offer(arrays) as ticket:
        assert await read(ticket) == contents(arrays)


async def test_the_same_array_can_be_offered_to_several(
    transfers: TransferClient, read: Read
) -> None:
    array = filled(transfers, "float32", (100,))
    first = await transfers.publish([array])
    second = await transfers.publish([array])
    assert first.serial != second.serial
    transfers.release(first)
    assert await read(second) == contents([array])
    transfers.release(second)


async def test_parts_are_aligned(transfers: TransferClient) -> None:
    arrays = [filled(transfers, "uint8", (n,)) for n in (1, 63, 65)] + [plain(b"abc"), plain(b"d")]
    async with transfers.offer(arrays) as ticket:
        assert [part.offset % 64 for part in ticket.parts] == [0] * 5


async def test_an_array_unlike_its_shape_is_refused(transfers: TransferClient) -> None:
    for wrong in (
        Array(memoryview(b"1234"), "float32", (2,)),
        Array(memoryview(b"1234"), "float33", (1,)),
        Array(memoryview(b"1234"), "int8", (-4,)),
    ):
        with pytest.raises(ValueError, match=r"bytes|dtype|shape"):
            await transfers.publish([wrong])
    assert transfers.counts().segments == transfers.counts().tickets == 0


@pytest.mark.parametrize("transport", [name for name in VARIANTS if name != "cuda"], indirect=True)
async def test_writable_for_tensor_libraries(transfers: TransferClient) -> None:
    torch = pytest.importorskip("torch")
    array = transfers.empty("float32", (4, 4))
    torch.frombuffer(array.buffer, dtype=torch.float32).copy_(torch.arange(16.0))
    async with transfers.offer([array]) as ticket, transfers.borrow(ticket) as fetched:
        tensor = torch.frombuffer(fetched.arrays[0].buffer, dtype=torch.float32)  # would warn
        assert torch.equal(tensor, torch.arange(16.0))


async def test_views_outlive_close(transfers: TransferClient) -> None:
    """A tensor that is still about when its scope ends must not point into nothing."""
    array = filled(transfers, "uint8", (100_000,))
    expected = got(array)
    ticket = await transfers.publish([array])
    fetched = await transfers.fetch(ticket)
    view = fetched.arrays[0]
    fetched.close()
    assert fetched.arrays == ()
    transfers.release(ticket)
    await transfers.close()
    assert got(view) == expected


async def test_release_twice_and_release_of_anothers(transfers: TransferClient, peer: Peer) -> None:
    ticket = await transfers.publish([filled(transfers, "uint8", (10,))])
    other = await transfers.publish([filled(transfers, "uint8", (10,), 1)])
    transfers.release(ticket)
    transfers.release(ticket)
    stranger = msgspec.structs.replace(other, owner="worker-9")
    transfers.release(stranger)
    transfers.release(msgspec.structs.replace(other, epoch=99))
    await peer.ask("release", ticket=other)
    async with transfers.borrow(other) as fetched:
        assert got(fetched.arrays[0]) == random.Random(1).randbytes(10)


async def test_counts_by_transport(transfers: TransferClient, transport: str) -> None:
    async with transfers.offer([filled(transfers, "uint8", (5,))]) as ticket:
        async with transfers.borrow(ticket) as one, transfers.borrow(ticket) as two:
            assert contents(list(one.arrays)) == contents(list(two.arrays))
        assert one.arrays == two.arrays == ()
        assert transfers.counts().tickets == (transport in REVOCABLE)
    counts = transfers.counts()
    assert counts.bytes_sent == {transport.partition("-")[0]: 5}
    received = transport if transport in ("cuda", "file", "inline") else "shm"
    assert counts.bytes_received == {received: 10}
    assert counts.tickets == 0
    await until(lambda: not transfers.counts().segments)


async def test_a_thousand_cycles_leave_nothing(transfers: TransferClient) -> None:
    async def cycle(seed: int) -> None:
        size = seed % 7 * 30_000
        arrays = [filled(transfers, "uint8", (size,), seed), plain(b"x" * (seed % 1000))]
        async with transfers.offer(arrays) as ticket, transfers.borrow(ticket) as fetched:
            assert contents(list(fetched.arrays)) == contents(arrays)
            fetched.check()

    for seed in range(100):
        await cycle(seed)
    base = descriptors()
    for seed in range(1000):
        await cycle(seed)
    # The pool may have one more in use at a time than in the first hundred, of both kinds.
    assert descriptors() <= base + 2
    await until(lambda: not transfers.counts().segments)  # a copying thread may still have to end
    assert transfers.counts().tickets == 0


async def test_concurrent_publishers(transfers: TransferClient) -> None:
    async def one(seed: int) -> None:
        for turn in range(5):
            array = filled(transfers, "uint8", (1000 * seed + turn,), seed * 100 + turn)
            outside = plain(random.Random(seed).randbytes(5000))
            async with transfers.offer([array, outside]) as ticket:
                await asyncio.sleep(0)
                async with transfers.borrow(ticket) as fetched:
                    assert contents(list(fetched.arrays)) == contents([array, outside])

    await asyncio.gather(*(one(seed) for seed in range(32)))
    await until(lambda: not transfers.counts().segments)
    assert transfers.counts().tickets == 0


async def test_cancel_in_the_middle_leaves_nothing(transfers: TransferClient) -> None:
    for _ in range(5):
        task = asyncio.create_task(transfers.publish([plain(bytes(8 << 20))]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # The copying threads have to end first.
    await until(lambda: not transfers.counts().segments)
    assert transfers.counts().tickets == 0


FORGERIES: dict[str, Callable[[Ticket], dict[str, Any]]] = {
    "empty address": lambda t: {"address": b""},
    "cut address": lambda t: {"address": t.address[: len(t.address) // 2]},
    "other bytes": lambda t: {"address": bytes(byte ^ 0x5A for byte in t.address)},
    "part beyond": lambda t: {"parts": (msgspec.structs.replace(t.parts[0], offset=1 << 40),)},
    "part before": lambda t: {"parts": (msgspec.structs.replace(t.parts[0], offset=-64),)},
    "part over the end": lambda t: {
        "parts": (msgspec.structs.replace(t.parts[0], shape=(1 << 40,)),),
        "size": 1 << 40,
    },
    "negative shape": lambda t: {
        "parts": (msgspec.structs.replace(t.parts[0], shape=(-8, -8)),),
    },
    "unknown dtype": lambda t: {"parts": (msgspec.structs.replace(t.parts[0], dtype="object"),)},
    "other size": lambda t: {"size": t.size + 1},
    "unknown transport": lambda t: {"transport": "pigeon"},
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_a_forged_ticket_is_lost(transfers: TransferClient, how: str) -> None:
    async with transfers.offer([filled(transfers, "uint8", (64,))]) as ticket:
        with pytest.raises(TicketLost):
            await transfers.fetch(msgspec.structs.replace(ticket, **FORGERIES[how](ticket)))
        async with transfers.borrow(ticket):
            pass


async def test_random_addresses_are_lost(transfers: TransferClient) -> None:
    chance = random.Random(5)
    async with transfers.offer([filled(transfers, "uint8", (64,))]) as ticket:
        for _ in range(300):
            address = bytearray(ticket.address)
            for _ in range(chance.randint(1, 4)):
                address[chance.randrange(len(address))] ^= chance.randint(1, 255)
            with contextlib.suppress(TicketLost):
                async with transfers.borrow(
                    msgspec.structs.replace(ticket, address=bytes(address))
                ) as fetched:
                    assert contents(list(fetched.arrays))[0][2] == random.Random(0).randbytes(64)


@pytest.mark.parametrize("transport", REVOCABLE, indirect=True)
class TestRevocable:
    """Transports whose owner keeps the memory, and can take it back."""

    async def test_released_is_lost(self, transfers: TransferClient, read: Read) -> None:
        ticket = await transfers.publish([filled(transfers, "uint8", (100,))])
        await read(ticket)
        transfers.release(ticket)
        await until(lambda: not transfers.counts().segments)  # a file goes in a thread
        with pytest.raises(TicketLost):
            await read(ticket)

    async def test_reused_memory_is_not_read_as_the_old_tensors(
        self, transfers: TransferClient, read: Read
    ) -> None:
        old = await transfers.publish([filled(transfers, "uint8", (100,))])
        await read(old)
        transfers.release(old)
        async with transfers.offer([filled(transfers, "uint8", (100,), 1)]) as new:
            await until(lambda: transfers.counts().segments == 1)
            with pytest.raises(TicketLost):
                await read(old)
            assert (await read(new))[0][2] == random.Random(1).randbytes(100)

    async def test_an_expired_ticket_is_lost_and_its_memory_returns(
        self, transfers: TransferClient, read: Read, transport: str
    ) -> None:
        ticket = await transfers.publish([filled(transfers, "uint8", (100,))], lifetime=0.05)
        fetched = await transfers.fetch(ticket)
        assert transfers.counts().segments == 1
        await until(lambda: not transfers.counts().tickets)
        await until(lambda: not transfers.counts().segments)
        if transport not in COPIED:
            with pytest.raises(TicketLost):
                fetched.check()
        with pytest.raises(TicketLost):
            await read(ticket)
        transfers.release(ticket)

    async def test_expired_is_lost_though_its_owner_sleeps(
        self, transfers: TransferClient, peer: Peer
    ) -> None:
        ticket = await peer.publish(b"late", lifetime=0.3)
        peer.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(0.35)
            with pytest.raises(TicketLost):
                await transfers.fetch(ticket)
        finally:
            peer.process.send_signal(signal.SIGCONT)

    async def test_dropped_without_publishing(
        self, transfers: TransferClient, transport: str
    ) -> None:
        array = transfers.empty("uint8", (100,))
        view = array.buffer[7:9]
        lent = int(transport not in COPIED)
        assert transfers.counts().segments == lent
        del array
        assert transfers.counts().segments == lent
        del view
        assert transfers.counts().segments == 0

    async def test_sigkill_of_the_owner(
        self, transfers: TransferClient, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.2)
        if transport in MOVED:
            monkeypatch.setattr("triptych.transfer.nixl_transfers.LATE_WRITE_SECONDS", 0.2)
        async with transfers.offer([plain(b"warm")]):
            base = descriptors()
        async with started(transport) as peer:
            ticket = await peer.publish(b"k" * (2 << 20))
            other = await peer.publish(b"other")
            fetched = await transfers.fetch(ticket)
            assert not named_memory(peer.process.pid)
            await peer.kill()
            assert got(fetched.arrays[0]) == b"k" * (2 << 20)
            for lost in (ticket, other):
                with pytest.raises(TicketLost):
                    await transfers.fetch(lost)
            fetched.close()
        del peer
        await asyncio.sleep(0)
        await until(lambda: descriptors() <= base)

    async def test_sigkill_of_the_reader(self, transfers: TransferClient, transport: str) -> None:
        ticket = await transfers.publish([filled(transfers, "uint8", (100,))])
        async with started(transport) as peer:
            await peer.ask("fetch", ticket=ticket, keep=True)
            await peer.kill()
        assert transfers.counts().segments == 1
        transfers.release(ticket)
        assert transfers.counts().tickets == 0
        await until(lambda: not transfers.counts().segments)

    async def test_a_peers_counts_return(self, transfers: TransferClient, peer: Peer) -> None:
        warm = await peer.publish(b"a" * 100)
        async with transfers.borrow(warm):
            pass
        await peer.ask("release", ticket=warm)
        base = await peer.ask("counts")
        for _ in range(50):
            ticket = await peer.publish(b"a" * 100)
            async with transfers.borrow(ticket) as fetched:
                fetched.check()
            await peer.ask("release", ticket=ticket)
        async with asyncio.timeout(60):
            while (counts := await peer.ask("counts"))["segments"]:
                await asyncio.sleep(0.01)
        assert counts["tickets"] == 0
        assert counts["descriptors"] == base["descriptors"]


@pytest.mark.parametrize("transport", IN_PLACE, indirect=True)
class TestInPlace:
    """Readers that look at the owner's own memory."""

    async def test_released_while_being_read(self, transfers: TransferClient, peer: Peer) -> None:
        ticket = await transfers.publish([filled(transfers, "uint8", (100,))])
        fetched = await transfers.fetch(ticket)
        await peer.ask("fetch", ticket=ticket, keep=True)
        fetched.check()
        await peer.ask("check")
        transfers.release(ticket)
        with pytest.raises(TicketLost):
            fetched.check()
        with pytest.raises(TicketLost):
            await peer.ask("check")

    async def test_read_in_place(self, transfers: TransferClient, peer: Peer) -> None:
        ticket = await peer.publish(b"a" * 1000)
        async with transfers.borrow(ticket) as fetched:
            assert got(fetched.arrays[0]) == b"a" * 1000
            await peer.ask("overwrite", byte=ord("b"))
            assert got(fetched.arrays[0]) == b"b" * 1000
