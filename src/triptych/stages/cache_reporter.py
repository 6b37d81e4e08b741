"""What this worker's prefix cache holds, by the names that frontends know blocks by.

An engine tells of blocks by names of its own. Here they get ``blocks.hash_blocks``, and whoever
watches is told: all that is held at first, then what changes, all of a turn of the event loop at
once. Whoever is too slow to follow is told all anew. A block that follows on one that nobody knows
is left out: who knows too little of a cache sends a request elsewhere, and that is all.
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
TURN = 2048  # blocks that are named in one turn of the event loop: some 5 ms
RECENT = 64  # changes that a watcher may be behind before it is told all anew


class CacheWatcher(Protocol):
    """Who watches: a ``Reply``, or everybody over the event plane."""

    def send(self, answer: CacheChange) -> None: ...

    async def ready(self) -> None: ...


class EventPlaneWatcher:
    """Whoever listens on the event plane. It is never too slow: what it can't send it loses."""

    def __init__(self, teller: EventPublisher) -> None:
        self.send = teller.tell

    async def ready(self) -> None:
        return


class CacheReporter:
    """``most``: blocks that the engine has. Lives on one event loop."""

    def __init__(self, block_size: int, most: int) -> None:
        self._block_size = block_size
        self._most = most
        self._name_of: dict[int, int] = {}  # by the engine's own name
        self._copies: Counter[int] = Counter()  # beyond the first, of blocks that it has twice
        self._held: Counter[int] = Counter()  # by name: how many of _name_of have it
        self._events: deque[KvEvent] = deque()  # not yet looked at
        self._scheduled = False
        self._new: dict[int, None] = {}  # held since the last change; an ordered set
        self._gone: dict[int, None] = {}
        self._cleared = False  # since the last change
        self._number = 1  # of the last change; the first is that nothing is held
        self._recent: deque[CacheChange] = deque(maxlen=RECENT)
        self._news = asyncio.Event()  # of the next change; another one each time
        self._closed = False
        self._watchers = 0
        self._sent = 0

    @property
    def counters(self) -> dict[str, float]:
        return {
            "kv_blocks_told": len(self._held),
            "kv_changes_sent": self._sent,
            "kv_watchers": self._watchers,
        }

    def receive(self, events: Sequence[KvEvent]) -> None:
        """What the engine tells, in order. It is looked at in the next turn."""
        self._events.extend(events)
        if self._events and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    async def watch(self, watcher: CacheWatcher) -> None:
        """Tell all that is held, then every change, until cancelled or closed."""
        with self._watching():
            told = 0
            while not self._closed:
                await watcher.ready()
                news = self._news
                if told == self._number:
                    await news.wait()
                    continue
                change = self._after(told)
                watcher.send(change)
                told = change.sequence
                self._sent += 1

    def close(self) -> None:
        """Let all watchers go: this worker is about to end."""
        self._closed = True
        self._news.set()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def _after(self, told: int) -> CacheChange:
        """The change that follows; or all that is held, where it is not at hand any more."""
        behind = self._number - told
        if told and behind <= len(self._recent):
            return self._recent[-behind]
        return self.whole()

    def whole(self) -> CacheChange:
        """All that is held now."""
        return CacheChange(self._number, tuple(self._held), snapshot=True)

    def _turn(self) -> None:
        self._scheduled, room = False, TURN
        while self._events and room > 0:
            event = self._events.popleft()
            room -= 0 if isinstance(event, KvCleared) else len(event.blocks)
            match event:
                case KvStored():
                    self._store(event)
                case KvRemoved():
                    for block in event.blocks:
                        self._remove(block)
                case KvCleared():
                    self._clear()
        self._publish()
        self.receive(())  # what is left, in the next turn

    def _store(self, event: KvStored) -> None:
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size:
            return
        names = blocks.hash_blocks(parent, event.tokens, self._block_size, event.media)
        for block, name in zip(event.blocks, names, strict=False):
            if block in self._name_of:
                self._copies[block] += 1
            else:
                self._name_of[block] = name
                self._hold(name)
        if len(self._name_of) > self._most:
            log.warning("the engine tells of more blocks than it has: what it holds is forgotten")
            self._clear()

    def _parent(self, event: KvStored) -> int | None:
        if event.parent is None:
            return blocks.hash_salt(event.salt)
        return self._name_of.get(event.parent)

    def _remove(self, block: int) -> None:
        if block in self._copies:
            self._copies[block] -= 1
            if not self._copies[block]:
                del self._copies[block]
        elif (name := self._name_of.pop(block, None)) is not None:
            self._release(name)

    def _hold(self, name: int) -> None:
        self._held[name] += 1
        if self._held[name] == 1 and self._gone.pop(name, self) is self:
            self._new[name] = None

    def _release(self, name: int) -> None:
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]
            if self._new.pop(name, self) is self:
                self._gone[name] = None

    def _clear(self) -> None:
        for known in (self._name_of, self._copies, self._held, self._new, self._gone):
            known.clear()
        self._cleared = True

    def _publish(self) -> None:
        """One change of all that is new, if anything is."""
        if self._cleared:
            self._recent.clear()  # nobody needs what came before
            change = CacheChange(self._number + 1, tuple(self._held), snapshot=True)
        elif self._new or self._gone:
            change = CacheChange(self._number + 1, tuple(self._new), tuple(self._gone))
        else:
            return
        self._number += 1
        self._recent.append(change)
        self._new.clear()
        self._gone.clear()
        self._cleared = False
        self._news.set()
        self._news = asyncio.Event()
