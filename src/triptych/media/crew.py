"""The decoding processes of a pool, and a thread for each that talks to it.

Starts a process when none is free, replaces what is lost. How many are at work, and on what, is
decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        self._threads = ThreadPoolExecutor(most + 1, "decode")  # one to unmap
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
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
        self._closed = True
        for child in list(self._busy):
            child.kill()

    def close(self) -> None:
        """After ``kill``; blocks until nothing is left."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()

    def _work(self, item: MediaItem, given_back: Callable[[list[Memory]], None]) -> Outcome:
        started = time.monotonic()
        crashed = False
        result: Prepared | Failure
        try:
            child = self._child()
        except (OSError, ChildLost) as error:
            _log.error("no decoding process can be started: %s", error)
            result = EngineFailed("Media cannot be decoded here at the moment.").failure()
            return Outcome(result, time.monotonic() - started)
        self._busy.add(child)
        try:
            if self._closed:
                child.kill()
            result = child.prepare(item, given_back)
            self._idle.append(child)
        except ChildLost as error:
            crashed = not self._closed
            result = self._loss(item, error)
        except ServiceError as error:
            result = error.failure()
        finally:
            self._busy.discard(child)
        return Outcome(result, time.monotonic() - started, crashed)

    def _loss(self, item: MediaItem, error: ChildLost) -> Failure:
        if self._closed:
            return Draining("This process is stopping.").failure()
        _log.warning("a decoding process is lost with its %s: %s", item.kind, error)
        return InvalidMedia(f"The {item.kind} could not be decoded.").failure()

    def _child(self) -> Child:
        """One that waits, or a new one."""
        while self._idle:
            try:
                child = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if child.fresh:
                return child
            child.close()
        child = Child(self._setup)
        if child.lacking and not self._told:
            self._told = True
            _log.warning("decoding is locked in without %s", ", ".join(child.lacking))
        return child
