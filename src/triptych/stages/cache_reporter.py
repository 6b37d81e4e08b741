"""Reports which blocks this worker's prefix cache holds, to frontends that watch it.

An engine names blocks by hashes of its own; the reporter translates them to ``blocks.hash_blocks``,
which frontends compute too. A watcher gets a snapshot first and then every change, one for all that
happened in a turn of the event loop; one that is too slow gets a snapshot again. A block whose
parent is unknown is left out: that costs a cache hit and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from triptych import blocks
from triptych.messages import CacheChange, KvCleared, KvEvent, KvRemoved, KvStored
from triptych.runtime.events import EventPublisher

log = logging.getLogger(__name__)
BLOCKS_PER_TURN = 2048  # hashed in one turn of the event loop: some 5 ms
RECENT = 64  # changes that a watcher may be behind before it gets a snapshot


class CacheWatcher(Protocol):
    """A ``Reply`` to a frontend, or the event plane."""

    def send(self, answer: CacheChange) -> None: ...

    async def ready(self) -> None: ...


class EventPlaneWatcher:
    """All subscribers of the event plane. It is always ready: what it can't send it drops."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.send = publisher.publish

    async def ready(self) -> None:
        return


class CacheReporter:
    """``max_blocks``: that the engine has. Lives on one event loop."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._hashes: dict[int, int] = {}  # by the engine's own hash
        self._copies: Counter[int] = Counter()  # beyond the first, of blocks that it has twice
        self._counts: Counter[int] = Counter()  # by hash: how many of _hashes have it
        self._events: deque[KvEvent] = deque()  # not processed yet
        self._scheduled = False
        self._stored: dict[int, None] = {}  # since the last change; an ordered set
        self._removed: dict[int, None] = {}
        self._cleared = False  # since the last change
        self._sequence = 1  # of the last change; the first is an empty snapshot
        self._recent: deque[CacheChange] = deque(maxlen=RECENT)
        self._changed = asyncio.Event()  # set by the next change; another one each time
        self._closed = False
        self._watchers = 0
        self._sent = 0

    @property
    def counters(self) -> dict[str, float]:
        return {
            "kv_blocks_reported": len(self._counts),
            "kv_changes_sent": self._sent,
            "kv_watchers": self._watchers,
        }

    def receive(self, events: Sequence[KvEvent]) -> None:
        """Take events of the engine, in order. They are processed in the next turn."""
        self._events.extend(events)
        if self._events and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    async def watch(self, watcher: CacheWatcher) -> None:
        """Send a snapshot, then every change, until cancelled or closed."""
        with self._watching():
            sent = 0
            while not self._closed:
                await watcher.ready()
                changed = self._changed
                if sent == self._sequence:
                    await changed.wait()
                    continue
                change = self._after(sent)
                watcher.send(change)
                sent = change.sequence
                self._sent += 1

    def close(self) -> None:
        """End all watches: this worker is about to stop."""
        self._closed = True
        self._changed.set()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def _after(self, sequence: int) -> CacheChange:
        """The next change; a snapshot where it is not kept any more."""
        behind = self._sequence - sequence
        if sequence and behind <= len(self._recent):
            return self._recent[-behind]
        return self.snapshot()

    def snapshot(self) -> CacheChange:
        return CacheChange(self._sequence, tuple(self._counts), snapshot=True)

    def _turn(self) -> None:
        self._scheduled, budget = False, BLOCKS_PER_TURN
        while self._events and budget > 0:
            event = self._events.popleft()
            budget -= 0 if isinstance(event, KvCleared) else len(event.blocks)
            match event:
                case KvStored():
                    self._store(event)
                case KvRemoved():
                    for block in event.blocks:
                        self._remove(block)
                case KvCleared():
                    self._clear()
        self._publish()
        self.receive(())  # the rest in the next turn

    def _store(self, event: KvStored) -> None:
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size:
            return
        hashes = blocks.hash_blocks(parent, event.tokens, self._block_size, event.media)
        for block, block_hash in zip(event.blocks, hashes, strict=False):
            if block in self._hashes:
                self._copies[block] += 1
            else:
                self._hashes[block] = block_hash
                self._add(block_hash)
        if len(self._hashes) > self._max_blocks:
            log.warning(
                "the engine reports more blocks than it has: the reported blocks are dropped"
            )
            self._clear()

    def _parent(self, event: KvStored) -> int | None:
        if event.parent is None:
            return blocks.hash_salt(event.salt)
        return self._hashes.get(event.parent)

    def _remove(self, block: int) -> None:
        if block in self._copies:
            self._copies[block] -= 1
            if not self._copies[block]:
                del self._copies[block]
        elif (block_hash := self._hashes.pop(block, None)) is not None:
            self._discard(block_hash)

    def _add(self, block_hash: int) -> None:
        self._counts[block_hash] += 1
        if self._counts[block_hash] == 1 and self._removed.pop(block_hash, self) is self:
            self._stored[block_hash] = None

    def _discard(self, block_hash: int) -> None:
        self._counts[block_hash] -= 1
        if not self._counts[block_hash]:
            del self._counts[block_hash]
            if self._stored.pop(block_hash, self) is self:
                self._removed[block_hash] = None

    def _clear(self) -> None:
        for known in (self._hashes, self._copies, self._counts, self._stored, self._removed):
            known.clear()
        self._cleared = True

    def _publish(self) -> None:
        """Make one change of what happened since the last one, if anything did."""
        if self._cleared:
            self._recent.clear()  # the snapshot replaces what came before
            change = CacheChange(self._sequence + 1, tuple(self._counts), snapshot=True)
        elif self._stored or self._removed:
            change = CacheChange(self._sequence + 1, tuple(self._stored), tuple(self._removed))
        else:
            return
        self._sequence += 1
        self._recent.append(change)
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        self._changed.set()
        self._changed = asyncio.Event()
