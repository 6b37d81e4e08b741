"""A worker's lease: its place in discovery, renewed until it leaves or is fenced.

A worker is *fenced* when a newer epoch of it was claimed, or when it did not even try to renew for
longer than a lease (it was stopped, and others hold it for dead): it must serve no more. That
discovery is away fences nobody. Leases are counted in CLOCK_BOOTTIME, which moving the wall clock
does not touch, and everyone counts on a clock of his own. Where the place is, others know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from triptych.errors import StartError
from triptych.messages import WorkerRecord
from triptych.runtime.tasks import end

log = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
TOLD = 2  # renewals that fail in a row: of one, the place is soon known to be away

Clock = Callable[[], float]


def boottime() -> float:
    """Seconds since the host started, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KnownAway(ConnectionError):
    """The place is away, and whoever holds the way there has told so."""


class Place(Protocol):
    """Where the record of one worker stands. Both raise OSError while that cannot be reached."""

    async def put(self, record: WorkerRecord) -> bool:
        """Show the record for one more lease. False: a newer incarnation was there before."""

    async def leave(self, record: WorkerRecord) -> None:
        """Take the record away, unless it is another incarnation's, and let go of the place."""


class Lease:
    """A worker's place in discovery, renewed in the background."""

    def __init__(self, place: Place, record: WorkerRecord, seconds: float, clock: Clock) -> None:
        self.record = record
        self.fenced = asyncio.Event()  # set: this incarnation must serve no more
        self._place = place
        self._seconds = seconds
        self._clock = clock
        self._tried = clock()  # when we last renewed, or could not for want of a place
        self._missed = 0  # renewals in a row, for reasons that nobody else tells
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self._renew()
        if self.fenced.is_set():
            await self._leave()
            raise StartError(
                f"worker {self.record.id} was started again meanwhile: epoch "
                f"{self.record.epoch} is not the newest. Stop one of the two."
            )
        if self._missed:
            log.warning("no frontend can see this worker yet: it tries to register every second")
        self._renewing = asyncio.create_task(self._keep())

    async def update(self, *, state: Literal["ready", "draining"]) -> None:
        """Change what readers see of this worker, now."""
        self.record = msgspec.structs.replace(self.record, state=state)
        await self._renew()

    async def close(self) -> None:
        """Leave discovery, unless another incarnation stands there."""
        if self._renewing is None:
            return
        await end(self._renewing)
        self._renewing = None
        async with self._writing:
            await self._leave()

    async def _keep(self) -> None:
        while not self.fenced.is_set():
            await asyncio.sleep(RENEW_SECONDS)
            await self._renew()

    async def _renew(self) -> None:
        async with self._writing:
            if not self.fenced.is_set() and not await self._try():
                self.fenced.set()

    async def _try(self) -> bool:
        """Renew the lease. False: it is lost."""
        now, before = self._clock(), self._tried
        if now - before > self._seconds:
            return False  # we were stopped, and are held for dead
        self._tried = now
        try:
            stands = await self._place.put(self.record)
        except OSError as error:
            self._missed = 0 if isinstance(error, KnownAway) else self._missed + 1
            if self._missed == TOLD:
                log.warning("the lease cannot be renewed: %s", _why(error))
            return True
        if self._missed >= TOLD:
            log.warning("the lease can be renewed again")
        self._missed = 0
        return stands

    async def _leave(self) -> None:
        try:
            await self._place.leave(self.record)
        except OSError as error:  # it ends by itself
            log.info("the place in discovery is left to its lease: %s", _why(error))


def _why(error: OSError) -> str:
    return error.strerror or str(error) or "no answer in time"
