"""Request bodies on their way in: their memory, and how many large ones are received at once.

A flood of pictures fills no memory and delays nobody: a large body without admission is not read
from its socket until other requests have been processed, and all that are read share every turn of
the event loop. The owner with the fewest bytes is admitted first, so that nobody's flood keeps
others out. Small bodies need no admission.
"""

from __future__ import annotations

import mmap
from asyncio import AbstractEventLoop
from collections import Counter, deque
from typing import Protocol

from triptych.runtime.process import allocate_lazily

SMALL_BODY = 64 << 10  # bytes up to which a body gets memory of its own size
BUFFER_SIZE = 2 << 20  # of buffers that are used again
MAX_FREE_BUFFERS = 16
LARGE_BODY = 256 << 10  # bytes from which a body needs admission
READ_BYTES = 256 << 10  # that are read from a socket at once,
MIN_READ_BYTES = 16 << 10  # and once the turn's bytes are used up
TURN_BYTES = 1 << 20  # of all large bodies in one turn of the event loop
MIN_UNPROCESSED = 1 << 20  # bytes, or a quarter, that a body counts before it has arrived
RESUMED_PER_TURN = 8  # receivers that continue in the next turn

BodyBuffer = bytearray | mmap.mmap


class BufferPool:
    """Memory for bodies, used again and again.

    New memory is costly: the kernel zeroes it and faults its pages in, which for a picture takes
    longer than reading it. A buffer that something still has a view of is never used again.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def acquire(self, length: int) -> BodyBuffer:
        """Memory of at least ``length`` bytes; that of a very large body is mapped as it fills."""
        if length <= SMALL_BODY:
            return bytearray(length)
        if length > BUFFER_SIZE:
            try:
                return allocate_lazily(length)
            except OSError as error:
                raise MemoryError(str(error)) from None
        return self._free.pop() if self._free else bytearray(BUFFER_SIZE)

    def release(self, buffer: BodyBuffer) -> None:
        if (
            not isinstance(buffer, bytearray)
            or len(buffer) != BUFFER_SIZE
            or len(self._free) == MAX_FREE_BUFFERS
        ):
            return
        try:
            buffer.append(buffer.pop())  # raises while there is a view of it
        except BufferError:
            return
        self._free.append(buffer)

    def clear(self) -> None:
        self._free.clear()


class BodyReceiver(Protocol):
    """A connection that receives a body, as BodyAdmission sees it."""

    def admitted(self) -> None:
        """The body may be received now."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Reservation:
    """The bytes that one admitted body counts."""

    __slots__ = ("owner", "size", "unprocessed")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.size = 0
        self.unprocessed = 0  # of these: they count as received and not yet processed


class BodyAdmission:
    """Admits large bodies: ``max_bytes`` at once, and ``max_unprocessed`` of requests without a
    first token, since receiving more than is being processed only takes time from others. A body
    larger than that is admitted when there is no other.
    """

    def __init__(self, loop: AbstractEventLoop, max_bytes: int, max_unprocessed: int) -> None:
        self._loop = loop
        self._max_bytes = max_bytes
        self._max_unprocessed = max_unprocessed
        self._reservations: dict[BodyReceiver, _Reservation] = {}
        self._owner_bytes: Counter[str] = Counter()
        self._unprocessed = 0
        self._exceeding: BodyReceiver | None = None  # has grown beyond max_bytes
        self._queues: dict[str, dict[BodyReceiver, int]] = {}  # sizes in order, by owner
        self._queued_owners: dict[BodyReceiver, str] = {}
        self._paused: deque[BodyReceiver] = deque()
        self._turn_bytes = 0  # read in this turn
        self._turn_scheduled = False
        self.bytes = 0
        self.peak_bytes = 0
        self.refused = 0
        self.admissions = 0

    @property
    def waiting(self) -> int:
        return len(self._queued_owners)

    @property
    def counters(self) -> dict[str, float]:
        return {
            "large_bodies_bytes": self.bytes,
            "large_bodies_peak_bytes": self.peak_bytes,
            "large_bodies_waiting": self.waiting,
            "large_bodies_refused": self.refused,
        }

    @property
    def read_bytes(self) -> int:
        """How many bytes a receiver may read now."""
        return READ_BYTES if self._turn_bytes < TURN_BYTES else MIN_READ_BYTES

    def admit(self, receiver: BodyReceiver, size: int, owner: str) -> bool:
        """Admit a body, or queue it: then ``receiver.admitted`` is called later."""
        if self._is_next(owner) and self._fits(size):
            self._reserve(receiver, size, owner)
            return True
        self._queues.setdefault(owner, {})[receiver] = size
        self._queued_owners[receiver] = owner
        return False

    def grow(self, receiver: BodyReceiver, size: int) -> bool:
        """Whether an admitted body may be larger than announced.

        Admitted bodies can't wait for each other, so one of them may exceed the limit.
        """
        reservation = self._reservations[receiver]
        if self.bytes + size - reservation.size > self._max_bytes:
            if self._exceeding not in (None, receiver):
                return False
            self._exceeding = receiver
        self._resize(reservation, size, reservation.unprocessed)
        return True

    def slow_down(self, receiver: BodyReceiver, received: int) -> None:
        """A body arrives slowly: only what has arrived keeps others from being admitted."""
        reservation = self._reservations[receiver]
        self._resize(reservation, reservation.size, received)
        self._admit_queued()

    def complete(self, receiver: BodyReceiver, size: int) -> None:
        """A body has arrived whole. Harmless for one without admission."""
        if (reservation := self._reservations.get(receiver)) is not None:
            self._resize(reservation, size, size)
            self._admit_queued()

    def processed(self, receiver: BodyReceiver) -> None:
        """The response has started. Harmless for one without admission."""
        if (reservation := self._reservations.get(receiver)) is not None:
            self._resize(reservation, reservation.size, 0)
        self._admit_queued()

    def release(self, receiver: BodyReceiver) -> None:
        """The memory is free, or the client gave up. Harmless for one without admission."""
        if (owner := self._queued_owners.pop(receiver, None)) is not None:
            self._remove_queued(receiver, owner)
        if (reservation := self._reservations.pop(receiver, None)) is not None:
            self._resize(reservation, 0, 0)
        if self._exceeding is receiver:
            self._exceeding = None
        self._admit_queued()

    def count_read(self, size: int) -> bool:
        """Count bytes that were read; return whether more may be read in this turn."""
        self._turn_bytes += size
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._next_turn)
        return self._turn_bytes < TURN_BYTES

    def pause(self, receiver: BodyReceiver) -> None:
        """Pause a receiver until a later turn."""
        receiver.pause_reading()
        self._paused.append(receiver)

    def _next_turn(self) -> None:
        self._turn_bytes = 0
        for _ in range(min(RESUMED_PER_TURN, len(self._paused))):
            self._paused.popleft().resume_reading()
        self._turn_scheduled = bool(self._paused)
        if self._turn_scheduled:
            self._loop.call_soon(self._next_turn)

    def _fits(self, size: int) -> bool:
        return (not self._reservations or self.bytes + size <= self._max_bytes) and (
            not self._unprocessed
            or self._unprocessed + _expected_unprocessed(size) <= self._max_unprocessed
        )

    def _is_next(self, owner: str) -> bool:
        """Whether all owners that wait have more bytes."""
        own = self._owner_bytes[owner]
        return all(own < self._owner_bytes[other] for other in self._queues)

    def _reserve(self, receiver: BodyReceiver, size: int, owner: str) -> None:
        self.admissions += 1
        reservation = self._reservations[receiver] = _Reservation(owner)
        self._resize(reservation, size, _expected_unprocessed(size))

    def _resize(self, reservation: _Reservation, size: int, unprocessed: int) -> None:
        owner = reservation.owner
        self.bytes += size - reservation.size
        self._unprocessed += unprocessed - reservation.unprocessed
        self._owner_bytes[owner] += size - reservation.size
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]
        reservation.size, reservation.unprocessed = size, unprocessed
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _admit_queued(self) -> None:
        """Admit the owner with the fewest bytes first, and its bodies in order."""
        while self._queues:
            owner = min(self._queues, key=self._owner_bytes.__getitem__)
            receiver, size = next(iter(self._queues[owner].items()))
            if not self._fits(size):
                return
            del self._queued_owners[receiver]
            self._remove_queued(receiver, owner)
            self._reserve(receiver, size, owner)
            receiver.admitted()

    def _remove_queued(self, receiver: BodyReceiver, owner: str) -> None:
        queue = self._queues[owner]
        del queue[receiver]
        if not queue:
            del self._queues[owner]


def _expected_unprocessed(size: int) -> int:
    return max(min(size, MIN_UNPROCESSED), size // 4)
