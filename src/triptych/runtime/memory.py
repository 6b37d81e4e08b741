"""Memory for a large thing that is about to come: nothing of it is there before it is written to.

In huge pages where the kernel gives them: to fault small ones in takes longer than to fill them.
"""

from __future__ import annotations

import contextlib
import mmap

HUGE = 2 << 20


def blank(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
