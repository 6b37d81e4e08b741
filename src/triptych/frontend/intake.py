"""Large bodies on their way in: how many bytes of them at once, and how many in a turn of the loop.

A flood of pictures then fills no memory and holds up nobody: who finds no room is not read further
until others have been answered, and who is read shares every turn. Small bodies never come here.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from typing import Protocol

LARGE = 256 << 10  # bytes of a body from which it needs room here
SLICE = 256 << 10  # bytes that are taken from a socket at once,
LEAST = 16 << 10  # and when the turn's share is used up already
TURN = 1 << 20  # bytes of all large bodies in one turn of the event loop
WOKEN = 8  # readers that may go on in the next turn


class Reader(Protocol):
    """A connection, as it is seen from here."""

    def enter(self) -> None:
        """There is room now."""

    def rest(self) -> None:
        """Read no more,"""

    def wake(self) -> None:
        """until here."""


class Intake:
    """``most`` bytes at once, and ``ahead`` of requests that nothing has come of yet: to read more
    than is being worked on only takes time from others. A body that is larger than that comes in
    when no other is there."""

    def __init__(self, loop: AbstractEventLoop, most: int, ahead: int) -> None:
        self._loop = loop
        self._most = most
        self._most_ahead = ahead
        self._inside: dict[Reader, int] = {}
        self._ahead: dict[Reader, int] = {}  # of these, who has no answer yet
        self._bytes_ahead = 0
        self._waiting: dict[Reader, int] = {}  # who came first is first
        self._resting: deque[Reader] = deque()
        self._taken = 0  # bytes in this turn
        self._turning = False
        self.bytes = 0
        self.peak = 0  # the most bytes that there ever were
        self.refused = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

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

    def ask(self, reader: Reader, size: int) -> bool:
        """Whether there is room for so many bytes; if not, ``enter`` is called when there is."""
        if not self._waiting and self._fits(size):
            self._take(reader, size)
            return True
        self._waiting[reader] = size
        return False

    def correct(self, reader: Reader, size: int) -> None:
        """A body has turned out to be smaller than it might have been."""
        if (asked := self._inside.get(reader)) is not None and size < asked:
            self._inside[reader] = self._ahead[reader] = size
            self.bytes -= asked - size
            self._bytes_ahead -= asked - size
            self._admit()

    def answered(self, reader: Reader) -> None:
        """The first of an answer has come: what was sent has been worked on."""
        self._bytes_ahead -= self._ahead.pop(reader, 0)
        self._admit()

    def leave(self, reader: Reader) -> None:
        """Its bytes are held no more, or it has given up. Harmless for one that is not here."""
        self._waiting.pop(reader, None)
        self.bytes -= self._inside.pop(reader, 0)
        self.answered(reader)

    def count(self, size: int) -> bool:
        """So many bytes were read. False: no more in this turn."""
        self._taken += size
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)
        return self._taken < TURN

    def rest(self, reader: Reader) -> None:
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
            not self._ahead or self._bytes_ahead + size <= self._most_ahead
        )

    def _take(self, reader: Reader, size: int) -> None:
        self._inside[reader] = self._ahead[reader] = size
        self._bytes_ahead += size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _admit(self) -> None:
        while self._waiting:
            reader, size = next(iter(self._waiting.items()))
            if not self._fits(size):
                return
            del self._waiting[reader]
            self._take(reader, size)
            reader.enter()
