"""Compute once: an LRU cache bounded in bytes, and single flight for concurrent calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

from triptych.errors import TriptychError, rebuild_error

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Evicts the least recently used entries while it holds more than ``limit`` bytes in all, or
    more than ``most`` entries. Does not store an entry of more than ``largest`` bytes: it would
    evict too many others.
    """

    def __init__(self, limit: int, *, largest: int | None = None, most: int | None = None) -> None:
        self._limit = limit
        self._largest = limit if largest is None else min(largest, limit)
        self._most = most
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # value and its bytes
        self.bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def values(self) -> Iterable[V]:
        return (value for value, _ in self._entries.values())

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used one."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> list[V]:
        """Store the value unless it is too large or the key exists. Returns the evicted values."""
        if not 0 < size <= self._largest or key in self._entries:
            return []
        self._entries[key] = value, size
        self.bytes += size
        evicted: list[V] = []
        while self.bytes > self._limit or (self._most is not None and len(self) > self._most):
            evicted.append(self._pop(next(iter(self._entries))))
        self.evictions += len(evicted)
        return evicted

    def remove(self, key: K) -> None:
        if key in self._entries:
            self._pop(key)

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def _pop(self, key: K) -> V:
        value, size = self._entries.pop(key)
        self.bytes -= size
        return value


class _Flight(Generic[V]):
    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[V]):
    """Runs one computation per key at a time: concurrent callers wait for the same result. A
    computation is cancelled only when its last caller has left."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[V]] = {}
        self.joined = 0  # callers who found their computation running

    def __len__(self) -> int:
        return len(self._flights)

    async def join(self, key: Hashable, compute: Callable[[], Awaitable[V]]) -> V:
        """The result of ``compute``, or of the one that runs for this key already.

        When it fails, every caller gets an error object of its own.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_run(compute)))
            flight.task.add_done_callback(lambda task: self._finish(key, task))
            self._flights[key] = flight
        else:
            self.joined += 1
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except TriptychError as error:
            raise rebuild_error(error.failure()) from error
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._forget(key, flight.task)  # the next caller starts a new computation
                flight.task.cancel()
            del flight  # the error's traceback refers to this frame: avoid a reference cycle

    async def close(self) -> None:
        """Cancel all computations, and with them their callers."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, key: Hashable, task: asyncio.Task[V]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the callers, if any are left, got it

    def _forget(self, key: Hashable, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]


async def _run(compute: Callable[[], Awaitable[V]]) -> V:
    return await compute()
