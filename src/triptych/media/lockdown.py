"""Locks a decoding process in: what it may use up, and what it may ask of the kernel.

A decoder that a hostile file has taken over can then still burn its share of time and memory and
answer nonsense, and little more. Knows nothing of media.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import struct
import sys
from collections.abc import Sequence

from triptych.media import landlock, seccomp

# Event loops come first. No more than that: beside an engine whose processes spin while they wait,
# decoding would hardly get a turn.
NICENESS = 4
DESCRIPTORS = 64
OOM_SCORE_ADJ = 500  # of 1000: where memory runs out, the kernel ends this before what serves

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = struct.pack("Ii", 0x20080522, 0)  # the third version of that call; this process
_SYSTEM = (  # what the interpreter and compiled libraries read when they load
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/devices/system",
    "/dev/null",
    "/dev/urandom",
)


def limit_resources(memory: int) -> None:
    """Bound what this process uses up. Its time is bounded from outside, anew for each item."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJ))
    # Not the address space: libraries map far more than they use.
    _limit(resource.RLIMIT_DATA, memory)
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)


def lock_down(readable: Sequence[str]) -> tuple[str, ...]:
    """Take away files, sockets, programs and other processes. Gives the locks that do not hold.

    ``readable``: folders that may still be read, for code that is loaded later.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ("no_new_privs", "landlock", "seccomp")
    lacking = []
    if libc.capset(_CAPABILITIES, bytes(24)) != 0:  # what root could do that others cannot
        lacking.append("capset")
    try:
        landlock.install_landlock([*_SYSTEM, sys.prefix, sys.base_prefix, *readable])
    except OSError as error:
        lacking.append(f"landlock ({error.strerror})")
    try:
        seccomp.install_seccomp()
    except OSError as error:
        lacking.append(f"seccomp ({error.strerror})")
        # The next best: no new process. No new thread either, and root is not held by it.
        _limit(resource.RLIMIT_NPROC, 0)
    return tuple(lacking)


def has_memory_left() -> bool:
    """Whether this process could still have nearly all the memory that it may.

    After an allocation that failed: if so it asked for more than that, else the machine has none.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY:
        return False
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    room = (most - used) // 8 * 7
    return room <= 0 or can_allocate(room)


def can_allocate(size: int) -> bool:
    """Whether so many bytes of memory are to be had, by the limit and by the machine."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(what, (most, most))
