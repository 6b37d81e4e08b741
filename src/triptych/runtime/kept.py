"""What is kept for re-use, bounded in bytes: the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
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
