"""Tasks: ended inside other people's code, told of when they end unasked, and run together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from triptych.errors import first_error

T = TypeVar("T")
AGAIN_SECONDS = 0.1


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, however it ends.

    It is told more than once: wait_for of Python 3.11, in which nats-py waits, loses a cancel that
    comes together with what was waited for.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN_SECONDS)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody complains


def log_failure(task: asyncio.Task[Any], log: logging.Logger, what: str) -> None:
    """Say in the log ``what`` is lost if the task ends in an error; else nobody would know."""

    def tell(ended: asyncio.Task[Any]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.critical("%s", what, exc_info=error)

    task.add_done_callback(tell)


class QuietTaskGroup(asyncio.TaskGroup):
    """A TaskGroup that ends without a trace, and raises one error: see first_error.

    An error holds the frames that it came through, with all that they hold: a request's media,
    memory of other workers. Whatever there holds the error too would keep all that for the garbage
    collector: a local variable (one is in the TaskGroup of Python 3.11), a task, or the group.
    Tasks that are held beside the scope itself, its owner must let go.
    """

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, **options)
        task.add_done_callback(_let_go)
        return task

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseException as raised:  # noqa: BLE001 (it is raised)
            told = first_error(raised) if isinstance(raised, BaseExceptionGroup) else raised
            traceback.clear_frames(raised.__traceback__)
            try:
                raise told
            finally:
                told.__context__ = None  # the group
                del told
        finally:
            del error, trace


def _let_go(task: asyncio.Task[Any]) -> None:
    """Of where a task has ended, which may hold the task."""
    if task.cancelled():
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # it gives away the error that it kept
    elif (error := task.exception()) is not None:
        traceback.clear_frames(error.__traceback__)


class FairSemaphore:
    """``most`` for all, ``each`` for one; none given: as for all.

    Owners that wait take turns. That suits owners that hold some and wait for more. With
    ``least_held_first`` the owner that holds the least comes first, and of equals the one that was
    served the longest ago: for work that takes its whole share at once. ``may_admit`` is asked
    before each admission; after it has refused one, call ``admit`` when it may agree.
    """

    def __init__(
        self,
        most: int,
        each: int | None = None,
        *,
        least_held_first: bool = False,
        may_admit: Callable[[], bool] = lambda: True,
    ) -> None:
        self._most = most
        self.each = most if each is None else min(each, most)
        self._least_held_first = least_held_first
        self._may_admit = may_admit
        self._served: dict[Hashable, int] = {}  # number of the last admission, by owner
        self._admissions = 0
        self._had: Counter[Hashable] = Counter()
        self._lines: OrderedDict[Hashable, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        self.taken = 0
        self.peak = 0
        self.waiting = 0

    @asynccontextmanager
    async def lent(self, who: Hashable) -> AsyncIterator[None]:
        """One of them, for as long as the scope is open."""
        await self.take(who)
        try:
            yield
        finally:
            self.give_back(who)

    async def take(self, who: Hashable, size: int = 1) -> None:
        """Wait for so many, which are ``each`` at most. Cancelled, one has none of them."""
        assert size <= self.each, "it would never come"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(who, deque()).append((turn, size))
        self.waiting += 1
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(who, turn, size)
            elif turn.exception() is None:  # it came at the same moment
                self.give_back(who, size)
            raise

    def give_back(self, who: Hashable, size: int = 1) -> None:
        self.taken -= size
        self._had[who] -= size
        if not self._had[who]:
            del self._had[who]
        self._forget_empty(who)
        self.admit()

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """Raise an error in every ``take`` that waits."""
        for line in self._lines.values():
            for turn, _ in line:
                if not turn.done():
                    turn.set_exception(make_error())
        self._lines.clear()
        self.waiting = 0

    def admit(self) -> None:
        """Admit those that wait, as far as there is room."""
        while (who := self._next()) is not None and self._may_admit():
            line = self._lines[who]
            turn, size = line.popleft()
            self._lines.move_to_end(who)
            self._admissions += 1
            self._served[who] = self._admissions
            self._had[who] += size
            self._forget_empty(who)
            self.waiting -= 1
            self.taken += size
            self.peak = max(self.peak, self.taken)
            turn.set_result(None)

    def _next(self) -> Hashable | None:
        """Whose turn it is, if it can come now: who has a whole share is passed over."""
        for who in self._order():
            line = self._lines[who]
            while line and line[0][0].cancelled():  # who waited has not noticed yet
                line.popleft()
                self.waiting -= 1
            if line and self._had[who] + line[0][1] <= self.each:
                return who if self.taken + line[0][1] <= self._most else None
        return None

    def _order(self) -> Iterable[Hashable]:
        if self._least_held_first and len(self._lines) > 1:
            return sorted(self._lines, key=lambda who: (self._had[who], self._served.get(who, 0)))
        return self._lines

    def _leave(self, who: Hashable, turn: asyncio.Future[None], size: int) -> None:
        line = self._lines.get(who)
        if line is not None and (turn, size) in line:
            line.remove((turn, size))
            self.waiting -= 1
        self._forget_empty(who)
        self.admit()  # what comes after it may be smaller

    def _forget_empty(self, who: Hashable) -> None:
        if who in self._lines and not self._lines[who]:
            del self._lines[who]
        if who not in self._lines and who not in self._had:
            self._served.pop(who, None)


class FairThreadPool:
    """``most`` in all, ``each`` for one. They start when they are needed."""

    def __init__(self, name: str, most: int, each: int) -> None:
        self._pool = ThreadPoolExecutor(most, name)
        self._shares = FairSemaphore(most, each)

    async def run(self, who: Hashable, call: Callable[..., T], *args: Any) -> T:
        """What the call gives. Who waits for a thread and is cancelled needs none."""
        await self._shares.take(who)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(self._shares.give_back, who)

        try:
            running = self._pool.submit(call, *args)
        except RuntimeError:  # closed
            self._shares.give_back(who)
            raise OSError("no more calls are taken") from None
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Take no more calls. Those under way go on, but nobody is told how they end."""
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
