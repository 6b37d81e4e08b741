"""Who holds which block, by what workers tell and by what was sent to them. For routing alone.

What a worker has told stands until it takes it back; what was only sent to it is expected to be
there for a while. Both are bounded, and the oldest goes first: to forget costs hits and never a
token. Knows blocks by their names, and nothing of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile

from triptych.messages import CacheChange

MOST = 1 << 20  # blocks in a book, of all workers together; some 100 bytes each
EXPIRE_SECONDS = 1.0  # between two looks for what is expected no more


class BlockTable:
    """Blocks by worker, each with the time until which it counts. Those added last stand last.

    A book for each worker and not a set of workers for each block: so a worker that goes is
    forgotten at once, whatever it held, and a lookup ends at its first gap.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.workers: dict[str, dict[int, float]] = {}
        self.size = 0

    def add(self, worker: str, names: Iterable[int], until: float) -> None:
        blocks = self.workers.setdefault(worker, {})
        before = len(blocks)
        for name in names:
            blocks.pop(name, None)  # what is told again is young again
            blocks[name] = until
        self.size += len(blocks) - before
        while self.size > self._most:
            # Whoever has the most gives way, by some more than is needed: to find the oldest of a
            # dict costs a walk over all that were removed before them.
            fullest = max(self.workers, key=lambda one: len(self.workers[one]))
            count = self.size - self._most + self._most // 64
            self.remove(fullest, list(islice(self.workers[fullest], count)))

    def remove(self, worker: str, names: Iterable[int]) -> None:
        if blocks := self.workers.get(worker):
            before = len(blocks)
            for name in names:
                blocks.pop(name, None)
            self.size -= before - len(blocks)

    def drop(self, worker: str) -> None:
        self.size -= len(self.workers.pop(worker, ()))


class KvIndex:
    """``most``: blocks that were told, and as many that are expected. ``clock``: in seconds."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = BlockTable(most)
        self._sent = BlockTable(most)  # those that end first stand first
        self._expired = clock()

    @property
    def told(self) -> int:
        """Blocks that workers have told of, each as often as it is held."""
        return self._told.size

    @property
    def expected(self) -> int:
        """Blocks that were sent and not told of, or not yet; some may count no more."""
        return self._sent.size

    def take(self, worker: str, change: CacheChange) -> None:
        """What a worker tells: what it holds now and no more, or all that there is."""
        if change.snapshot:
            self._told.drop(worker)
        self._told.remove(worker, change.removed)
        self._sent.remove(worker, change.removed)
        self._told.add(worker, change.stored, 0.0)

    def expect(self, worker: str, names: Iterable[int], seconds: float) -> None:
        """These were sent to a worker, which will hold them soon, as a rule. ``seconds`` is the
        same every time: so what was added first ends first."""
        now = self._clock()
        if now > self._expired + EXPIRE_SECONDS:
            self._expired = now
            for other, blocks in self._sent.workers.items():
                ended = takewhile(lambda block: block[1] <= now, blocks.items())
                self._sent.remove(other, [name for name, _ in ended])
        self._sent.add(worker, names, now + seconds)

    def drop(self, worker: str) -> None:
        """It is gone, and what it held."""
        self._told.drop(worker)
        self._sent.drop(worker)

    def overlap(self, names: Sequence[int]) -> dict[str, int]:
        """How many of these blocks, from the first on and without a gap, who holds."""
        now = self._clock()
        told, sent = self._told.workers, self._sent.workers
        counts = {w: _run(names, told.get(w, {}), sent.get(w, {}), now) for w in {**told, **sent}}
        return {worker: count for worker, count in counts.items() if count}

    def certain(self, worker: str, names: Sequence[int]) -> int:
        """As ``overlap``, but of one worker, and of what it has told alone."""
        return _run(names, self._told.workers.get(worker, {}), {}, 0.0)


def _run(names: Sequence[int], told: dict[int, float], sent: dict[int, float], now: float) -> int:
    count = 0
    for name in names:
        if name not in told and sent.get(name, now) <= now:
            break
        count += 1
    return count
