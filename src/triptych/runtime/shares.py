"""So much of something for everybody together, and for each no more than a share of it.

Who finds none left waits in line: those who may have more take turns, and each one's own come in
order. Nobody is refused here, and how long one waits is one's own affair.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Shares:
    """``most`` for all, ``each`` for one; none given: as for all."""

    def __init__(self, most: int, each: int | None = None) -> None:
        self._most = most
        self.each = most if each is None else min(each, most)
        self._had: Counter[Hashable] = Counter()
        self._lines: OrderedDict[Hashable, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        self.taken = 0
        self.peak = 0
        self.waiting = 0

    @asynccontextmanager
    async def lent(self, who: Hashable) -> AsyncIterator[None]:
        """One of them, for as long as the scope is open."""
        await self.take(who)
        try:
            yield
        finally:
            self.give_back(who)

    async def take(self, who: Hashable, size: int = 1) -> None:
        """Wait for so many, which are ``each`` at most. Cancelled, one has none of them."""
        assert size <= self.each, "it would never come"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(who, deque()).append((turn, size))
        self.waiting += 1
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(who, turn, size)
            else:  # it came at the same moment
                self.give_back(who, size)
            raise

    def give_back(self, who: Hashable, size: int = 1) -> None:
        self.taken -= size
        self._had[who] -= size
        if not self._had[who]:
            del self._had[who]
        self._admit()

    def _admit(self) -> None:
        while (who := self._next()) is not None:
            line = self._lines[who]
            turn, size = line.popleft()
            self._lines.move_to_end(who)
            self._forget_empty(who)
            self.waiting -= 1
            self._had[who] += size
            self.taken += size
            self.peak = max(self.peak, self.taken)
            turn.set_result(None)

    def _next(self) -> Hashable | None:
        """Whose turn it is, if it can come now: who has a whole share is passed over."""
        for who, line in self._lines.items():
            while line and line[0][0].cancelled():  # who waited has not noticed yet
                line.popleft()
                self.waiting -= 1
            if line and self._had[who] + line[0][1] <= self.each:
                return who if self.taken + line[0][1] <= self._most else None
        return None

    def _leave(self, who: Hashable, turn: asyncio.Future[None], size: int) -> None:
        line = self._lines.get(who)
        if line is not None and (turn, size) in line:
            line.remove((turn, size))
            self.waiting -= 1
        self._forget_empty(who)
        self._admit()  # what comes after it may be smaller

    def _forget_empty(self, who: Hashable) -> None:
        if who in self._lines and not self._lines[who]:
            del self._lines[who]
