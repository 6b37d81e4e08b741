"""What the kernel gives a process so many of, however small each is: descriptors, and maps.

Connections and shared segments take a descriptor each, so take all there are. Decoded media and
shared segments take a map each; without maps a process can allocate nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import logging
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from triptych.errors import InvalidConfig

USUAL_MAPS = 65530  # of a kernel that does not tell


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit to its hard limit; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_share(part: float) -> int:
    """So many of what this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * part)


def memory_map_share(part: float) -> int:
    """So many of the maps that this process may have."""
    return int(_most_maps() * part)


@functools.cache
def _most_maps() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except (OSError, ValueError):
        return USUAL_MAPS


HUGE = 2 << 20
KEPT = 4 << 20  # bytes that the allocator may keep at the end of a thread's heap
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def allocate_lazily(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def limit_allocator_cache() -> None:
    """Have the allocator return large blocks as soon as they are freed, for this process.

    By itself it keeps, in the heap of each thread, twice the largest that it has ever seen freed,
    up to 64 MiB, and ``give_back`` does not reach that. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, KEPT)
        mallopt(_TRIM_THRESHOLD, KEPT)


def trim_allocator() -> None:
    """Return what the allocator keeps of smaller blocks that were freed.

    Takes milliseconds, in which other threads run on. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def stop_signals() -> list[signal.Signals]:
    """Those that are to be heeded: under ``nohup`` SIGHUP is not."""
    heeded = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heeded.append(signal.SIGHUP)
    return heeded


@contextlib.contextmanager
def on_stop_signal(then: Callable[[], None]) -> Iterator[None]:
    """Inside, each of them calls ``then`` on the running loop."""
    loop, numbers = asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, then)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # to give back what a process holds, once it has decided to end
GIL_SECONDS = 5.0  # more, where code outside of Python lets no thread of ours run


def exit_within(seconds: float, code: int) -> None:
    """Exit with ``code`` after so long: an engine, a disk or a driver may block its closing.

    Where even that thread cannot run, the process exits with code 1, and says where it stood.
    """

    def give_up() -> None:
        log.error("the process could not close within %g s: it exits now", seconds)
        os._exit(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + GIL_SECONDS, exit=True)


@contextlib.contextmanager
def ready_marker(path: str) -> Iterator[Callable[[], None]]:
    """Gives what makes the file. It is gone before, though a killed process left one, and after.

    Without a path nothing is made.
    """
    file = Path(path) if path else None
    if file is None:
        yield lambda: None
        return
    try:
        file.unlink(missing_ok=True)
        file.touch()  # refused now, not after minutes of loading
        file.unlink()
    except OSError as error:
        raise InvalidConfig(f"--ready-file {path} cannot be made: {error.strerror}") from None
    try:
        yield file.touch
    finally:
        file.unlink(missing_ok=True)
