"""Which worker's prefix cache holds which block, for routing alone.

A block that a worker has reported counts until the worker removes it; a block of a prompt that was
only sent to a worker is expected there for a while. Both tables are bounded and drop their oldest
entries: a lost entry costs a cache hit and never a token. ``watch_cache`` keeps the index current
from one worker's reports. Knows blocks by their hashes, and no prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Protocol

from msgspec import Struct

from triptych.errors import Draining, TriptychError, WorkerLost
from triptych.messages import CacheChange, WatchCache, WorkerAnswer, WorkerRequest
from triptych.runtime.connection import Call
from triptych.runtime.events import EventSubscriber

log = logging.getLogger(__name__)
MAX_BLOCKS = 1 << 20  # in a table, of all workers together; some 100 bytes each
EXPIRE_SECONDS = 1.0  # between two searches for expected blocks whose time is over
RETRY_SECONDS = 0.25  # before a snapshot is asked for again


class BlockTable:
    """Blocks by worker, each with the time until which it counts, the newest last.

    One table per worker and not a set of workers per block: a worker that leaves is dropped at
    once, whatever it held, and a lookup ends at its first gap.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.workers: dict[str, dict[int, float]] = {}
        self.size = 0

    def add(self, worker: str, hashes: Iterable[int], until: float) -> None:
        blocks = self.workers.setdefault(worker, {})
        before = len(blocks)
        for block in hashes:
            blocks.pop(block, None)  # reported again: newest again
            blocks[block] = until
        self.size += len(blocks) - before
        while self.size > self._limit:
            # The worker with the most blocks loses its oldest, some more than needed: to find the
            # first key of a dict costs a walk over all that were removed before it.
            fullest = max(self.workers, key=lambda one: len(self.workers[one]))
            count = self.size - self._limit + self._limit // 64
            self.remove(fullest, list(islice(self.workers[fullest], count)))

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        if blocks := self.workers.get(worker):
            before = len(blocks)
            for block in hashes:
                blocks.pop(block, None)
            self.size -= before - len(blocks)

    def drop(self, worker: str) -> None:
        self.size -= len(self.workers.pop(worker, ()))


class CacheProgress(Struct):
    """The last change that was applied of one incarnation of a worker."""

    epoch: int
    sequence: int | None = None  # None: only a snapshot can follow


class KvIndex:
    """``limit``: reported blocks, and as many expected ones. ``clock``: in seconds."""

    def __init__(
        self, limit: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._reported = BlockTable(limit)
        self._expected = BlockTable(limit)  # those that end first stand first
        self._expired = clock()
        self._progress: dict[str, CacheProgress] = {}
        self.changes = 0  # that were applied
        self.changes_missed = 0  # changes that could not be, since one before them is missing

    @property
    def reported(self) -> int:
        """Blocks that workers have reported, each once per worker."""
        return self._reported.size

    @property
    def expected(self) -> int:
        """Blocks that are expected and not reported; the time of some may be over."""
        return self._expected.size

    def receive(self, worker: str, epoch: int, change: CacheChange) -> bool:
        """Apply a change of one incarnation of a worker, over whichever path it came.

        False: a change before it is missing. Changes then count no more until a snapshot, which the
        caller asks for. Changes of an earlier incarnation, late ones and duplicates are ignored.
        """
        last = self._progress.get(worker)
        if last is None or last.epoch < epoch:
            self.drop(worker)
            last = self._progress[worker] = CacheProgress(epoch)
        if last.epoch > epoch or (last.sequence is not None and change.sequence <= last.sequence):
            return True
        empty = not (change.stored or change.removed)
        if not change.snapshot and (
            last.sequence is None or change.sequence != last.sequence + 1 or empty
        ):
            last.sequence = None
            self.changes_missed += 1
            return False
        last.sequence = change.sequence
        self.changes += 1
        self.update(worker, change)
        return True

    def update(self, worker: str, change: CacheChange) -> None:
        """Apply a change without a look at its sequence number."""
        if change.snapshot:
            self._reported.drop(worker)
        self._reported.remove(worker, change.removed)
        self._expected.remove(worker, change.removed)
        self._reported.add(worker, change.stored, 0.0)

    def expect(self, worker: str, hashes: Iterable[int], seconds: float) -> None:
        """Count blocks of a prompt that was sent to a worker as held there for so long.

        ``seconds`` is the same in every call: so what was added first ends first.
        """
        now = self._clock()
        if now > self._expired + EXPIRE_SECONDS:
            self._expired = now
            for other, blocks in self._expected.workers.items():
                ended = takewhile(lambda block: block[1] <= now, blocks.items())
                self._expected.remove(other, [block for block, _ in ended])
        self._expected.add(worker, hashes, now + seconds)

    def drop(self, worker: str) -> None:
        """Forget the blocks of a worker that can't be reached. Its epoch stays known: changes that
        it sent before may still arrive."""
        self._reported.drop(worker)
        self._expected.drop(worker)
        if worker in self._progress:
            self._progress[worker].sequence = None

    def overlap(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many of these blocks each worker holds, from the first on and without a gap."""
        now = self._clock()
        reported, expected = self._reported.workers, self._expected.workers
        counts = {
            worker: _prefix(hashes, reported.get(worker, {}), expected.get(worker, {}), now)
            for worker in {**reported, **expected}
        }
        return {worker: count for worker, count in counts.items() if count}

    def reported_overlap(self, worker: str, hashes: Sequence[int]) -> int:
        """As ``overlap``, of one worker and of its reports alone."""
        return _prefix(hashes, self._reported.workers.get(worker, {}), {}, 0.0)


def _prefix(
    hashes: Sequence[int], reported: dict[int, float], expected: dict[int, float], now: float
) -> int:
    count = 0
    for block in hashes:
        if block not in reported and expected.get(block, now) <= now:
            break
        count += 1
    return count


class WatchedWorker(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def events(self) -> str:
        """Where it publishes cache events; empty: it answers calls only."""

    def call(self, ask: WorkerRequest, on_answer: Callable[[WorkerAnswer], None]) -> Call: ...


async def watch_cache(
    worker: WatchedWorker, index: KvIndex, listener: EventSubscriber | None = None
) -> None:
    """Apply a worker's cache changes to the index until the worker is lost or stops.

    They come in a call, or as events where ``listener`` is given and the worker publishes them.
    After a gap another call begins with a snapshot.
    """
    warned = False
    follow = _call if listener is None or not worker.events else partial(_follow, listener)
    while True:
        try:
            await follow(worker, index)
        except (WorkerLost, Draining):
            return
        except TriptychError as error:  # it may serve requests all the same
            if not warned:
                log.warning("worker %s does not report its cache: %s", worker.name, error)
            warned = True
        await asyncio.sleep(RETRY_SECONDS)


async def _call(worker: WatchedWorker, index: KvIndex, snapshot_only: bool = False) -> None:
    """Read changes in a call until one is missing; ``snapshot_only``: until the first answer."""

    def on_answer(answer: WorkerAnswer) -> None:
        if isinstance(answer, CacheChange):
            applied = index.receive(worker.name, worker.epoch, answer)
            if snapshot_only or not applied:
                call.close()

    call = worker.call(WatchCache(), on_answer)
    try:
        await call.done()
    finally:
        call.close()


async def _follow(listener: EventSubscriber, worker: WatchedWorker, index: KvIndex) -> None:
    """Read changes as events. After a gap, read a snapshot in a call of its own."""
    gap = asyncio.Event()

    def on_event(change: CacheChange) -> None:
        if not index.receive(worker.name, worker.epoch, change):
            gap.set()

    unsubscribe = listener.subscribe(worker.name, worker.epoch, worker.events, on_event)
    try:
        while True:
            await _call(worker, index, snapshot_only=True)
            await asyncio.sleep(RETRY_SECONDS)
            await gap.wait()
            gap.clear()
    finally:
        unsubscribe()
