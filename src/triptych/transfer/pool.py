"""Segments for re-use: making one costs a page fault for every 4 KiB, taking one from here nothing.

The pool lends memory as an object, which returns by itself when the last view of it is gone: after
a release, in a cancelled encode, during garbage collection. So nobody has to give it back by hand,
and nobody can forget to. Safe to use from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from triptych.host import machine_memory
from triptych.transfer.segment import PAGE, Memory, Segment

SMALLEST_SEGMENT = 64 << 10


def size_class(size: int, smallest: int = SMALLEST_SEGMENT) -> int:
    """Four sizes to the octave from 64 KiB: at most a fifth of a segment is wasted."""
    if size <= smallest:
        return smallest
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def segment_footprint(size: int, smallest: int = SMALLEST_SEGMENT) -> int:
    """Bytes that a segment for so many takes."""
    return PAGE + size_class(size, smallest)


def _to_spare() -> int:
    """Bytes that the machine can give before it starts to kill: all but a fifth of what is left."""
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024 * 4 // 5
    return machine_memory()


def _made(capacity: int, epoch: int) -> Segment:
    if PAGE + capacity > _to_spare():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return Segment(capacity, epoch)


class PoolExhausted(Exception):
    """No memory is left, by our own limit or the machine's."""


class SegmentPool:
    """``limit`` bounds all its bytes, ``idle_limit`` those kept for re-use.

    ``make`` makes a segment of a capacity and an epoch, or raises an OSError.
    """

    def __init__(
        self,
        epoch: int,
        *,
        limit: int,
        idle_limit: int,
        smallest: int = SMALLEST_SEGMENT,
        make: Callable[[int, int], Segment] = _made,
    ) -> None:
        self._epoch = epoch
        self._smallest = smallest
        self._make = make
        self._limit = limit
        self._idle_limit = idle_limit
        self._lock = threading.Lock()
        self._bytes = 0  # of all segments, and of those being made
        self._idle: dict[int, deque[Segment]] = {}  # by size, the longest idle first
        self._idle_bytes = 0
        self._closed = False
        self._lent: dict[int, Segment] = {}  # by id of the memory object
        # A finalizer may run anywhere, even in a thread that holds the lock: it only appends.
        self._returned: deque[Segment] = deque()
        self._discarded: deque[Segment] = deque()
        # Takes discarded segments and may keep them a while: others may still have to release them.
        self.on_discard: Callable[[Segment], None] = lambda segment: None

    @property
    def lent(self) -> int:
        """Segments in use."""
        self.settle()
        return len(self._lent)

    @property
    def idle(self) -> int:
        """Segments kept for re-use."""
        self.settle()
        return sum(map(len, self._idle.values()))

    @property
    def bytes(self) -> int:
        """Of all segments that are not discarded, and of those being made."""
        return self._bytes

    def lend(self, size: int) -> tuple[Memory, Segment]:
        """A segment of at least this many bytes; it returns when the memory's views are gone."""
        segment = self._take(size_class(size, self._smallest))
        memory = type(segment.memory).from_buffer(segment.memory)
        key = id(memory)
        self._lent[key] = segment
        weakref.finalize(memory, _return, self._lent, self._returned, key).atexit = False
        return memory, segment

    def find(self, view: memoryview) -> tuple[Memory, Segment] | None:
        """The lent memory that this is a view of, and its segment; None: it is not ours."""
        memory = view.obj
        segment = self._lent.get(id(memory))
        return (memory, segment) if segment and isinstance(memory, ctypes.Array) else None

    @property
    def has_discarded(self) -> bool:
        """Whether ``clean`` has something to do."""
        return bool(self._discarded)

    def clean(self) -> None:
        """Unmap discarded segments. Takes the kernel 0.7 ms a MiB: not for the event loop."""
        while self._discarded:
            self.on_discard(self._discarded.pop())

    def settle(self) -> None:
        """Make returned segments available, and discard those that have been idle longest."""
        with self._lock:
            while self._returned:
                segment = self._returned.popleft()
                segment.idle_since = time.monotonic()
                self._idle.setdefault(segment.capacity, deque()).append(segment)
                self._idle_bytes += segment.capacity
            self._trim(0 if self._closed else self._idle_limit)

    def trim(self, seconds: float) -> None:
        """Discard what has been idle for so long: a burst's memory is not kept for ever."""
        self.settle()
        end = time.monotonic() - seconds
        with self._lock:
            while self._idle_bytes and self._coldest()[0].idle_since <= end:
                self._discard_first(self._coldest())

    def close(self) -> None:
        """Shut out readers and discard what is idle. Views of lent memory stay readable."""
        self._closed = True
        for segment in list(self._lent.values()):
            segment.close()
        self.settle()

    def _take(self, capacity: int) -> Segment:
        self.settle()
        size = PAGE + capacity
        with self._lock:
            if shelf := self._idle.get(capacity):
                self._idle_bytes -= capacity
                return shelf.pop()  # the warmest
            if tight := self._bytes + size > self._limit:
                if (larger := self._larger(capacity)) is not None:
                    return larger
                self._trim(0)  # frees idle memory of other sizes
            if self._closed or self._bytes + size > self._limit:
                raise PoolExhausted(f"{size} bytes over {self._bytes} of {self._limit}")
            self._bytes += size
        if tight:
            self.clean()
        try:  # outside of the lock: the kernel clears every page
            return self._make(capacity, self._epoch)
        except OSError as error:
            with self._lock:
                self._bytes -= size
            raise PoolExhausted(str(error)) from None

    def _larger(self, capacity: int) -> Segment | None:
        """The smallest idle segment of more than ``capacity`` bytes and at most twice as many: a
        segment that stays in use for long must not waste much memory."""
        sizes = (size for size, shelf in self._idle.items() if shelf)
        fits = (size for size in sizes if capacity < size <= 2 * capacity)
        size = min(fits, default=0)
        self._idle_bytes -= size
        return self._idle[size].pop() if size else None

    def _trim(self, limit: int) -> None:
        while self._idle_bytes > limit:
            self._discard_first(self._coldest())

    def _coldest(self) -> deque[Segment]:
        """The size whose first segment has been idle longest."""
        return min(filter(None, self._idle.values()), key=lambda shelf: shelf[0].idle_since)

    def _discard_first(self, shelf: deque[Segment]) -> None:
        segment = shelf.popleft()
        segment.close()
        self._idle_bytes -= segment.capacity
        self._bytes -= PAGE + segment.capacity
        self._discarded.append(segment)


def _return(lent: dict[int, Segment], returned: deque[Segment], key: int) -> None:
    returned.append(lent.pop(key))
