"""Single flight: who asks for the same thing at the same time waits for the one who asked first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

from triptych.errors import TriptychError, rebuild_error

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class SingleFlight(Generic[T]):
    """Work under way, by what it is for. It ends early only when nobody waits for it any more."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}
        self.joined = 0  # how many found their work under way

    def __len__(self) -> int:
        return len(self._flights)

    async def join(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """What ``make`` gives, made once for all who ask while it is being made.

        A failure is everyone's, each with an error of their own.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_run(make)))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
            self._flights[key] = flight
        else:
            self.joined += 1
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except TriptychError as error:
            raise rebuild_error(error.failure()) from error
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight.task)  # whoever asks from now on starts anew
                flight.task.cancel()
            del flight  # an error knows this frame: it must not find itself here

    async def close(self) -> None:
        """End what is under way. Who waits for it is cancelled too."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: Hashable, task: asyncio.Task[T]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # those who waited have seen it; if none are left, nobody needs to

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]


async def _run(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """``limit`` bounds the bytes of all, ``most`` how many there are.

    What has more than ``largest`` bytes is not kept: it would cost too many others their place.
    """

    def __init__(self, limit: int, *, largest: int | None = None, most: int | None = None) -> None:
        self._limit = limit
        self._largest = limit if largest is None else min(largest, limit)
        self._most = most
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with its bytes
        self.bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def values(self) -> Iterable[V]:
        return (value for value, _ in self._kept.values())

    def find(self, key: K) -> V | None:
        """It is used hereby."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, key: K, value: V, size: int) -> list[V]:
        """Keep it, unless it is too large or something is there already. Gives what had to go."""
        if not 0 < size <= self._largest or key in self._kept:
            return []
        self._kept[key] = value, size
        self.bytes += size
        gone: list[V] = []
        while self.bytes > self._limit or (self._most is not None and len(self) > self._most):
            gone.append(self._take(next(iter(self._kept))))
        self.evictions += len(gone)
        return gone

    def drop(self, key: K) -> None:
        if key in self._kept:
            self._take(key)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0

    def _take(self, key: K) -> V:
        value, size = self._kept.pop(key)
        self.bytes -= size
        return value
