"""Large bodies on their way in: how many bytes of them at once, and how many in a turn of the loop.

A flood of pictures then fills no memory and holds up nobody: who finds no room is not read further
until others have been answered, and who is read shares every turn. Who has the least here comes in
first, so that nobody's flood keeps out others. Small bodies never come here.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import Counter, deque
from typing import Protocol

LARGE = 256 << 10  # bytes of a body from which it needs room here
SLICE = 256 << 10  # bytes that are taken from a socket at once,
LEAST = 16 << 10  # and when the turn's share is used up already
TURN = 1 << 20  # bytes of all large bodies in one turn of the event loop
SHARE = 1 << 20  # bytes, or a quarter, that a body counts as read ahead before it has come
WOKEN = 8  # readers that may go on in the next turn


class BodyReceiver(Protocol):
    """A connection, as it is seen from here."""

    def enter(self) -> None:
        """There is room now."""

    def rest(self) -> None:
        """Read no more,"""

    def wake(self) -> None:
        """until here."""


class _Place:
    """What one body takes up."""

    __slots__ = ("ahead", "size", "whose")

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.size = 0
        self.ahead = 0  # of these bytes: they count as read, and not worked on


class BodyAdmission:
    """``most`` bytes at once, and ``ahead`` of requests that nothing has come of yet: to read more
    than is being worked on only takes time from others. A body that is larger than that comes in
    when no other is there."""

    def __init__(self, loop: AbstractEventLoop, most: int, ahead: int) -> None:
        self._loop = loop
        self._most = most
        self._most_ahead = ahead
        self._inside: dict[BodyReceiver, _Place] = {}
        self._held: Counter[str] = Counter()  # bytes inside, by whose they are
        self._ahead = 0
        self._over: BodyReceiver | None = None  # has grown beyond what there was room for
        self._lines: dict[
            str, dict[BodyReceiver, int]
        ] = {}  # who waits, by whose they are, in order
        self._whose: dict[BodyReceiver, str] = {}
        self._resting: deque[BodyReceiver] = deque()
        self._taken = 0  # bytes in this turn
        self._turning = False
        self.bytes = 0
        self.peak = 0  # the most bytes that there ever were
        self.refused = 0
        self.entered = 0  # bodies that there was room for

    @property
    def waiting(self) -> int:
        return len(self._whose)

    @property
    def counters(self) -> dict[str, float]:
        return {
            "large_bodies_bytes": self.bytes,
            "large_bodies_peak_bytes": self.peak,
            "large_bodies_waiting": self.waiting,
            "large_bodies_refused": self.refused,
        }

    @property
    def slice(self) -> int:
        """Bytes that may be read now."""
        return SLICE if self._taken < TURN else LEAST

    def ask(self, reader: BodyReceiver, size: int, whose: str) -> bool:
        """Whether there is room for so many bytes; if not, ``enter`` is called when there is."""
        if self._is_first(whose) and self._fits(size):
            self._take(reader, size, whose)
            return True
        self._lines.setdefault(whose, {})[reader] = size
        self._whose[reader] = whose
        return False

    def grow(self, reader: BodyReceiver, size: int) -> bool:
        """Whether a body that is coming in may be larger than it was said to be.

        Those inside can't wait for each other. So one of them may go beyond all room.
        """
        place = self._inside[reader]
        if self.bytes + size - place.size > self._most:
            if self._over not in (None, reader):
                return False
            self._over = reader
        self._count(place, size, place.ahead)
        return True

    def progress(self, reader: BodyReceiver, come: int) -> None:
        """A body is slow: of it, only what has come keeps others from being read."""
        place = self._inside[reader]
        self._count(place, place.size, come)
        self._admit()

    def complete(self, reader: BodyReceiver, size: int) -> None:
        """A body is there, and is so large. Harmless for one that is not here."""
        if (place := self._inside.get(reader)) is not None:
            self._count(place, size, size)
            self._admit()

    def answered(self, reader: BodyReceiver) -> None:
        """The first of an answer has come: what was sent has been worked on."""
        if (place := self._inside.get(reader)) is not None:
            self._count(place, place.size, 0)
        self._admit()

    def leave(self, reader: BodyReceiver) -> None:
        """Its bytes are held no more, or it has given up. Harmless for one that is not here."""
        if (whose := self._whose.pop(reader, None)) is not None:
            self._leave_line(reader, whose)
        if (place := self._inside.pop(reader, None)) is not None:
            self._count(place, 0, 0)
        if self._over is reader:
            self._over = None
        self._admit()

    def count(self, size: int) -> bool:
        """So many bytes were read. False: no more in this turn."""
        self._taken += size
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)
        return self._taken < TURN

    def rest(self, reader: BodyReceiver) -> None:
        """Let a reader rest until a later turn."""
        reader.rest()
        self._resting.append(reader)

    def _turn(self) -> None:
        self._taken = 0
        for _ in range(min(WOKEN, len(self._resting))):
            self._resting.popleft().wake()
        self._turning = bool(self._resting)
        if self._turning:
            self._loop.call_soon(self._turn)

    def _fits(self, size: int) -> bool:
        return (not self._inside or self.bytes + size <= self._most) and (
            not self._ahead or self._ahead + _share(size) <= self._most_ahead
        )

    def _is_first(self, whose: str) -> bool:
        """Whether all who wait have more inside."""
        held = self._held[whose]
        return all(held < self._held[other] for other in self._lines)

    def _take(self, reader: BodyReceiver, size: int, whose: str) -> None:
        self.entered += 1
        place = self._inside[reader] = _Place(whose)
        self._count(place, size, _share(size))

    def _count(self, place: _Place, size: int, ahead: int) -> None:
        """So much of a place from now on."""
        self.bytes += size - place.size
        self._ahead += ahead - place.ahead
        self._held[place.whose] += size - place.size
        if not self._held[place.whose]:
            del self._held[place.whose]
        place.size, place.ahead = size, ahead
        self.peak = max(self.peak, self.bytes)

    def _admit(self) -> None:
        """Let in who has the least inside, and of these who came first."""
        while self._lines:
            whose = min(self._lines, key=self._held.__getitem__)
            reader, size = next(iter(self._lines[whose].items()))
            if not self._fits(size):
                return
            del self._whose[reader]
            self._leave_line(reader, whose)
            self._take(reader, size, whose)
            reader.enter()

    def _leave_line(self, reader: BodyReceiver, whose: str) -> None:
        line = self._lines[whose]
        del line[reader]
        if not line:
            del self._lines[whose]


def _share(size: int) -> int:
    return max(min(size, SHARE), size // 4)
