"""What one reader has seen of workers far away, judged by the reader's own clock and no other.

A worker lives as long as something new of it was seen within a lease. Time counts only while the
reader is in touch with discovery: while it is not, its last view stays, and once it is again,
everyone in that view has one lease to show up. Where the news come from, others know.
"""

from __future__ import annotations

from msgspec import Struct

from triptych.messages import WorkerRecord
from triptych.runtime.lease import LEASE_SECONDS, Clock, boottime

FORGET_SECONDS = 60.0  # after which the epochs of workers that are gone are forgotten


class Entry(Struct, frozen=True):
    """What stands in discovery for a worker: its newest epoch, and a record while it serves."""

    epoch: int
    record: WorkerRecord | None = None


class _Sight(Struct):
    entry: Entry
    revision: int
    at: float  # when something new was last seen of it


class Sightings:
    def __init__(self, lease: float = LEASE_SECONDS, clock: Clock = boottime) -> None:
        self._lease = lease
        self._clock = clock
        self._sights: dict[str, _Sight] = {}
        self._touched = float("-inf")

    def see(self, worker_id: str, entry: Entry, revision: int) -> bool:
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
        known.entry = Entry(known.entry.epoch)
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
