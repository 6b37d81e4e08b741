"""What tensors cost on their way between two processes, by each transport.

``hand_over`` is empty, publish and release at the owner and fetch, check and close at the reader,
by shared memory with a warm pool, without the message that carries the ticket. ``READ`` is NIXL's
transfer alone, in the agent's thread; ``fetch`` is all that the reader waits for, with the pages
that vouch for the bytes. Both stand beside what copying the same bytes costs the same reader, from
the owner's memory that it has mapped into its own, in pages of 4 KiB and, where the machine gives
them to shared memory, in huge ones. On one host NIXL reads every block by a system call, which 512
bare ones beside one stand for. Tickets are taken in turns, so that no cache holds them. Over TCP
both processes are on this host and share its cores: read it for who should
move, not for how fast a network is. ``inline`` has no process between publish and fetch.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.record import Figure
from triptych.messages import Ticket
from triptych.transfer import segment
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient
from triptych.transfer.nixl import NixlTransport, unpack_address
from triptych.transfer.segment import PAGE
from triptych.transfer.shm import ShmAddress

KIB, MIB = 1 << 10, 1 << 20
HANDED = (64 * KIB, 16 * MIB, 256 * MIB)
MOVED = (1 * MIB, 16 * MIB, 64 * MIB)
BLOCKS, BLOCK = 512, 64 * KIB
SCATTERED = {"one": [BLOCKS * BLOCK], "scattered": [BLOCK] * BLOCKS}
_libc = ctypes.CDLL(None)
_BLOCKS = "512 blocks of 64 KiB / one of 32 MiB"
TURNS = 4  # tickets of one size: with their copies, more than caches hold


class _Spot(ctypes.Structure):
    """As the kernel has it: struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    details = asyncio.run(_measure(3 if quick else 15))
    return _figures(details), details


def _figures(details: dict[str, Any]) -> list[Figure]:
    figures = [
        Figure(f"shared memory, hand-over of {_size(size)}", found["hand_over"], "us", 100.0)
        for size, found in details["shm"].items()
    ]
    for pages, moved in details["one host"].items():
        figures += _on_one_host(pages, moved)
    for size, found in details["tcp"].items():
        detail = ", ".join(f"{way} {size / found[way] / 1e3:.2f} GB/s" for way in found)
        name = f"NIXL over TCP, {_size(size)}: READ / WRITE"
        figures.append(Figure(name, found["read"] / found["write"], "", detail=detail))
    ratio = _ratio(details["tcp blocks"], "write")
    figures.append(Figure(f"NIXL over TCP, WRITE: {_BLOCKS}", ratio, "", 1.15))
    for size, found in details["inline"].items():
        figures.append(Figure(f"inline, {_size(size)}", found, "us"))
    return figures


def _on_one_host(pages: str, moved: dict[str, Any]) -> list[Figure]:
    figures = []
    for size, found in moved["whole"].items():
        aim = 0.7 if size == 16 * MIB else None
        ratio, whole = (found["memcpy"] / found[what] for what in ("READ", "fetch"))
        detail = f"memcpy {size / found['memcpy'] / 1e3:.1f} GB/s; the whole fetch: {whole:.2f}"
        name = f"NIXL on one host, {pages}, {_size(size)}: memcpy / READ"
        figures.append(Figure(name, ratio, "", aim, at_least=True, detail=detail))
    detail = (
        f"bare system calls {moved['calls']:.2f}, memcpy {_ratio(moved['blocks'], 'memcpy'):.2f}"
    )
    name = f"NIXL on one host, {pages}, READ: {_BLOCKS}"
    return [*figures, Figure(name, _ratio(moved["blocks"], "READ"), "", 1.15, detail=detail)]


def _ratio(blocks: dict[str, dict[str, float]], what: str) -> float:
    return blocks["scattered"][what] / blocks["one"][what]


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


async def _measure(repeat: int) -> dict[str, Any]:
    details: dict[str, Any] = {}
    async with _Reader("auto") as reader:
        owner = TransferClient("shm", "owner", 1)
        details["shm"] = {s: await _handed(owner, reader, s, 10 * repeat) for s in HANDED}
        await owner.close()
    huge = segment.huge_pages()
    details["one host"] = {"4 KiB pages": await _on_this_host(repeat, "small")}
    if huge:
        details["one host"]["huge pages"] = await _on_this_host(repeat, "huge")
    os.environ["UCX_TLS"] = "tcp"
    async with _Reader("nixl") as reader:
        owner = TransferClient("nixl", "owner", 1)
        details["tcp"] = {s: await _by_tcp(owner, reader, [s], repeat) for s in MOVED}
        details["tcp blocks"] = {
            name: await _by_tcp(owner, reader, sizes, repeat) for name, sizes in SCATTERED.items()
        }
        await owner.close()
    del os.environ["UCX_TLS"]
    details["inline"] = {s: await _inline(s, repeat) for s in (1 * MIB, 16 * MIB)}
    return details


async def _on_this_host(repeat: int, pages: str) -> dict[str, Any]:
    _use(pages)
    async with _Reader("nixl", pages) as reader:
        owner = TransferClient("nixl", "owner", 1)
        whole = await _moved(owner, reader, {size: [size] for size in MOVED}, repeat)
        blocks = await _moved(owner, reader, SCATTERED, repeat)
        await owner.close()
    calls = blocks["scattered"]["each"] / blocks["scattered"]["once"]
    return {"whole": whole, "blocks": blocks, "calls": calls}


def _use(pages: str) -> None:
    segment.huge_pages = lambda: pages == "huge"  # type: ignore[assignment]


async def _handed(
    owner: TransferClient, reader: _Reader, size: int, repeat: int
) -> dict[str, float]:
    here, there = [], []
    for _ in range(repeat + 5):
        start = time.perf_counter()
        array = owner.empty("uint8", (size,))
        ticket = await owner.publish([array])
        spent = time.perf_counter() - start
        del array
        there.append(await reader.ask("hand", ticket))
        start = time.perf_counter()
        owner.release(ticket)
        here.append((spent + time.perf_counter() - start) * 1e6)
    publish, fetch = median(here[5:]), median(there[5:])
    return {"publish": publish, "fetch": fetch, "hand_over": publish + fetch}


async def _moved(
    owner: TransferClient, reader: _Reader, sizes: dict[Any, list[int]], repeat: int
) -> dict[Any, dict[str, float]]:
    """In turns, so that a busy moment is nobody's alone."""
    names = list(sizes) * TURNS
    tickets = [(name, await owner.publish(_blocks(owner, sizes[name]))) for name in names]
    found: dict[Any, list[dict[str, float]]] = {name: [] for name in sizes}
    for _ in range(repeat):
        for name, ticket in tickets:
            found[name].append(await reader.ask("move", ticket))
    for _, ticket in tickets:
        owner.release(ticket)
    return {
        name: {what: median(one[what] for one in rounds[TURNS:]) for what in rounds[0]}
        for name, rounds in found.items()
    }


def _blocks(owner: TransferClient, sizes: list[int]) -> list[Array]:
    """Arrays of these sizes, out of order and apart from each other, in one piece of memory."""
    whole = owner.empty("uint8", (sum(sizes) + 4096 * len(sizes),))
    noise = random.Random(1).randbytes(MIB)
    for start in range(0, whole.buffer.nbytes, MIB):
        piece = whole.buffer[start : start + MIB]
        piece[:] = noise[: piece.nbytes]
    places = [index * (sizes[0] + 4096) for index in range(len(sizes))]
    random.Random(2).shuffle(places)
    return [
        Array(whole.buffer[at : at + size], "uint8", (size,))
        for at, size in zip(places, sizes, strict=True)
    ]


async def _by_tcp(
    owner: TransferClient, reader: _Reader, sizes: list[int], repeat: int
) -> dict[str, float]:
    ticket = await owner.publish(_blocks(owner, sizes))
    found: dict[str, list[float]] = {"read": [], "write": []}
    for _ in range(repeat + 1):
        for way, times in found.items():
            times.append(await reader.ask(way, ticket))
    owner.release(ticket)
    return {way: median(times[1:]) for way, times in found.items()}


async def _inline(size: int, repeat: int) -> float:
    transfers, times = TransferClient("inline", "owner", 1), []
    array = _blocks(transfers, [size])
    for _ in range(repeat):
        start = time.perf_counter()
        packed = msgspec.msgpack.encode(await transfers.publish(array))
        async with transfers.borrow(msgspec.msgpack.decode(packed, type=Ticket)):
            times.append((time.perf_counter() - start) * 1e6)
    return median(times)


class _Reader:
    """Another process that takes a ticket and says how long it took, in microseconds."""

    def __init__(self, transport: str, pages: str = "small") -> None:
        self._words = transport, pages

    async def __aenter__(self) -> _Reader:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.transfer", *self._words,
            stdin=pipe, stdout=pipe, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def ask(self, do: str, ticket: Ticket) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = f"{do} {msgspec.msgpack.encode(ticket).hex()}\n"
        self._process.stdin.write(line.encode())
        return msgspec.json.decode(await self._process.stdout.readline())


class _Reading:
    """What the reader does in its own process."""

    def __init__(self, transport: str) -> None:
        self.transfers = TransferClient(transport, "reader", 1)
        self.near = TransferClient("auto", "near", 1)

    async def hand(self, ticket: Ticket) -> float:
        return await _timed(lambda: _fetched(self.transfers, ticket))

    async def read(self, ticket: Ticket) -> float:
        self._nixl._method = "read"
        return await _timed(lambda: _fetched(self.transfers, ticket))

    async def write(self, ticket: Ticket) -> float:
        self._nixl._method = "write"
        return await _timed(lambda: _fetched(self.transfers, ticket))

    async def move(self, ticket: Ticket) -> dict[str, float]:
        fetch = await self.read(ticket)
        target = self.transfers.empty("uint8", (ticket.size,))
        async with self.near.borrow(ticket) as there:
            pairs, at = [], _at(target.buffer)
            for array in there.arrays:
                pairs.append((at, _at(array.buffer), array.buffer.nbytes))
                at += array.buffer.nbytes
            start = time.perf_counter()
            for to, source, size in pairs:
                ctypes.memmove(to, source, size)
            memcpy = (time.perf_counter() - start) * 1e6
        found = {"memcpy": memcpy, "READ": await self._alone(ticket), "fetch": fetch}
        return found | _bare(ticket, _at(target.buffer))

    async def _alone(self, ticket: Ticket) -> float:
        """NIXL's transfer without what is around it."""
        agent = self._nixl._agent
        assert agent is not None
        memory, segment = self._nixl._shm.pool.lend(ticket.size)
        address = unpack_address(ticket.address)
        base, at = address.places[0][0] + PAGE, ctypes.addressof(memory) + PAGE
        there = [(base + part.offset, part.shape[0], 0) for part in ticket.parts]
        here = []
        for _, size, _ in there:
            here.append((at, size, 0))
            at += size

        def move() -> float:
            agent.register(segment)
            start = time.perf_counter()
            transfer = agent.start_transfer("READ", here, there, address.agent)
            while not transfer.done():
                pass
            spent = time.perf_counter() - start
            transfer.release()
            return spent * 1e6

        done: Future[float] = agent.submit(move)
        return await asyncio.wrap_future(done)

    @property
    def _nixl(self) -> NixlTransport:
        transfer = self.transfers.find("nixl")
        assert isinstance(transfer, NixlTransport)
        return transfer


def _bare(ticket: Ticket, target: int) -> dict[str, float]:
    """By the system call that NIXL uses on one host: all parts in a call each, and in one."""
    address = unpack_address(ticket.address)
    pid = msgspec.msgpack.decode(address.shm, type=ShmAddress).pid
    base = address.places[0][0] + PAGE

    def read(spots: list[tuple[int, int]]) -> float:
        calls, at = [], target
        for place, size in spots:
            calls.append(((_Spot * 1)((at, size)), (_Spot * 1)((place, size))))
            at += size
        start = time.perf_counter()
        for here, there in calls:
            _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        return (time.perf_counter() - start) * 1e6

    parts = [(base + part.offset, part.shape[0]) for part in ticket.parts]
    return {"each": read(parts), "once": read([(base, ticket.size)])}


async def _fetched(transfers: TransferClient, ticket: Ticket) -> None:
    async with transfers.borrow(ticket) as fetched:
        fetched.check()


async def _timed(what: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await what()
    return (time.perf_counter() - start) * 1e6


def _at(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def _read(transport: str) -> None:
    reading = _Reading(transport)
    while line := await asyncio.to_thread(sys.stdin.readline):
        do, _, packed = line.partition(" ")
        ticket = msgspec.msgpack.decode(bytes.fromhex(packed), type=Ticket)
        found = await getattr(reading, do)(ticket)
        print(msgspec.json.encode(found).decode(), flush=True)
    await reading.transfers.close()
    await reading.near.close()


if __name__ == "__main__":
    _use(sys.argv[2])
    asyncio.run(_read(sys.argv[1]))
