"""This process: its limits, its memory, the signals that stop it, and its exit."""

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

log = logging.getLogger(__name__)

DEFAULT_MEMORY_MAPS = 65530  # where the kernel does not say
HUGE_PAGE = 2 << 20
ALLOCATOR_CACHE = 4 << 20  # bytes that the allocator may keep at the end of a thread's heap
EXIT_NATS_LOST = 5  # of a frontend that reaches no workers any more, or a worker no frontends
CLOSE_SECONDS = 10.0  # for a process to release what it holds, once it has decided to exit
GIL_SECONDS = 5.0  # more, where native code holds the interpreter lock
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard limit; children inherit it. Connections and
    shared segments take one each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_share(part: float) -> int:
    """This part of the files that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * part)


def memory_map_share(part: float) -> int:
    """This part of the memory maps that the process may have. Decoded media and shared segments
    take one each; without any left the process cannot allocate."""
    return int(_max_memory_maps() * part)


@functools.cache
def _max_memory_maps() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except (OSError, ValueError):
        return DEFAULT_MEMORY_MAPS


def allocate_lazily(size: int) -> mmap.mmap:
    """Memory whose pages the kernel provides when they are written. Large ones are huge pages where
    the kernel has them: faulting small pages in takes longer than filling them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def limit_allocator_cache() -> None:
    """Make the allocator return large blocks to the system as soon as they are freed.

    By default glibc keeps, in each thread's heap, twice the largest block ever freed, up to 64 MiB,
    which ``trim_allocator`` does not reach. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, ALLOCATOR_CACHE)
        mallopt(_TRIM_THRESHOLD, ALLOCATOR_CACHE)


def trim_allocator() -> None:
    """Return the freed smaller blocks that the allocator keeps.

    Takes milliseconds, while other threads run. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask the process to stop: SIGTERM, SIGINT (Ctrl-C), and SIGHUP when its
    terminal closes, unless it runs under ``nohup``."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def on_stop_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Within the scope, each stop signal calls ``callback`` on the running loop."""
    loop, numbers = asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def exit_within(seconds: float, code: int) -> None:
    """Exit with ``code`` after so long even if closing blocks: an engine, a disk or a driver may.

    If native code keeps that thread from running, the process exits with code 1 and prints its
    stacks.
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
    """Yields a function that creates the file ``path``, for a container's readiness probe.

    The scope removes the file at its start, as a killed process may have left it, and at its end.
    Without a path the function does nothing.
    """
    file = Path(path) if path else None
    if file is None:
        yield lambda: None
        return
    try:
        file.unlink(missing_ok=True)
        file.touch()  # fail now, not after minutes of loading
        file.unlink()
    except OSError as error:
        raise InvalidConfig(f"--ready-file {path} cannot be created: {error.strerror}") from None
    try:
        yield file.touch
    finally:
        file.unlink(missing_ok=True)
