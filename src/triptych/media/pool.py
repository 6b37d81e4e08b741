"""The decode pool: media files to what an encoder takes, in processes that are locked in.

Files come from strangers and decoders are large C libraries: so no file is decoded in a process
that serves anything else. A decoder that crashes, hangs or eats memory costs its own item an
InvalidMedia and the pool one process. Knows no model: the processes follow recipes.

Bounds: one item at a time in each process, with its bytes; and no item is begun while callers hold
more than HELD_BYTES of prepared media (besides what the cache keeps), so at most that and one item
for each process is there. Callers wait in order, the salts taking turns.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from triptych.config import Config
from triptych.errors import Draining, EngineFailed, InvalidMedia, ServiceError, revive
from triptych.media.base import Prepared
from triptych.media.child import Child, ChildLost, code_folders
from triptych.media.decoded import DecodedCache
from triptych.media.digest import digest
from triptych.media.wire import Setup
from triptych.messages import Failure, MediaItem
from triptych.recipe import Recipes
from triptych.transfer.layout import INLOOP, align
from triptych.transfer.segment import Memory

HELD_BYTES = 512 << 20
# Callers that hold so much and wait for more would wait for ever: so after this time with nothing
# given back one more item is begun.
STALL_SECONDS = 2.0
PREPARER = "triptych.media.prepare"
STOPPING = "This process is stopping."

Key = tuple[str, bytes]  # salt, identity of kind, form and bytes

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Flight:
    """One item on its way, and all who wait for it."""

    key: Key
    item: MediaItem
    landed: asyncio.Future[Prepared | Failure]
    waiting: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a thread brought back. ``crash``: why the process is no more, for the log."""

    result: Prepared | Failure
    seconds: float
    crash: str = ""


class _Turns:
    """Flights in the order they came, the salts taking turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[_Flight]] = OrderedDict()
        self.length = 0

    def add(self, flight: _Flight) -> None:
        self._lines.setdefault(flight.key[0], deque()).append(flight)
        self.length += 1

    def next(self) -> _Flight:
        salt, line = next(iter(self._lines.items()))
        flight = line.popleft()
        self._lines.move_to_end(salt)
        if not line:
            del self._lines[salt]
        self.length -= 1
        return flight

    def remove(self, flight: _Flight) -> None:
        line = self._lines[flight.key[0]]
        line.remove(flight)
        if not line:
            del self._lines[flight.key[0]]
        self.length -= 1


class DecodePool:
    """Processes are started when they are first needed. ``close`` it on the loop that uses it.

    ``preparer`` names the module that follows the recipes, in the processes.
    """

    def __init__(self, recipes: Recipes, config: Config, *, preparer: str = PREPARER) -> None:
        allow_torch = config.allow_torch_embeddings
        self._setup = Setup(recipes, config.limits, allow_torch, preparer, code_folders())
        self._most = config.decode_processes or max(1, len(os.sched_getaffinity(0)) - 1)
        self._threads = ThreadPoolExecutor(self._most + 1, "decode")  # one to unmap
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._turns = _Turns()
        self._flights: dict[Key, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache = DecodedCache(config.cache.decoded)
        self._mapped = 0  # bytes of prepared media that are about, the cache's too
        self._given_back: deque[int] = deque()  # sizes, from any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._told = False  # of locks that do not hold
        self._closed = False
        self.running = 0
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "decoded_items",
                "decode_crashes",
                "decode_seconds",
                "decoded_cache_hits",
                "decoded_cache_misses",
                "decoded_cache_bytes",
                "decoded_cache_evictions",
            ),
            0.0,
        )

    @property
    def queued(self) -> int:
        return self._turns.length

    async def prepare(self, item: MediaItem, salt: str = "") -> Prepared:
        """What the recipes make of an item, decoded once for all who ask for it at the same time.

        MediaError: the file is not what it should be. Its arrays may be read, never written to, and
        are given back by letting go of them.
        """
        self._loop = asyncio.get_running_loop()
        key = (salt, await digest(item))
        if self._closed:
            raise Draining(STOPPING)
        if (kept := self._cache.get(key)) is not None:
            self.counters["decoded_cache_hits"] += 1
            return kept
        flight = self._flights.get(key)
        if flight is None:
            self.counters["decoded_cache_misses"] += 1
            flight = self._flights[key] = _Flight(key, item, self._loop.create_future())
            self._turns.add(flight)
            self._begin()
        else:
            self.counters["decoded_cache_hits"] += 1
        flight.waiting += 1
        try:
            result = await asyncio.shield(flight.landed)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.begun and not flight.landed.done():
                self._turns.remove(flight)
                del self._flights[key]
        if isinstance(result, Failure):
            raise revive(result)  # one for each who waited: they may add to it
        return result

    async def close(self) -> None:
        """End all processes. Who still waits gets Draining."""
        self._closed = True
        while self._turns.length:
            flight = self._turns.next()
            flight.landed.set_result(Draining(STOPPING).failure())
        for child in list(self._busy):
            child.kill()
        await asyncio.gather(*self._tasks)
        if self._stalled is not None:
            self._stalled.cancel()
        await asyncio.to_thread(self._end)
        self._cache.clear()
        self._flights.clear()

    def _end(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._threads.shutdown()

    def _begin(self, *, regardless: bool = False) -> None:
        """Begin what may be begun: there is a process for it, and callers do not hold too much."""
        while self._given_back:
            self._mapped -= self._given_back.popleft()
            self._rest()
        while self._turns.length and self.running < self._most:
            if self._mapped - self._cache.bytes >= HELD_BYTES and not regardless:
                self._wait_on()
                return
            regardless = False
            flight = self._turns.next()
            flight.begun = True
            self.running += 1
            task = asyncio.create_task(self._fly(flight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _wait_on(self) -> None:
        if self._stalled is None and self._loop is not None:
            self._stalled = self._loop.call_later(STALL_SECONDS, self._stir)

    def _stir(self) -> None:
        self._stalled = None
        self._begin(regardless=True)

    def _rest(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    async def _fly(self, flight: _Flight) -> None:
        result: Prepared | Failure = EngineFailed("The media could not be prepared.").failure()
        try:
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._threads, self._decode, flight.item)
            result = outcome.result
            self._account(flight.key, outcome)
        finally:
            self.running -= 1
            self._flights.pop(flight.key, None)
            flight.landed.set_result(result)
            self._begin()

    def _account(self, key: Key, outcome: _Outcome) -> None:
        counters = self.counters
        counters["decode_seconds"] += outcome.seconds
        if outcome.crash:
            counters["decode_crashes"] += 1
            _log.warning("a decoding process is lost with its item: %s", outcome.crash)
        if isinstance(outcome.result, Prepared):
            counters["decoded_items"] += 1
            self._mapped += sum(align(array.buffer.nbytes) for array in outcome.result.arrays)
            self._cache.put(key, outcome.result)
            counters["decoded_cache_bytes"] = self._cache.bytes
            counters["decoded_cache_evictions"] = self._cache.evictions

    # What follows runs in threads.

    def _decode(self, item: MediaItem) -> _Outcome:
        started = time.monotonic()
        try:
            child = self._child()
        except (OSError, ChildLost) as error:
            _log.error("no decoding process can be started: %s", error)
            problem = EngineFailed("Media cannot be decoded here at the moment.")
            return _Outcome(problem.failure(), time.monotonic() - started)
        crash = ""
        self._busy.add(child)
        try:
            if self._closed:
                child.kill()
            result = child.prepare(item, self._take_back)
            self._idle.append(child)
        except ChildLost as error:
            if self._closed:
                result = Draining(STOPPING).failure()
            else:
                crash = str(error)
                result = InvalidMedia(f"The {item.kind} could not be decoded.").failure()
        except ServiceError as error:
            result = error.failure()
        finally:
            self._busy.discard(child)
        return _Outcome(result, time.monotonic() - started, crash)

    def _child(self) -> Child:
        """One that waits, or a new one."""
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                break
            if child.fresh:
                return child
            child.close()
        child = Child(self._setup)
        if child.lacking and not self._told:
            self._told = True
            _log.warning("decoding is locked in without %s", ", ".join(child.lacking))
        return child

    def _take_back(self, held: list[Memory]) -> None:
        size = ctypes.sizeof(held[0])
        self._given_back.append(size)
        try:
            if size > INLOOP:
                self._threads.submit(held.clear)  # the list holds it alone, so it is unmapped there
            if self._turns.length and self._loop is not None:
                self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            return  # all is closed: it goes with the list, here and now
