"""Task groups and cancellation that leave no reference cycles, and fair limits on concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

from triptych.errors import first_error

T = TypeVar("T")
CANCEL_AGAIN_SECONDS = 0.1


class Pausable(Protocol):
    """A source of tokens that its reader can pause."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, in whatever way.

    Cancels repeatedly: ``wait_for`` of Python 3.11, which nats-py uses, loses a cancellation that
    arrives together with its result.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_SECONDS)
    if not task.cancelled():
        task.exception()  # mark as retrieved, or asyncio would log it


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set. False: it was not, in so many seconds (None: no limit)."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def log_failure(task: asyncio.Task[Any], log: logging.Logger, message: str) -> None:
    """Log ``message`` as critical if the task ends in an error that nobody awaits."""

    def report(ended: asyncio.Task[Any]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.critical("%s", message, exc_info=error)

    task.add_done_callback(report)


class QuietTaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises one error instead of a group (see ``first_error``), and breaks the
    reference cycles of that error.

    A traceback refers to frames and thereby to a request's media and to memory of other workers. If
    a local variable (the TaskGroup of Python 3.11 has one), a task or the group refers to the error
    in turn, all of that stays allocated until the garbage collector runs. A caller that stores the
    tasks elsewhere has to drop them itself.
    """

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, **options)
        task.add_done_callback(_clear_traceback)
        return task

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except (BaseExceptionGroup, asyncio.CancelledError) as raised:
            single = first_error(raised) if isinstance(raised, BaseExceptionGroup) else raised
            traceback.clear_frames(raised.__traceback__)
            try:
                raise single
            finally:
                single.__context__ = None  # the group
                del single
        finally:
            del error, trace


def _clear_traceback(task: asyncio.Task[Any]) -> None:
    """Drop the frames in which a task ended: they may refer to the task."""
    if task.cancelled():
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # the task drops the error that it stores
    elif (error := task.exception()) is not None:
        traceback.clear_frames(error.__traceback__)


class FairSemaphore:
    """A semaphore of ``limit`` units, of which one key holds at most ``per_key`` (None: all).

    The waiters of one key come in order, and a key that holds its maximum is passed over. Waiting
    keys take turns (round robin), which suits keys that hold some units and wait for more. With
    ``least_held_first`` the key that holds the fewest units comes first, and of equals the one
    served the longest ago: for work that takes all its units at once. Before each admission it
    calls ``may_admit``; after a refusal, call ``admit`` when that may have changed. Has no timeout:
    the caller sets one.
    """

    def __init__(
        self,
        limit: int,
        per_key: int | None = None,
        *,
        least_held_first: bool = False,
        may_admit: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limit = limit
        self.per_key = limit if per_key is None else min(per_key, limit)
        self._held: Counter[Hashable] = Counter()
        self._queues: OrderedDict[Hashable, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        self._least_held_first = least_held_first
        self._may_admit = may_admit
        self._served: dict[Hashable, int] = {}  # number of the last admission, by key
        self._admissions = 0
        self.in_use = 0
        self.peak = 0
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def slot(self, key: Hashable) -> AsyncIterator[None]:
        """One unit for the scope."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: Hashable, units: int = 1) -> None:
        """Wait for so many units, at most ``per_key``. When cancelled it holds none of them."""
        assert units <= self.per_key, "it would wait for ever"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append((turn, units))
        self.waiting += 1
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(key, turn, units)
            elif turn.exception() is None:  # granted and cancelled in the same turn of the loop
                self.release(key, units)
            raise

    def release(self, key: Hashable, units: int = 1) -> None:
        self.in_use -= units
        self._held[key] -= units
        if not self._held[key]:
            del self._held[key]
        self._forget_empty(key)
        self.admit()

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """Raise an error in every ``acquire`` that waits."""
        for queue in self._queues.values():
            for turn, _ in queue:
                if not turn.done():
                    turn.set_exception(make_error())
        self._queues.clear()
        self.waiting = 0

    def admit(self) -> None:
        """Admit waiters while units are free."""
        while (key := self._next()) is not None and self._may_admit():
            queue = self._queues[key]
            turn, units = queue.popleft()
            self._queues.move_to_end(key)
            self._admissions += 1
            self._served[key] = self._admissions
            self._held[key] += units
            self._forget_empty(key)
            self.waiting -= 1
            self.in_use += units
            self.peak = max(self.peak, self.in_use)
            turn.set_result(None)

    def _next(self) -> Hashable | None:
        """The key whose turn it is, if its units are free."""
        for key in self._order():
            queue = self._queues[key]
            while queue and queue[0][0].cancelled():  # its waiter has not run yet
                queue.popleft()
                self.waiting -= 1
            if queue and self._held[key] + queue[0][1] <= self.per_key:
                return key if self.in_use + queue[0][1] <= self._limit else None
        return None

    def _order(self) -> Iterable[Hashable]:
        if self._least_held_first and len(self._queues) > 1:
            return sorted(self._queues, key=lambda key: (self._held[key], self._served.get(key, 0)))
        return self._queues

    def _leave(self, key: Hashable, turn: asyncio.Future[None], units: int) -> None:
        queue = self._queues.get(key)
        if queue is not None and (turn, units) in queue:
            queue.remove((turn, units))
            self.waiting -= 1
        self._forget_empty(key)
        self.admit()  # the next waiter may want fewer units

    def _forget_empty(self, key: Hashable) -> None:
        if key in self._queues and not self._queues[key]:
            del self._queues[key]
        if key not in self._queues and key not in self._held:
            self._served.pop(key, None)


class FairThreadPool:
    """Threads for calls that may hang, apart from the default pool: ``limit`` in all, ``per_key``
    for one key. A call whose caller was cancelled keeps its thread until it returns."""

    def __init__(self, name: str, limit: int, per_key: int) -> None:
        self._pool = ThreadPoolExecutor(limit, name)
        self._threads = FairSemaphore(limit, per_key)

    async def run(self, key: Hashable, call: Callable[..., T], *args: Any) -> T:
        """The call's result. Raises OSError once the pool is closed."""
        await self._threads.acquire(key)
        loop = asyncio.get_running_loop()

        def release(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._threads.release, key)

        try:
            running = self._pool.submit(call, *args)
        except RuntimeError:
            self._threads.release(key)
            raise OSError("the thread pool is closed") from None
        running.add_done_callback(release)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Accept no more calls. Running ones continue; nobody gets their results."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def wait_until_done(future: asyncio.Future[Any]) -> None:
    """Wait for work that cannot be cancelled, even while being cancelled; ignore its outcome."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    if not future.cancelled():
        future.exception()
    if cancelled:
        raise asyncio.CancelledError
