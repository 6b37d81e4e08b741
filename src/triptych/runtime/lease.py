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
from msgspec import Struct

from triptych.errors import StartError
from triptych.messages import WorkerRecord
from triptych.runtime.concurrency import cancel_and_wait

log = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
TOLD = 2  # renewals that fail in a row: of one, the place is soon known to be away

Clock = Callable[[], float]


def boottime() -> float:
    """Seconds since the host started, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KnownOutage(ConnectionError):
    """The place is away, and whoever holds the way there has told so."""


class Registration(Protocol):
    """Where the record of one worker stands. Both raise OSError while that cannot be reached."""

    async def put(self, record: WorkerRecord) -> bool:
        """Show the record for one more lease. False: a newer incarnation was there before."""

    async def leave(self, record: WorkerRecord) -> None:
        """Take the record away, unless it is another incarnation's, and let go of the place."""


class WorkerLease:
    """A worker's place in discovery, renewed in the background."""

    def __init__(
        self, place: Registration, record: WorkerRecord, seconds: float, clock: Clock
    ) -> None:
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
        await cancel_and_wait(self._renewing)
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
            self._missed = 0 if isinstance(error, KnownOutage) else self._missed + 1
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


FORGET_SECONDS = 60.0  # after which the epochs of workers that are gone are forgotten


class DiscoveryEntry(Struct, frozen=True):
    """What stands in discovery for a worker: its newest epoch, and a record while it serves."""

    epoch: int
    record: WorkerRecord | None = None


class _Sight(Struct):
    entry: DiscoveryEntry
    revision: int
    at: float  # when something new was last seen of it


class LivenessView:
    def __init__(self, lease: float = LEASE_SECONDS, clock: Clock = boottime) -> None:
        self._lease = lease
        self._clock = clock
        self._sights: dict[str, _Sight] = {}
        self._touched = float("-inf")

    def see(self, worker_id: str, entry: DiscoveryEntry, revision: int) -> bool:
        """Note what stands there. True: it is more than a lease renewed."""
        known = self._sights.get(worker_id)
        if known is None:
            self._sights[worker_id] = _Sight(entry, revision, self._clock())
            return True
        if entry.epoch < known.entry.epoch or revision == known.revision:
            return False  # of an incarnation that is over, or the same again
        changed = entry != known.entry
        known.entry, known.revision, known.at = entry, revision, self._clock()
        return changed

    def lose(self, worker_id: str) -> bool:
        """Somebody took it out of discovery: it may come again, but not as an older one."""
        known = self._sights.get(worker_id)
        if known is None or known.entry.record is None:
            return False
        known.entry = DiscoveryEntry(known.entry.epoch)
        return True

    def forget(self, worker_id: str) -> None:
        """Know nothing of it any more."""
        self._sights.pop(worker_id, None)

    def touch(self) -> None:
        """Discovery has just shown all that it knows."""
        now = self._clock()
        if now - self._touched > self._lease / 2:
            for sight in self._sights.values():
                sight.at = now  # nobody could show up meanwhile
        self._touched = now
        self._sights = {w: s for w, s in self._sights.items() if now - s.at < FORGET_SECONDS}

    def silent(self, seconds: float) -> bool:
        """Whether we have been out of touch for so long."""
        return self._clock() - self._touched > seconds

    def view(self) -> dict[str, WorkerRecord]:
        return {
            worker_id: sight.entry.record
            for worker_id, sight in self._sights.items()
            if sight.entry.record is not None and self._touched - sight.at < self._lease
        }
