"""Counts KV blocks as a paged engine would. There is no memory behind them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager


class Lease:
    """The KV blocks of one stream."""

    __slots__ = ("arrival", "held")

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        self.held = 0


class Pages:
    """Who finds no free block waits; whoever arrived first is served first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Lease, asyncio.Future[None]]] = []  # a heap

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        lease = Lease(next(self._arrivals))
        try:
            yield lease
        finally:
            self.give_back(lease)
            self.serve()

    async def reserve(self, lease: Lease, blocks: int) -> None:
        """Wait until the lease holds ``blocks``."""
        if not self._waiting and self.grow(lease, blocks):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (lease.arrival, blocks, lease, ready)
        heapq.heappush(self._waiting, entry)
        self.serve()
        try:
            await ready
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def grow(self, lease: Lease, blocks: int) -> bool:
        """Take what is missing to ``blocks``, or nothing at all."""
        if (missing := blocks - lease.held) > self.free:
            return False
        self.free -= missing
        lease.held += missing
        return True

    def give_back(self, lease: Lease) -> None:
        """Return the blocks, but call nobody yet: see ``serve``."""
        self.free += lease.held
        lease.held = 0

    def serve(self) -> None:
        """Give free blocks to those who wait, in order."""
        while self._waiting:
            _, blocks, lease, ready = self._waiting[0]
            if not ready.done():  # done: cancelled, and about to leave
                if not self.grow(lease, blocks):
                    return
                ready.set_result(None)
            heapq.heappop(self._waiting)
