"""What a hand-over between two processes costs, beside a plain copy of the same bytes.

    python benchmarks/transfer.py [--repeat 50]

Prints JSON, times in microseconds (medians). ``publish`` is empty + publish + release at the owner,
``fetch`` is fetch + check + close at the reader in another process, both with a warm pool;
``hand_over`` is their sum, without the message that carries the ticket. ``first`` is the same with
new segments and no maps. ``copied`` publishes memory that is not the pool's; ``memcpy`` is what
copying these bytes costs in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from typing import Any

import msgspec

from triptych.messages import Ticket
from triptych.transfer.base import Array
from triptych.transfer.exchange import Exchange

MB = 1 << 20


async def _read() -> None:
    """The reader's process: a ticket a line in, microseconds a line out."""
    exchange = Exchange("shm", "reader", 1)
    while line := sys.stdin.readline():
        ticket = msgspec.msgpack.decode(bytes.fromhex(line), type=Ticket)
        start = time.perf_counter()
        async with exchange.borrow(ticket) as fetched:
            fetched.check()
        print((time.perf_counter() - start) * 1e6, flush=True)
        await asyncio.sleep(0)
    await exchange.close()


class Reader:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Reader:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--reader", stdin=pipe, stdout=pipe
            )
        )

    async def fetch(self, ticket: Ticket) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.msgpack.encode(ticket).hex().encode() + b"\n")
        return float(await self._process.stdout.readline())

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def _hand_over(exchange: Exchange, reader: Reader, size: int) -> tuple[float, float]:
    start = time.perf_counter()
    array = exchange.empty("uint8", (size,))
    ticket = await exchange.publish([array])
    spent = time.perf_counter() - start
    del array
    fetch = await reader.fetch(ticket)
    start = time.perf_counter()
    exchange.release(ticket)
    return (spent + time.perf_counter() - start) * 1e6, fetch


async def _copied(exchange: Exchange, source: bytearray) -> float:
    start = time.perf_counter()
    async with exchange.offer([Array(memoryview(source), "uint8", (len(source),))]):
        return (time.perf_counter() - start) * 1e6


def _memcpy(source: bytearray, target: bytearray) -> float:
    start = time.perf_counter()
    memoryview(target)[:] = source
    return (time.perf_counter() - start) * 1e6


async def _measure(size: int, repeat: int) -> dict[str, Any]:
    exchange, reader = Exchange("shm", "owner", 1), await Reader.start()
    await _hand_over(exchange, reader, 1)
    first = await _hand_over(exchange, reader, size)
    warm = [await _hand_over(exchange, reader, size) for _ in range(repeat)]
    await reader.stop()
    few = max(3, min(repeat, 1024 * MB // size))
    source, target = bytearray(os.urandom(MB) * (size // MB)), bytearray(size)
    copied = statistics.median([await _copied(exchange, source) for _ in range(few)])
    memcpy = statistics.median(_memcpy(source, target) for _ in range(few))
    await exchange.close()
    publish, fetch = (statistics.median(column) for column in zip(*warm, strict=True))
    return {
        "mb": size // MB,
        "publish": round(publish, 1),
        "fetch": round(fetch, 1),
        "hand_over": round(publish + fetch, 1),
        "first": round(sum(first), 1),
        "copied": round(copied, 1),
        "memcpy": round(memcpy, 1),
        "hand_over_to_memcpy": round((publish + fetch) / memcpy, 4),
        "memcpy_to_copied": round(memcpy / copied, 2),
    }


async def _main(repeat: int) -> None:
    sizes = [await _measure(mb * MB, repeat) for mb in (1, 16, 256)]
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "repeat": repeat}
    print(msgspec.json.format(msgspec.json.encode({"machine": about, "sizes": sizes})).decode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(_read() if options.reader else _main(options.repeat))
