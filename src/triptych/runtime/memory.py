"""Memory for a large thing that is about to come: nothing of it is there before it is written to.

In huge pages where the kernel gives them: to fault small ones in takes longer than to fill them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE = 2 << 20
KEPT = 4 << 20  # bytes that the allocator may keep at the end of a thread's heap
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def blank(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def keep_little() -> None:
    """Have the allocator return large blocks as soon as they are freed, for this process.

    By itself it keeps, in the heap of each thread, twice the largest that it has ever seen freed,
    up to 64 MiB, and ``give_back`` does not reach that. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, KEPT)
        mallopt(_TRIM_THRESHOLD, KEPT)


def give_back() -> None:
    """Return what the allocator keeps of smaller blocks that were freed.

    Takes milliseconds, in which other threads run on. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
