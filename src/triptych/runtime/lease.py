"""Leases in discovery: a worker renews its own, and a reader judges which workers live.

A worker is *fenced*, and must stop serving, when a newer epoch of it was claimed, or when it did
not even try to renew for longer than a lease (it was stopped, and others consider it dead). An
outage of discovery fences nobody. All times are CLOCK_BOOTTIME, which changes of the wall clock do
not affect; each process uses its own clock. Knows nothing about directories or NATS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from triptych.errors import StartError
from triptych.host import boot_time
from triptych.messages import WorkerRecord
from triptych.runtime.concurrency import cancel_and_wait

log = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
WARN_AFTER = 2  # failed renewals in a row

Clock = Callable[[], float]


class KnownOutage(ConnectionError):
    """Discovery is away, and its connection has logged that already."""


class Registration(Protocol):
    """The entry of one worker in discovery. Both methods raise OSError while it is away."""

    async def put(self, record: WorkerRecord) -> bool:
        """Publish the record for one more lease. False: a newer incarnation has registered."""

    async def remove(self, record: WorkerRecord) -> None:
        """Remove the record, unless it is another incarnation's, and release all resources."""


class WorkerLease:
    """A worker's registration in discovery, renewed in the background until it is closed."""

    def __init__(
        self, registration: Registration, record: WorkerRecord, seconds: float, clock: Clock
    ) -> None:
        self.record = record
        self.fenced = asyncio.Event()  # set: this incarnation must serve no more
        self._registration = registration
        self._seconds = seconds
        self._clock = clock
        self._tried = clock()  # when we last tried to renew
        self._missed = 0  # failed renewals in a row, except those that are logged elsewhere
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self._renew()
        if self.fenced.is_set():
            await self._deregister()
            raise StartError(
                f"worker {self.record.id} was started a second time: epoch {self.record.epoch} is "
                "not the newest. Stop one of the two."
            )
        if self._missed:
            log.warning(
                "worker %s could not register, so frontends do not see it: it retries every second",
                self.record.id,
            )
        self._renewing = asyncio.create_task(self._renew_regularly())

    async def update(self, *, state: Literal["ready", "draining"]) -> None:
        """Publish another state of this worker now."""
        self.record = msgspec.structs.replace(self.record, state=state)
        await self._renew()

    async def close(self) -> None:
        """Deregister, unless another incarnation has registered."""
        if self._renewing is None:
            return
        await cancel_and_wait(self._renewing)
        self._renewing = None
        async with self._writing:
            await self._deregister()

    async def _renew_regularly(self) -> None:
        while not self.fenced.is_set():
            await asyncio.sleep(RENEW_SECONDS)
            await self._renew()

    async def _renew(self) -> None:
        async with self._writing:
            if not self.fenced.is_set() and not await self._try():
                self.fenced.set()

    async def _try(self) -> bool:
        """Try to renew the lease. False: it is lost."""
        now, before = self._clock(), self._tried
        if now - before > self._seconds:
            return False  # the process was stopped for so long that others consider it dead
        self._tried = now
        try:
            current = await self._registration.put(self.record)
        except OSError as error:
            self._missed = 0 if isinstance(error, KnownOutage) else self._missed + 1
            if self._missed == WARN_AFTER:
                log.warning(
                    "cannot renew the lease of worker %s: %s", self.record.id, _reason(error)
                )
            return True
        if self._missed >= WARN_AFTER:
            log.warning("renewed the lease of worker %s again", self.record.id)
        self._missed = 0
        return current

    async def _deregister(self) -> None:
        try:
            await self._registration.remove(self.record)
        except OSError as error:
            log.info("could not deregister; the lease will expire: %s", _reason(error))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or "no answer in time"


FORGET_SECONDS = 60.0  # after which the epochs of dead workers are forgotten


class DiscoveryEntry(Struct, frozen=True):
    """A worker's entry in discovery: its newest epoch, and its record while it serves."""

    epoch: int
    record: WorkerRecord | None = None


class _Seen(Struct):
    entry: DiscoveryEntry
    revision: int
    at: float  # when the reader last saw a new revision


class LivenessView:
    """The workers that one reader considers alive, by its own clock alone.

    A worker is alive while the reader saw a new revision of its entry within a lease. Time counts
    only while the reader is in touch with discovery: during an outage its last view stays, and
    afterwards every worker in it has one lease to renew.
    """

    def __init__(self, lease: float = LEASE_SECONDS, clock: Clock = boot_time) -> None:
        self._lease = lease
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._touched = float("-inf")

    def update(self, worker_id: str, entry: DiscoveryEntry, revision: int) -> bool:
        """Record an entry. True: it is more than a renewed lease."""
        known = self._seen.get(worker_id)
        if known is None:
            self._seen[worker_id] = _Seen(entry, revision, self._clock())
            return True
        if entry.epoch < known.entry.epoch or revision == known.revision:
            return False  # of an older incarnation, or seen before
        changed = entry != known.entry
        known.entry, known.revision, known.at = entry, revision, self._clock()
        return changed

    def remove(self, worker_id: str) -> bool:
        """The entry was removed: the worker may come back, but not with an older epoch."""
        known = self._seen.get(worker_id)
        if known is None or known.entry.record is None:
            return False
        known.entry = DiscoveryEntry(known.entry.epoch)
        return True

    def forget(self, worker_id: str) -> None:
        """Forget the worker and its epoch."""
        self._seen.pop(worker_id, None)

    def touch(self) -> None:
        """The reader has just seen everything that discovery holds."""
        now = self._clock()
        if now - self._touched > self._lease / 2:
            for seen in self._seen.values():
                seen.at = now  # nobody could renew meanwhile
        self._touched = now
        self._seen = {w: s for w, s in self._seen.items() if now - s.at < FORGET_SECONDS}

    def silent(self, seconds: float) -> bool:
        """Whether the reader has been out of touch for so long."""
        return self._clock() - self._touched > seconds

    def view(self) -> dict[str, WorkerRecord]:
        return {
            worker_id: seen.entry.record
            for worker_id, seen in self._seen.items()
            if seen.entry.record is not None and self._touched - seen.at < self._lease
        }
