"""What tensors cost on their way between two processes, by each transport.

``hand_over`` is empty, publish and release at the owner and fetch, check and close at the reader,
by shared memory with a warm pool, without the message that carries the ticket. ``READ`` is NIXL's
transfer alone, in the agent's thread; ``fetch`` is all that the reader waits for, with the pages
that vouch for the bytes. Both stand beside what copying the same bytes costs the same reader, from
the owner's memory that it has mapped into its own. Tickets are taken in turns, so that no cache
holds them. Over TCP both processes are on this host and share its cores: read it for who should
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
from triptych.transfer.base import Array
from triptych.transfer.exchange import Exchange
from triptych.transfer.nixl import NixlTransfer, _opened
from triptych.transfer.segment import PAGE

KIB, MIB = 1 << 10, 1 << 20
HANDED = (64 * KIB, 16 * MIB, 256 * MIB)
MOVED = (1 * MIB, 16 * MIB, 64 * MIB)
BLOCKS, BLOCK = 512, 64 * KIB
TURNS = 4  # tickets of one size: with their copies, more than caches hold


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    details = asyncio.run(_measure(3 if quick else 15))
    return _figures(details), details


def _figures(details: dict[str, Any]) -> list[Figure]:
    figures = [
        Figure(f"shared memory, hand-over of {_size(size)}", found["hand_over"], "us", 100.0)
        for size, found in details["shm"].items()
    ]
    for size, found in details["one host"].items():
        aim = 0.7 if size == 16 * MIB else None
        ratio, whole = (found["memcpy"] / found[what] for what in ("READ", "fetch"))
        detail = f"the whole fetch: {whole:.2f}"
        name = f"NIXL on one host, {_size(size)}: memcpy / READ"
        figures.append(Figure(name, ratio, "", aim, at_least=True, detail=detail))
    one, many = (details["blocks"][name]["READ"] for name in ("one", "scattered"))
    figures.append(Figure("512 blocks of 64 KiB / one of 32 MiB", many / one, "", 1.15))
    for size, found in details["tcp"].items():
        detail = ", ".join(f"{way} {size / found[way] / 1e3:.2f} GB/s" for way in found)
        name = f"NIXL over TCP, {_size(size)}: READ / WRITE"
        figures.append(Figure(name, found["read"] / found["write"], "", detail=detail))
    for size, found in details["inline"].items():
        figures.append(Figure(f"inline, {_size(size)}", found, "us"))
    return figures


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


async def _measure(repeat: int) -> dict[str, Any]:
    details: dict[str, Any] = {}
    async with _Reader("auto") as reader:
        owner = Exchange("shm", "owner", 1)
        details["shm"] = {s: await _handed(owner, reader, s, 10 * repeat) for s in HANDED}
        await owner.close()
    async with _Reader("nixl") as reader:
        owner = Exchange("nixl", "owner", 1)
        sizes = {size: [size] for size in MOVED}
        details["one host"] = await _moved(owner, reader, sizes, repeat)
        blocks = {"one": [BLOCKS * BLOCK], "scattered": [BLOCK] * BLOCKS}
        details["blocks"] = await _moved(owner, reader, blocks, repeat)
        await owner.close()
    os.environ["UCX_TLS"] = "tcp"
    async with _Reader("nixl") as reader:
        owner = Exchange("nixl", "owner", 1)
        details["tcp"] = {s: await _by_tcp(owner, reader, s, repeat) for s in MOVED}
        await owner.close()
    del os.environ["UCX_TLS"]
    details["inline"] = {s: await _inline(s, repeat) for s in (1 * MIB, 16 * MIB)}
    return details


async def _handed(owner: Exchange, reader: _Reader, size: int, repeat: int) -> dict[str, float]:
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
    owner: Exchange, reader: _Reader, sizes: dict[Any, list[int]], repeat: int
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


def _blocks(owner: Exchange, sizes: list[int]) -> list[Array]:
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


async def _by_tcp(owner: Exchange, reader: _Reader, size: int, repeat: int) -> dict[str, float]:
    ticket = await owner.publish(_blocks(owner, [size]))
    found: dict[str, list[float]] = {"read": [], "write": []}
    for _ in range(repeat + 1):
        for way, times in found.items():
            times.append(await reader.ask(way, ticket))
    owner.release(ticket)
    return {way: median(times[1:]) for way, times in found.items()}


async def _inline(size: int, repeat: int) -> float:
    exchange, times = Exchange("inline", "owner", 1), []
    array = _blocks(exchange, [size])
    for _ in range(repeat):
        start = time.perf_counter()
        packed = msgspec.msgpack.encode(await exchange.publish(array))
        async with exchange.borrow(msgspec.msgpack.decode(packed, type=Ticket)):
            times.append((time.perf_counter() - start) * 1e6)
    return median(times)


class _Reader:
    """Another process that takes a ticket and says how long it took, in microseconds."""

    def __init__(self, transport: str) -> None:
        self._transport = transport

    async def __aenter__(self) -> _Reader:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.transfer", self._transport,
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
        self.exchange = Exchange(transport, "reader", 1)
        self.near = Exchange("auto", "near", 1)

    async def hand(self, ticket: Ticket) -> float:
        return await _timed(lambda: _fetched(self.exchange, ticket))

    async def read(self, ticket: Ticket) -> float:
        self._nixl._way = "read"
        return await _timed(lambda: _fetched(self.exchange, ticket))

    async def write(self, ticket: Ticket) -> float:
        self._nixl._way = "write"
        return await _timed(lambda: _fetched(self.exchange, ticket))

    async def move(self, ticket: Ticket) -> dict[str, float]:
        fetch = await self.read(ticket)
        target = self.exchange.empty("uint8", (ticket.size,))
        async with self.near.borrow(ticket) as there:
            pairs, at = [], _at(target.buffer)
            for array in there.arrays:
                pairs.append((at, _at(array.buffer), array.buffer.nbytes))
                at += array.buffer.nbytes
            start = time.perf_counter()
            for to, source, size in pairs:
                ctypes.memmove(to, source, size)
            memcpy = (time.perf_counter() - start) * 1e6
        return {"memcpy": memcpy, "READ": await self._alone(ticket), "fetch": fetch}

    async def _alone(self, ticket: Ticket) -> float:
        """NIXL's transfer without what is around it."""
        agent = self._nixl._agent
        assert agent is not None
        memory, segment = self._nixl._shm.pool.lend(ticket.size)
        address = _opened(ticket.address)
        base, at = address.spots[0][0] + PAGE, ctypes.addressof(memory) + PAGE
        there = [(base + part.offset, part.shape[0], 0) for part in ticket.parts]
        here = []
        for _, size, _ in there:
            here.append((at, size, 0))
            at += size

        def move() -> float:
            agent.register(segment)
            start = time.perf_counter()
            transfer = agent.start("READ", here, there, address.agent)
            while not transfer.done():
                pass
            spent = time.perf_counter() - start
            transfer.release()
            return spent * 1e6

        done: Future[float] = agent.do(move)
        return await asyncio.wrap_future(done)

    @property
    def _nixl(self) -> NixlTransfer:
        transfer = self.exchange._transfer("nixl")
        assert isinstance(transfer, NixlTransfer)
        return transfer


async def _fetched(exchange: Exchange, ticket: Ticket) -> None:
    async with exchange.borrow(ticket) as fetched:
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
    await reading.exchange.close()
    await reading.near.close()


if __name__ == "__main__":
    asyncio.run(_read(sys.argv[1]))
