"""What NIXL must do besides what every transport must: move the right bytes or none.

Two processes, or two clients in one. ``way`` is who moves: the reader READs, or the owner WRITEs.
Each guard was switched off once; where the test says how, it failed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.errors import InvalidConfig, TicketLost
from triptych.messages import Ticket
from triptych.transfer import client as client_module
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient, readable_transports
from triptych.transfer.segment import memory_domain

if "nixl" not in readable_transports():
    pytest.skip("NIXL is not installed", allow_module_level=True)

from triptych.transfer import nixl_agent as agent_module
from triptych.transfer import nixl_transfers
from triptych.transfer.nixl import NixlTransport, pack_address, unpack_address
from triptych.transfer.nixl_agent import NixlAgent
from triptych.transfer.nixl_transfers import (
    ReadOperation,
    ReceiveOperation,
    SendOperation,
    checksum,
)

from .test_transfer import contents, descriptors, filled, plain, started, until
from .transfer_peer import opened

MIB = 1 << 20
READ = pytest.mark.parametrize("way", ["read"], indirect=True)
WRITE = pytest.mark.parametrize("way", ["write"], indirect=True)


def nixl(transfers: TransferClient) -> NixlTransport:
    transfer = transfers.find("nixl")
    assert isinstance(transfer, NixlTransport)
    return transfer


async def read(transfers: TransferClient, ticket: Ticket) -> list[bytes]:
    async with transfers.borrow(ticket) as fetched:
        return [bytes(array.buffer) for array in fetched.arrays]


def listening() -> list[str]:
    """Addresses that this process listens on, as the kernel writes them."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    files = [Path(f"/proc/self/net/{file}").read_text() for file in ("tcp", "tcp6")]
    lines = [line.split() for file in files for line in file.splitlines()[1:]]
    return [words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in mine]


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


class Stop:
    """Holds the agent's thread in a method until the test lets it go on."""

    def __init__(self, patch: pytest.MonkeyPatch, where: type, method: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        real: Callable[..., Any] = getattr(where, method)

        def stopping(*args: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(30)
            return real(*args)

        patch.setattr(where, method, stopping)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 30)


@pytest.fixture(params=["read", "write"])
def way(request: pytest.FixtureRequest) -> str:
    return f"nixl-{request.param}"


@pytest.fixture
async def owner(way: str) -> AsyncIterator[TransferClient]:
    transfers = opened(way, "owner", epoch=1)
    yield transfers
    await transfers.close()


@pytest.fixture
async def reader(way: str) -> AsyncIterator[TransferClient]:
    transfers = opened(way, "reader", epoch=1)
    yield transfers
    await transfers.close()


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts: what is sent lies in sockets, and is under way for a while."""
    monkeypatch.setenv("UCX_TLS", "tcp")


async def test_moved_memory_belongs_to_the_reader(
    owner: TransferClient, reader: TransferClient
) -> None:
    array = filled(owner, "uint8", (3 * MIB,))
    expected = bytes(array.buffer)
    ticket = await owner.publish([array])
    fetched = await reader.fetch(ticket)
    owner.release(ticket)
    array.buffer[:] = bytes(3 * MIB)
    fetched.check()
    assert bytes(fetched.arrays[0].buffer) == expected
    assert reader.counts().bytes_received == {"nixl": 3 * MIB}
    assert reader.counts().segments == 1
    fetched.close()
    del fetched
    await until(lambda: not reader.counts().segments)


async def test_scattered_blocks_move_in_one_transfer(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = NixlAgent.start_transfer

    def counting(agent: NixlAgent, what: str, here: Any, there: Any, name: str) -> Any:
        started.append(len(here))
        return start(agent, what, here, there, name)

    monkeypatch.setattr(NixlAgent, "start_transfer", counting)
    whole = filled(owner, "uint8", (8 * MIB,))
    places = random.Random(1).sample(range(0, 8 * MIB, 16384), 256)
    blocks = [Array(whole.buffer[at : at + 16000], "uint8", (16000,)) for at in places]
    others = [filled(owner, "float32", (100 + n,), n) for n in range(5)]
    async with owner.offer([*blocks, *others]) as ticket:
        assert await read(reader, ticket) == [data for _, _, data in contents([*blocks, *others])]
    pages = [6] if nixl(reader)._method == "read" else []
    assert started == [261, *pages]


async def test_reused_memory_is_not_read_as_the_old_tensors(
    owner: TransferClient, reader: TransferClient
) -> None:
    """A stale descriptor reads new contents, and NIXL reports success.

    Off: ``ReadOperation._verify`` succeeds without looking; ``_send`` takes any open ticket for the
    one that was asked for, and ``_answer`` does not look again.
    """
    old = await owner.publish([filled(owner, "uint8", (MIB,))])
    assert await read(reader, old) == [random.Random(0).randbytes(MIB)]
    owner.release(old)
    await until(lambda: not owner.counts().segments)  # the sender may still have to let go of it
    async with owner.offer([filled(owner, "uint8", (MIB,), 1)]) as new:
        places = [unpack_address(ticket.address).places for ticket in (old, new)]
        assert places[0] == places[1]
        with pytest.raises(TicketLost):
            await reader.fetch(old)
        assert await read(reader, new) == [random.Random(1).randbytes(MIB)]


@READ
async def test_generation_struck_out_during_a_read(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``_verify`` looks at the identity alone."""
    ticket = await owner.publish([filled(owner, "uint8", (MIB,))])
    stop = Stop(monkeypatch, ReadOperation, "_start_pages")
    fetching = asyncio.create_task(reader.fetch(ticket))
    await stop.wait()
    owner.release(ticket)
    async with owner.offer([filled(owner, "uint8", (MIB,), 1)]):
        stop.go_on.set()
        with pytest.raises(TicketLost):
            await fetching


@WRITE
async def test_generation_struck_out_during_a_write(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``_answer`` does not look again. The memory stays until the write is over: off, when
    ``SendOperation`` does not keep it, its segment comes back at once."""
    ticket = await owner.publish([filled(owner, "uint8", (MIB,))])
    stop = Stop(monkeypatch, SendOperation, "_answer")
    fetching = asyncio.create_task(reader.fetch(ticket))
    await stop.wait()
    owner.release(ticket)
    assert (owner.counts().tickets, owner.counts().segments) == (0, 1)
    stop.go_on.set()
    with pytest.raises(TicketLost):
        await fetching
    await until(lambda: not owner.counts().segments)


@WRITE
async def test_bytes_damaged_on_their_way_are_dropped(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``ReceiveOperation.finish`` does not compare checksums."""
    real = ReceiveOperation.finish

    def damaging(operation: ReceiveOperation, moved: Any) -> None:
        operation._buffer.views()[0][12345] ^= 1
        real(operation, moved)

    async with owner.offer([filled(owner, "uint8", (MIB,))]) as ticket:
        with monkeypatch.context() as patch:
            patch.setattr(ReceiveOperation, "finish", damaging)
            with pytest.raises(TicketLost, match="damaged"):
                await reader.fetch(ticket)
        assert await read(reader, ticket) == [random.Random(0).randbytes(MIB)]


FORGERIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "an address elsewhere": lambda a: {"places": ((a.places[0][0] + (1 << 30), *a.places[0][1:]),)},
    "another agent": lambda a: {"agent": "worker-9"},
    "no metadata": lambda a: {"metadata": b""},
    "garbage for metadata": lambda a: {"metadata": b"garbage" * 50},
    "no memory": lambda a: {"places": ()},
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_a_forged_address_fails_its_own_transfer_alone(
    owner: TransferClient, reader: TransferClient, how: str
) -> None:
    async with owner.offer([filled(owner, "uint8", (1000,))]) as ticket:
        address = unpack_address(ticket.address)
        forged = msgspec.structs.replace(address, **FORGERIES[how](address))
        lie = msgspec.structs.replace(ticket, address=pack_address(forged))
        if nixl(reader)._method == "write" and how == "an address elsewhere":
            assert await read(reader, lie) == [random.Random(0).randbytes(1000)]  # owners know
        else:
            with pytest.raises(TicketLost):
                await reader.fetch(lie)
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]


@WRITE
async def test_a_reader_without_a_ticket_gets_no_bytes(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation can be guessed, a nonce cannot. Off: ``_send`` does not compare it. And what
    lies beside a ticket's parts is not sent. Off: ``SendOperation.start`` looks at no lower bound
    (the upper one is NIXL's too)."""
    async with owner.offer([filled(owner, "uint8", (1000,))]) as ticket:
        encode = nixl_transfers.encode_message

        def forging(**changes: Any) -> Callable[[Any], bytes]:
            def forge(said: Any) -> bytes:
                wanted = isinstance(said, nixl_transfers.WriteRequest)
                return encode(msgspec.structs.replace(said, **changes) if wanted else said)

            return forge

        for changes in (
            {"key": bytes(16)},
            {"serial": ticket.serial + 1},
            {"ranges": (nixl_transfers.ByteRange(0, 65536, 1000),)},
            {"ranges": (nixl_transfers.ByteRange(0, -4096, 1000),)},
            {"ranges": (nixl_transfers.ByteRange(1, 0, 1000),)},
            {"ranges": (nixl_transfers.ByteRange(-1, 0, 1000),)},
        ):
            with monkeypatch.context() as patch:
                patch.setattr(nixl_transfers, "encode_message", forging(**changes))
                with pytest.raises(TicketLost):
                    await reader.fetch(ticket)
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]


@WRITE
async def test_malformed_notifications_are_ignored(
    owner: TransferClient, reader: TransferClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Off: ``on_message`` catches no RecursionError."""
    nested = b"\x93\x04\xc4\x00" + b"\x91" * 20_000  # a refusal, and lists in lists behind it
    async with owner.offer([filled(owner, "uint8", (1000,))]) as ticket:
        await reader.fetch(ticket)
        agent = nixl(reader)._agent
        assert agent is not None
        for words in (
            b"",
            b"\xff" * 100,
            b"cos\nsystem\n(S'true'\ntR.",
            os.urandom(20_000),
            nested,
        ):
            agent.submit(agent.notify, unpack_address(ticket.address).agent, words).result(30)
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]
    assert "unrecognized NIXL message" in caplog.text
    assert "dropped a NIXL message" not in caplog.text


@WRITE
async def test_no_word_ends_the_thread(
    owner: TransferClient,
    reader: TransferClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However handling it fails. Off: ``_handle`` catches nothing."""
    async with owner.offer([filled(owner, "uint8", (1000,))]) as ticket:
        await read(reader, ticket)
        agent, hearer = nixl(reader)._agent, nixl(owner)._agent
        assert agent is not None
        assert hearer is not None
        with monkeypatch.context() as patch:
            patch.setattr(hearer, "on_message", failing(LookupError()))
            agent.submit(agent.notify, hearer.name, b"a word").result(30)
            await until(lambda: "dropped" in caplog.text)
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]


@pytest.mark.usefixtures("tcp")
async def test_f4_owner_killed_in_the_middle(reader: TransferClient, way: str) -> None:
    """What has arrived of it is never seen. Off: ``ReceiveOperation.give_up`` succeeds."""
    async with started(way) as peer:
        data = random.Random(3).randbytes(32 * MIB)
        ticket = await peer.publish(data)
        assert await read(reader, ticket) == [data]
        await peer.ask("stall_sending")
        fetching = asyncio.create_task(read(reader, ticket))
        if nixl(reader)._method == "write":
            await peer.ask("wait_for_stall")
        else:
            await until(lambda: nixl(reader).operations == 1 or fetching.done())
        await peer.kill()
        try:
            assert await fetching == [data]
            assert nixl(reader)._method == "read", "a READ can have been over before the kill"
        except TicketLost:
            pass
    async with started(way) as peer:
        assert await read(reader, await peer.publish(data)) == [data]


@WRITE
@pytest.mark.usefixtures("tcp")
async def test_f4_reader_killed_in_the_middle(owner: TransferClient, way: str) -> None:
    """Nothing of ours stays with it. Off: ``SendOperation.step`` goes on after an error."""
    ticket = await owner.publish([filled(owner, "uint8", (32 * MIB,))])
    async with started(way) as peer:
        await peer.read(ticket)
        await peer.ask("stall_receiving")
        await peer.ask("fetch_in_background", ticket=ticket)
        await peer.ask("wait_for_stall")
        await until(lambda: nixl(owner).operations == 1)
        await peer.kill()
    await until(lambda: not nixl(owner).operations)
    owner.release(ticket)
    await until(lambda: not owner.counts().segments)
    async with owner.offer([filled(owner, "uint8", (MIB,), 1)]) as ticket, started(way) as peer:
        assert (await peer.read(ticket))[0][2] == random.Random(1).randbytes(MIB)


@WRITE
@pytest.mark.usefixtures("tcp")
async def test_scratch_memory_stays_while_its_owner_may_write(
    reader: TransferClient, way: str
) -> None:
    """A fetch that was cancelled gives its memory back when the write is over, and not before.

    Off: ``ReceiveOperation.step`` ends when no fetch waits any more.
    """
    async with started(way) as peer:
        ticket = await peer.publish(b"s" * 8 * MIB)
        await peer.ask("stall_sending")
        fetching = asyncio.create_task(reader.fetch(ticket))
        await peer.ask("wait_for_stall")
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await asyncio.sleep(0.7)  # long enough to have asked again
        assert reader.counts().segments == nixl(reader).operations == 1
        await peer.ask("go_on")
        await until(lambda: not nixl(reader).operations)
        assert reader.counts().segments == 0


@WRITE
async def test_a_stopped_owner_is_not_waited_for(
    reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own deadline: NIXL has none. Off: ``_deadline`` is in an hour."""
    async with started("nixl-write") as peer:
        ticket = await peer.publish(b"s" * 1000)
        await read(reader, ticket)
        await peer.ask("stall_sending")
        monkeypatch.setattr(nixl_transfers, "TRANSFER_SECONDS", 0.5)
        with pytest.raises(TicketLost, match="in time"):
            await reader.fetch(ticket)
        await peer.ask("go_on")
        await until(lambda: not nixl(reader).operations)


@WRITE
async def test_an_expired_ticket_is_refused_by_its_owner_too(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader elsewhere has another clock. Off: ``find_ticket`` looks at no clock."""
    ticket = await owner.publish([filled(owner, "uint8", (100,))], lifetime=3600)
    await read(reader, ticket)
    grant = nixl(owner)._shm._tickets[ticket.serial]
    grant.expires = 0.0  # and the owner's loop has not come round to it
    with pytest.raises(TicketLost):
        await reader.fetch(ticket)


async def test_restarted_under_the_same_name(reader: TransferClient, way: str) -> None:
    """Agents get new names. Off: the agent's name is owner and epoch alone."""
    tickets = []
    for turn in range(2):
        async with started(way, "worker-7") as peer:
            tickets.append(await peer.publish(bytes([turn]) * 1000))
            assert await read(reader, tickets[-1]) == [bytes([turn]) * 1000]
            for old in tickets[:-1]:
                with pytest.raises(TicketLost):
                    await reader.fetch(old)
                assert await read(reader, tickets[-1]) == [bytes([turn]) * 1000]
            await peer.kill()


async def test_hundreds_of_transfers_leave_nothing(
    owner: TransferClient, reader: TransferClient
) -> None:
    """Tickets, segments, descriptors, registered memory. 10,000 are in tests/cluster."""

    async def cycle(seed: int) -> None:
        size = seed % 7 * 30_000
        arrays = [filled(owner, "uint8", (size,), seed), plain(b"x" * (seed % 1000))]
        async with owner.offer(arrays) as ticket:
            assert await read(reader, ticket) == [data for _, _, data in contents(arrays)]

    for seed in range(50):
        await cycle(seed)
    base, regions = descriptors(), nixl(owner).regions + nixl(reader).regions
    for seed in range(150):
        await asyncio.gather(*(cycle(seed + n) for n in range(2)))
    for transfers in (owner, reader):
        await until(lambda transfers=transfers: not transfers.counts().segments)  # type: ignore[misc]
        assert transfers.counts().tickets == nixl(transfers).operations == 0
    # A second segment of each size at most: two went at once.
    assert nixl(owner).regions + nixl(reader).regions <= 2 * regions
    assert descriptors() - base <= regions


async def test_registered_memory_goes_with_its_segment(
    owner: TransferClient, reader: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: the pool's ``clean`` reports nothing."""
    monkeypatch.setattr("triptych.transfer.shm.IDLE_SECONDS", 0.1)
    async with owner.offer([filled(owner, "uint8", (MIB,))]) as ticket:
        await read(reader, ticket)
        assert nixl(owner).regions == nixl(reader).regions == 1
    await until(lambda: nixl(owner).regions == nixl(reader).regions == 0)
    async with owner.offer([filled(owner, "uint8", (2 * MIB,), 1)]) as ticket:
        assert await read(reader, ticket) == [random.Random(1).randbytes(2 * MIB)]


@WRITE
async def test_nothing_listens_elsewhere(owner: TransferClient) -> None:
    """Off: UCX_NET_DEVICES is not set (where the machine has another interface)."""
    async with owner.offer([plain(b"warm")]):
        found = listening()
        assert found, "not even UCX's own"
        assert {address.partition(":")[0] for address in found} == {"0100007F"}


def test_auto_on_one_host_loads_no_nixl() -> None:
    code = """
import asyncio, sys
from triptych.transfer.client import TransferClient
async def main():
    transfers = TransferClient("auto", "worker-1", 1)
    async with transfers.offer([transfers.empty("uint8", (10,))]) as ticket:
        async with transfers.borrow(ticket):
            print(ticket.transport, [m for m in ("nixl_cu13", "numpy") if m in sys.modules])
    await transfers.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "shm []"


async def test_auto_publishes_by_the_transport_that_is_asked_for() -> None:
    transfers = TransferClient("auto", "worker-1", 1)
    other = TransferClient("auto", "worker-2", 1)
    array = filled(transfers, "uint8", (1000,))
    assert transfers.transport == "auto"
    for by, used, received in (
        ("", "shm", "shm"),
        ("nixl", "nixl", "shm"),  # on one host it is read in place all the same
        ("inline", "inline", "inline"),
        ("pigeon", "shm", "shm"),
    ):
        async with transfers.offer([array], by=by) as ticket:
            assert (ticket.transport, transfers.transport) == (used, used)
            before = other.counts().bytes_received.get(received, 0)
            assert await read(other, ticket) == [bytes(array.buffer)]
            assert other.counts().bytes_received[received] == before + 1000
    fixed = TransferClient("shm", "worker-3", 1)
    async with fixed.offer([plain(b"x")], by="inline") as ticket:
        assert ticket.transport == "shm"
    for one in (transfers, other, fixed):
        await one.close()


@WRITE
async def test_another_host_has_it_moved(
    owner: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself: the reader's identity is another's. Off: ``fetch`` compares no hosts."""
    reader = TransferClient("auto", "reader", 1)
    async with owner.offer([filled(owner, "uint8", (1000,))]) as ticket:
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]
        monkeypatch.setattr("triptych.transfer.nixl.memory_domain", lambda: "elsewhere")
        assert await read(reader, ticket) == [random.Random(0).randbytes(1000)]
    assert reader.counts().bytes_received == {"shm": 1000, "nixl": 1000}
    await reader.close()


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "is_installed", lambda name: name != "nixl-cu13")
    assert readable_transports() == ("shm", "inline")
    with pytest.raises(InvalidConfig, match=r"'\.\[nixl\]'"):
        TransferClient("nixl", "worker-1", 1)


@pytest.mark.parametrize("error", [ImportError("libucp.so"), RuntimeError("no backend")])
async def test_nixl_that_does_not_work_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Off: ``check_transports`` gives what is installed."""
    auto, fixed = TransferClient("auto", "worker-1", 1), TransferClient("nixl", "worker-2", 1)
    with monkeypatch.context() as patch:
        patch.setattr(agent_module, "_make_agent", failing(error))
        assert await auto.check_transports(other_hosts=True) == ("shm", "inline")
        assert str(error) in caplog.text
        with pytest.raises(InvalidConfig, match=str(error)):
            await fixed.check_transports(other_hosts=True)
    for one in (auto, fixed):
        assert await one.check_transports(other_hosts=True) == readable_transports()
    await auto.close()
    await fixed.close()


def test_the_checksum_sees_what_can_go_wrong() -> None:
    data = bytearray(random.Random(1).randbytes(100_001))
    good = checksum([memoryview(data)])
    for at in (0, 4095, 50_000, 99_999, 100_000):
        data[at] ^= 1
        assert checksum([memoryview(data)]) != good
        data[at] ^= 1
    pages = [data[:4096], data[4096:8192]]
    swapped = bytearray(pages[1] + pages[0] + data[8192:])
    missing = bytearray(data[:40960] + bytes(4096) + data[45056:])
    for wrong in (swapped, missing, data[:-1]):
        assert checksum([memoryview(wrong)]) != good
    assert checksum([memoryview(data)[:50_000], memoryview(data)[50_000:]]) != 0
    assert checksum([memoryview(data)]) == good


def test_interfaces_are_found_by_address() -> None:
    assert agent_module.interface_of("127.0.0.1") == agent_module.interface_of("localhost") == "lo"
    assert agent_module.interface_of("0.0.0.0") is None
    with pytest.raises(InvalidConfig, match="no interface"):
        agent_module.interface_of("203.0.113.77")
    assert memory_domain() == memory_domain()


@WRITE
async def test_a_call_during_close_is_refused_and_delays_nothing(
    owner: TransferClient,
) -> None:
    """Off: ``NixlAgent.submit`` refuses as soon as the end is asked for, and takes that for a
    command. Nor does what was given up: off, ``_refuse_all`` skips it."""
    async with owner.offer([plain(b"warm")]):
        agent = nixl(owner)._agent
        assert agent is not None
        begun, standing = threading.Event(), threading.Event()
        agent.submit(begun.set)
        agent.submit(standing.wait, 30)
        await until(lambda: begun.is_set() and agent._commands.empty())
        closing = asyncio.create_task(asyncio.to_thread(agent.close))
        await until(lambda: not agent._commands.empty())
        late, given_up = agent.submit(lambda: "late"), agent.submit(lambda: "given up")
        assert given_up.cancel()
        standing.set()
        await closing
        with pytest.raises(TicketLost):
            late.result(0)
        with pytest.raises(TicketLost):
            agent.submit(lambda: "later").result(0)
