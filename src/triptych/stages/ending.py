"""What ends a worker, and how it goes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from triptych.runtime.lease import WorkerLease
from triptych.runtime.process import stop_signals
from triptych.runtime.server import RequestServer

log = logging.getLogger(__name__)
FENCED = 3  # exit code of a worker whose place was taken
ENGINE_DIED = 4  # exit code of a worker whose engine can't go on
NATS_LOST = 5  # exit code of a worker that nobody can reach any more


class Drainable(Protocol):
    """A worker, of which no more is needed here."""

    def drain(self) -> None: ...


def stop_event() -> asyncio.Event:
    """Set by the signals to stop, from now on. Until then, while loading, they end the process:
    nothing is served yet, and a thread that reads weights cannot be interrupted."""
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@dataclass(frozen=True, slots=True)
class StopReasons:
    """What ends a worker."""

    stop: asyncio.Event
    fenced: asyncio.Event
    died: asyncio.Event
    lost: asyncio.Event  # what leads here
    hung: asyncio.Event

    async def wait(self) -> None:
        """Until one of them is set."""
        events = (self.stop, self.fenced, self.died, self.lost, self.hung)
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()


async def until_stopped(
    ends: StopReasons,
    worker: Drainable,
    server: RequestServer,
    lease: WorkerLease,
    drain_seconds: float,
) -> int:
    """Drain when told to stop; leave at once when there is nothing left to serve with, or another
    incarnation has taken our place."""
    await ends.wait()
    if ends.fenced.is_set():
        log.error(
            "the lease was lost (this process was stopped too long, or another took its id): "
            "this incarnation is fenced and stops"
        )
        return FENCED
    if ends.died.is_set():
        log.error("the engine died: this worker ends, and another takes its place")
        return ENGINE_DIED
    if ends.hung.is_set():
        log.error(
            "the engine has work and did nothing for --limits-engine-seconds: it hangs. This "
            "worker ends, and another takes its place"
        )
        return ENGINE_DIED
    if ends.lost.is_set():
        log.error("NATS has closed the connection for good: nobody reaches this worker, so it ends")
        return NATS_LOST
    worker.drain()
    await lease.update(state="draining")
    await server.drain(drain_seconds)
    return 0
