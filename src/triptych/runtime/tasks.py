"""Tasks: ended inside other people's code, told of when they end unasked, and run together."""

from __future__ import annotations

import asyncio
import logging
import traceback
from types import TracebackType
from typing import Any

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
    """A TaskGroup that a cancel leaves without a trace.

    The one of Python 3.11 keeps a cancel in a local variable, and so for the garbage collector,
    with all that was held where it came through: a request's media, memory of other workers.
    """

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)
            raise
        finally:
            del error, trace
