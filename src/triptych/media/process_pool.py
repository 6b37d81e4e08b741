"""The decoding processes of a pool, each with a thread that talks to it.

A process takes long to start, so the next one starts before it is needed: when the last idle one
gets an item, when one is lost, when one has served many items. ``decode_queue`` decides how many
items run, and which.

An item whose process is lost is tried again on another one. A file is refused only when it has used
up its CPU time, or when process after process crashes or hangs on it; never because a process was
killed or stopped from outside.
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

# How many processes an item may lose by each cause.
MAX_LOSSES: dict[LossCause, int] = {"cpu": 1, "start": 1, "crashed": 2, "killed": 3}
THREADS_CLOSE_SECONDS = 10.0  # for threads to end after all processes were killed

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """The result of an item. ``lost``: how many processes were lost with it."""

    result: PreparedMedia | Failure
    seconds: float
    lost: int = 0


class ProcessPool:
    """At most ``most`` items may run at once."""

    def __init__(self, setup: DecoderSetup, most: int) -> None:
        self._setup = setup
        self._most = most
        self._threads = ThreadPoolExecutor(most + 2, "decode")  # one to unmap, one to start a spare
        self._lock = threading.RLock()  # guards all that follows; never held for long
        self._items = 0  # running, each with a process or about to get one
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()  # with an item, or starting
        self._spare: Future[DecoderProcess] | None = None  # started, not yet given an item
        self._futures: set[Future[Any]] = set()  # of calls that threads have not completed
        self._mismatches = mismatch_log()
        self._warned = False  # of locks that the kernel lacks
        self._closed = False

    async def prepare(
        self, item: MediaItem, release: Callable[[list[Memory]], None]
    ) -> DecodeOutcome:
        """``release``: see DecoderProcess.prepare. Cancelling does not stop the process."""
        return await asyncio.wrap_future(self._submit(self._prepare, item, release))

    def unmap(self, memory: list[Memory]) -> None:
        """In a thread, since it may take long. The list must hold the only reference."""
        self._submit(memory.clear)

    def kill(self) -> None:
        """End what is running: its outcome is then Draining."""
        with self._lock:
            self._closed = True
            for process in self._busy:
                process.kill()

    def close(self) -> None:
        """After ``kill``. Blocks until nothing is left, for THREADS_CLOSE_SECONDS at most."""
        self._threads.shutdown(wait=False)
        with self._lock:
            futures = [*self._futures]
        if wait(futures, THREADS_CLOSE_SECONDS).not_done:
            _log.error("threads of the decode pool did not stop in time")
        else:
            self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()
        if self._spare is not None and self._spare.done() and self._spare.exception() is None:
            self._spare.result().close()

    def _submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Raises RuntimeError after ``close``."""
        future = self._threads.submit(call, *arguments)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def _prepare(self, item: MediaItem, release: Callable[[list[Memory]], None]) -> DecodeOutcome:
        started = time.monotonic()
        lost: Counter[LossCause] = Counter()
        result: PreparedMedia | Failure | None = None
        while result is None:
            try:
                result = self._try(item, release)
            except DecoderProcessLost as error:
                lost[error.cause] += 1
                result = self._handle_loss(item, error, lost[error.cause])
        return DecodeOutcome(
            result, time.monotonic() - started, 0 if self._closed else lost.total()
        )

    def _try(
        self, item: MediaItem, release: Callable[[list[Memory]], None]
    ) -> PreparedMedia | Failure:
        """The result of an item in one process, which is idle afterwards unless it is lost."""
        process = None
        with self._lock:
            self._items += 1
        try:
            process = self._take_process()
            result = process.prepare(item, release)
            with self._lock:
                self._idle.append(process)
            return result
        except ServiceError as error:
            return error.failure()
        except OSError as error:
            _log.error("cannot start a decoding process: %s", error)
            return _unavailable()
        except MemoryError:
            if process is not None:
                process.close()
            return OutOfMemory("There is no memory for media at the moment.").failure()
        finally:
            with self._lock:
                self._items -= 1
                if process is not None:
                    self._busy.discard(process)
                    self._start_spare_if_needed(process.nearly_used_up)

    def _handle_loss(self, item: MediaItem, error: DecoderProcessLost, lost: int) -> Failure | None:
        """The failure of an item whose process was lost; None: try it again.

        ``lost``: how many processes the item has lost by this cause.
        """
        if self._closed:
            return Draining("This process is stopping.").failure()
        again = lost < MAX_LOSSES[error.cause]
        then = "; trying it again" if again else ""
        _log.warning("lost a decoding process with its %s: %s%s", item.kind, error, then)
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

    def _take_process(self) -> DecoderProcess:
        """An idle one, the spare when it is ready, or a new one. It is busy from now on."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
                spare, self._spare = (self._spare, None) if process is None else (None, self._spare)
            if spare is not None and spare.exception() is None:
                process = spare.result()
            if process is None:  # also if the spare failed: that was not this item's fault
                process = self._start()
            if process.usable:
                break
            process.close()
        with self._lock:
            self._busy.add(process)
            self._start_spare_if_needed(process.nearly_used_up)
            if self._closed:
                process.kill()
        return process

    def _start_spare_if_needed(self, replace: bool) -> None:
        """Start the next process if one will be needed. Call it with the lock held.

        ``replace``: the process in use needs a successor soon.
        """
        if self._closed or self._idle or self._spare is not None:
            return
        if replace or self._items < self._most:
            self._spare = self._submit(self._start)

    def _start(self) -> DecoderProcess:
        started: list[DecoderProcess] = []

        def on_spawn(process: DecoderProcess) -> None:
            started.append(process)
            with self._lock:
                self._busy.add(process)
                if self._closed:
                    process.kill()

        try:
            process = DecoderProcess(self._setup, on_spawn, self._mismatches)
        except DecoderProcessLost as error:
            cause: LossCause = "killed" if error.cause == "killed" else "start"
            raise DecoderProcessLost(f"before it was ready: {error}", cause) from None
        finally:
            with self._lock:
                self._busy.difference_update(started)
        if process.lacking and not self._warned:
            self._warned = True
            _log.warning("decoding processes run without %s", ", ".join(process.lacking))
        return process


def _unavailable() -> Failure:
    return DecoderLost(
        "Media cannot be decoded here at the moment: the processes that do it are killed, or do "
        "not start. Try again later."
    ).failure()
