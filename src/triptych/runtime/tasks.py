"""Tasks: ended inside other people's code, told of when they end unasked, and run together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

from triptych.errors import first_error

T = TypeVar("T")
AGAIN_SECONDS = 0.1


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, however it ends.

    It is told more than once: wait_for of Python 3.11, in which nats-py waits, loses a cancel that
    comes together with what was waited for.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN_SECONDS)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody complains


def tell_end(task: asyncio.Task[Any], log: logging.Logger, what: str) -> None:
    """Say in the log ``what`` is lost if the task ends in an error; else nobody would know."""

    def tell(ended: asyncio.Task[Any]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.critical("%s", what, exc_info=error)

    task.add_done_callback(tell)


class Together(asyncio.TaskGroup):
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
