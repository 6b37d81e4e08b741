"""Memory for a large thing that is about to come: nothing of it is there before it is written to.

In huge pages where the kernel gives them: to fault small ones in takes longer than to fill them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE = 2 << 20


def blank(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back() -> None:
    """Return freed memory to the system: the allocator keeps it, for each thread that had some.

    Takes milliseconds, in which other threads run on. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
