"""The decoding processes of a pool, and a thread for each that talks to it.

A process takes long to start, so the next one is started before it is needed: when the last that
waits gets an item, when one is lost, when one has served for long. How many are at work, and on
what, is decided elsewhere.

An item whose process is lost is tried again on another one. A file is refused only when it has used
up its CPU time, or when process after process crashes or hangs on it; it is never blamed for a
process that was killed or stopped from outside.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.errors import DecoderLost, Draining, InvalidMedia, OutOfMemory, ServiceError
from triptych.media.base import PreparedMedia
from triptych.media.decoder_channel import DecoderSetup
from triptych.media.decoder_process import DecoderProcess, cpu_limit, mismatch_log
from triptych.media.process_monitor import DecoderProcessLost, LossCause
from triptych.messages import Failure, MediaItem
from triptych.transfer.segment import Memory

# How many processes an item may cost by each cause.
MAX_LOSSES: dict[LossCause, int] = {"cpu": 1, "start": 1, "crashed": 2, "killed": 3}
THREADS_CLOSE_SECONDS = 10.0  # for threads to be done after all processes were killed

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """What became of an item. ``lost``: how many processes it cost."""

    result: PreparedMedia | Failure
    seconds: float
    lost: int = 0


class ProcessPool:
    """At most ``most`` items may be under way at once."""

    def __init__(self, setup: DecoderSetup, most: int) -> None:
        self._setup = setup
        self._most = most
        self._threads = ThreadPoolExecutor(most + 2, "decode")  # one to unmap, one to start a spare
        self._lock = threading.RLock()  # over all that follows; never held for long
        self._items = 0  # under way, each with a process or about to have one
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()  # with an item, or starting
        self._spare: Future[DecoderProcess] | None = None  # is started, and nobody's yet
        self._futures: set[Future[Any]] = set()  # what threads have still to do
        self._misfits = mismatch_log()
        self._told = False  # of locks that do not hold
        self._closed = False

    async def prepare(
        self, item: MediaItem, given_back: Callable[[list[Memory]], None]
    ) -> DecodeOutcome:
        """``given_back``: see Child.prepare. Cancelling does not stop the process."""
        return await asyncio.wrap_future(self._submit(self._work, item, given_back))

    def unmap(self, held: list[Memory]) -> None:
        """In a thread, for it may take long. The list must hold the memory alone."""
        self._submit(held.clear)

    def kill(self) -> None:
        """End what is under way: its outcome is then Draining."""
        with self._lock:
            self._closed = True
            for child in self._busy:
                child.kill()

    def close(self) -> None:
        """After ``kill``; blocks until nothing is left, for CLOSE_SECONDS at most."""
        self._threads.shutdown(wait=False)
        with self._lock:
            futures = [*self._futures]
        if wait(futures, THREADS_CLOSE_SECONDS).not_done:
            _log.error("threads that decode do not end")
        else:
            self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()
        if self._spare is not None and self._spare.done() and self._spare.exception() is None:
            self._spare.result().close()

    def _submit(self, call: Callable[..., T], *words: Any) -> Future[T]:
        """RuntimeError: all is closed."""
        future = self._threads.submit(call, *words)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def _work(self, item: MediaItem, given_back: Callable[[list[Memory]], None]) -> DecodeOutcome:
        started = time.monotonic()
        lost: Counter[LossCause] = Counter()
        result: PreparedMedia | Failure | None = None
        while result is None:
            try:
                result = self._try(item, given_back)
            except DecoderProcessLost as error:
                lost[error.cause] += 1
                result = self._loss(item, error, lost[error.cause])
        return DecodeOutcome(
            result, time.monotonic() - started, 0 if self._closed else lost.total()
        )

    def _try(
        self, item: MediaItem, given_back: Callable[[list[Memory]], None]
    ) -> PreparedMedia | Failure:
        """What one process makes of an item. A process that is well waits for the next."""
        child = None
        with self._lock:
            self._items += 1
        try:
            child = self._child()
            result = child.prepare(item, given_back)
            with self._lock:
                self._idle.append(child)
            return result
        except ServiceError as error:
            return error.failure()
        except OSError as error:
            _log.error("no decoding process can be started: %s", error)
            return _unavailable()
        except MemoryError:
            if child is not None:
                child.close()
            return OutOfMemory("There is no memory for media at the moment.").failure()
        finally:
            with self._lock:
                self._items -= 1
                if child is not None:
                    self._busy.discard(child)
                    self._foresee(child.worn)

    def _loss(self, item: MediaItem, error: DecoderProcessLost, lost: int) -> Failure | None:
        """What a lost process means for its item; None: it is to be tried again.

        ``lost``: how many processes the item has cost by this cause.
        """
        if self._closed:
            return Draining("This process is stopping.").failure()
        again = lost < MAX_LOSSES[error.cause]
        then = "; it is tried again" if again else ""
        _log.warning("a decoding process is lost with its %s: %s%s", item.kind, error, then)
        if again:
            return None
        if error.cause in ("killed", "start"):
            return _unavailable()
        if error.cause == "cpu":
            seconds = cpu_limit(item, self._setup.limits)
            return InvalidMedia(
                f"To decode the {item.kind} takes over {seconds:g} seconds of CPU time, the most "
                "that a file may have here. Send a simpler or a smaller one."
            ).failure()
        return InvalidMedia(f"The {item.kind} could not be decoded.").failure()

    def _child(self) -> DecoderProcess:
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
            self._futures.add(self._spare)
            self._spare.add_done_callback(self._done)

    def _start(self) -> DecoderProcess:
        started: list[DecoderProcess] = []

        def spawned(child: DecoderProcess) -> None:
            started.append(child)
            with self._lock:
                self._busy.add(child)
                if self._closed:
                    child.kill()

        try:
            child = DecoderProcess(self._setup, spawned, self._misfits)
        except DecoderProcessLost as error:
            cause: LossCause = "killed" if error.cause == "killed" else "start"
            raise DecoderProcessLost(f"before it was ready: {error}", cause) from None
        finally:
            with self._lock:
                self._busy.difference_update(started)
        if child.lacking and not self._told:
            self._told = True
            _log.warning("decoding is locked in without %s", ", ".join(child.lacking))
        return child


def _unavailable() -> Failure:
    return DecoderLost(
        "Media cannot be decoded here at the moment: the processes that do it are killed, or do "
        "not start. Try again later."
    ).failure()
