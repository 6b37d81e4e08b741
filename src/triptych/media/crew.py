"""The decoding processes of a pool, and a thread for each that talks to it.

A process takes long to start, so the next one is started before it is needed: when the last that
waits gets an item, when one is lost, when one has served for long. How many are at work, and on
what, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from triptych.errors import Draining, EngineFailed, InvalidMedia, ServiceError
from triptych.media.base import Prepared
from triptych.media.child import Child, ChildLost
from triptych.media.wire import Setup
from triptych.messages import Failure, MediaItem
from triptych.transfer.segment import Memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an item. ``crashed``: it cost the process that it was in."""

    result: Prepared | Failure
    seconds: float
    crashed: bool = False


class Crew:
    """At most ``most`` items may be under way at once."""

    def __init__(self, setup: Setup, most: int) -> None:
        self._setup = setup
        self._most = most
        self._threads = ThreadPoolExecutor(most + 2, "decode")  # one to unmap, one to start a spare
        self._lock = threading.Lock()  # over the four that follow; never held for long
        self._items = 0  # under way, each with a process or about to have one
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._spare: Future[Child] | None = None  # is started, and nobody's yet
        self._told = False  # of locks that do not hold
        self._closed = False

    async def prepare(self, item: MediaItem, given_back: Callable[[list[Memory]], None]) -> Outcome:
        """``given_back``: see Child.prepare. Cancelling does not stop the process."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._work, item, given_back)

    def unmap(self, held: list[Memory]) -> None:
        """In a thread, for it may take long. The list must hold the memory alone."""
        self._threads.submit(held.clear)

    def kill(self) -> None:
        """End what is under way: its outcome is then Draining."""
        with self._lock:
            self._closed = True
            for child in self._busy:
                child.kill()

    def close(self) -> None:
        """After ``kill``; blocks until nothing is left."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()
        if self._spare is not None and self._spare.exception() is None:
            self._spare.result().close()

    def _work(self, item: MediaItem, given_back: Callable[[list[Memory]], None]) -> Outcome:
        started = time.monotonic()
        child, crashed = None, False
        result: Prepared | Failure
        with self._lock:
            self._items += 1
        try:
            child = self._child()
            result, crashed = self._prepared(child, item, given_back)
        except (OSError, ChildLost) as error:
            _log.error("no decoding process can be started: %s", error)
            result = EngineFailed("Media cannot be decoded here at the moment.").failure()
        finally:
            with self._lock:
                self._items -= 1
                if child is not None:
                    self._busy.discard(child)
                    self._foresee(child.worn)
        return Outcome(result, time.monotonic() - started, crashed)

    def _prepared(
        self, child: Child, item: MediaItem, given_back: Callable[[list[Memory]], None]
    ) -> tuple[Prepared | Failure, bool]:
        """What became of an item, and whether it cost the process. A sound one waits again."""
        try:
            result = child.prepare(item, given_back)
        except ChildLost as error:
            return self._loss(item, error), not self._closed
        except ServiceError as error:
            return error.failure(), False
        with self._lock:
            self._idle.append(child)
        return result, False

    def _loss(self, item: MediaItem, error: ChildLost) -> Failure:
        if self._closed:
            return Draining("This process is stopping.").failure()
        _log.warning("a decoding process is lost with its %s: %s", item.kind, error)
        return InvalidMedia(f"The {item.kind} could not be decoded.").failure()

    def _child(self) -> Child:
        """One that waits, the spare when it is ready, or a new one. It is busy from now on."""
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
                spare, self._spare = (self._spare, None) if child is None else (None, self._spare)
            if spare is not None and spare.exception() is None:
                child = spare.result()
            if child is None:  # also where the spare failed: that was not for this item
                child = self._start()
            if child.fresh:
                break
            child.close()
        with self._lock:
            self._busy.add(child)
            self._foresee(child.worn)
            if self._closed:
                child.kill()
        return child

    def _foresee(self, worn: bool) -> None:
        """Start the next process, if one will be needed; with the lock held.

        ``worn``: the one that works will soon be too old.
        """
        if self._closed or self._idle or self._spare is not None:
            return
        if worn or self._items < self._most:
            self._spare = self._threads.submit(self._start)

    def _start(self) -> Child:
        child = Child(self._setup)
        if child.lacking and not self._told:
            self._told = True
            _log.warning("decoding is locked in without %s", ", ".join(child.lacking))
        return child
