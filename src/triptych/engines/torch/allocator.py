"""Keeps memory that a step has freed for the next step, on a CPU.

The C library gives large blocks back to the kernel, which clears every page when it is asked for
them again: a tenth of the time of a prefill. Only glibc can be told otherwise; others are left as
they are.
"""

from __future__ import annotations

import ctypes

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8

KEPT = 512 << 20  # bytes: more of free memory goes back after all
LARGE = 256 << 20  # blocks of this size, such as the KV cache, are the kernel's as before


def retain_freed_memory() -> bool:
    """Whether it could be told. Threads that are started later share the memory that is kept."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_TRIM_THRESHOLD, KEPT), (_MMAP_THRESHOLD, LARGE), (_ARENA_MAX, 1))
    told = [mallopt(name, value) == 1 for name, value in settings]
    return all(told)
