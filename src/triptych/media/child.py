"""One decoding process, seen from its pool. Blocks, so it is for a thread.

The process is spawned clean: no memory of ours, no environment, no descriptor but its socket. What
it says is checked, for a hostile file may speak through it. After ChildLost it is dead and reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

import triptych
from triptych.errors import InvalidMedia, MediaError, ServiceError, revive
from triptych.media.base import Prepared
from triptych.media.wire import (
    Given,
    LastWords,
    Offered,
    Ready,
    Refused,
    Said,
    Setup,
    Wire,
    Written,
)
from triptych.messages import Failure, MediaItem, Part
from triptych.transfer.base import Array
from triptych.transfer.layout import byte_count, stacked
from triptych.transfer.segment import Memory, flat, map_file

START_SECONDS = 60.0  # for the libraries to load, on a busy machine
MOST_ITEMS = 1000  # for one process: libraries leak
WORN_ITEMS = 950  # from then on its successor is started
PATIENCE = 3.0  # wall-clock time for an item, in times of its CPU time

_NAME = "triptych-media"
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_KEY_BYTES = 32


class ChildLost(Exception):
    """The process died, took too long or talked nonsense. The reason is for the log alone."""


class Child:
    def __init__(self, setup: Setup) -> None:
        """Start it, and wait until it is locked in. OSError: there is no process to be had."""
        self._limits = setup.limits
        self._served = 0
        self._said: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        with theirs:
            try:
                self._process = _spawn(theirs.fileno())
            except OSError:
                ours.close()
                raise
        try:
            self._wire.until(time.monotonic() + START_SECONDS)
            self._wire.send(setup)
            ready = self._hear()
            if not isinstance(ready, Ready):
                raise ValueError("it does not say that it is ready")
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from None
        self.lacking = ready.lacking

    def prepare(
        self, item: MediaItem, given_back: Callable[[list[Memory]], None]
    ) -> Prepared | Failure:
        """What became of an item.

        ``given_back`` gets the memory of its arrays when the last view of them is gone, in any
        thread; emptying the list unmaps it. ServiceError: there is no memory to be had.
        """
        try:
            self._served += 1
            self._grant_time()
            self._wire.send(Given(item.kind, item.form, len(item.data)), item.data)
            said = self._hear()
            if isinstance(said, Refused):
                return _believed(said.failure)
            if not isinstance(said, Offered):
                raise ValueError("it neither offers nor refuses")
            _check(said, item, self._limits.decode_bytes)
            memory = self._filled(said.size)
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from None
        # Views are of a second object over the same memory, so that the first outlives them: to
        # unmap much memory takes long, and the last view may die on an event loop.
        seen = (ctypes.c_ubyte * said.size).from_address(ctypes.addressof(memory))
        weakref.finalize(seen, given_back, [memory]).atexit = False
        arrays = tuple(_cut(flat(seen), part) for part in said.parts)
        return Prepared(said.meta, arrays, said.cost, said.encoded)

    @property
    def fresh(self) -> bool:
        """Whether it lives, and has not served so long that leaks could matter."""
        return self._process.poll() is None and self._served < MOST_ITEMS

    @property
    def worn(self) -> bool:
        """Whether it will soon be fresh no more."""
        return self._served >= WORN_ITEMS

    def kill(self) -> None:
        """From any thread: whoever waits for the process then finds it lost."""
        self._process.kill()

    def close(self) -> None:
        """Kill it, and leave nothing of it behind."""
        self._wire.door.close()
        self._process.kill()
        self._process.wait()

    def _grant_time(self) -> None:
        """CPU time by the kernel, for this item alone; wall-clock time by us, some times more."""
        seconds = self._limits.decode_seconds
        pid = self._process.pid
        self._wire.until(time.monotonic() + PATIENCE * seconds)
        with contextlib.suppress(OSError):  # a dead one, or a kernel that does not tell
            used = time.clock_gettime(((~pid) << 3) | 2)  # the CPU clock of that process
            _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
            soft = math.ceil(used + seconds)
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.prlimit(pid, resource.RLIMIT_CPU, (soft, hard))

    def _filled(self, size: int) -> Memory:
        """Memory that the process has written what it made to, and can change no more."""
        try:
            fd = _memory(size)
        except OSError as error:
            self.close()
            raise ServiceError("There is no memory for decoded media at the moment.") from error
        try:
            self._wire.send_file(fd)
            if not isinstance(self._hear(), Written):
                raise ValueError("it does not say that it has written")
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL)  # fails if it could still be written to
            # Opened anew for reading: older kernels map a sealed file in no other way.
            reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return map_file(reading, size, writable=False)
            finally:
                os.close(reading)
        finally:
            os.close(fd)

    def _hear(self) -> Said:
        said: Said = self._wire.receive(self._said)
        if isinstance(said, LastWords):
            raise ValueError(said.text)
        return said

    def _lost(self, error: Exception) -> ChildLost:
        self.close()
        code = self._process.returncode
        if isinstance(error, TimeoutError):
            return ChildLost("it took too long")
        if isinstance(error, ValueError):
            return ChildLost(str(error))
        if code < 0:
            return ChildLost(f"it was ended by {signal.Signals(-code).name}")
        return ChildLost(f"it exited with code {code}")


def _spawn(door: int) -> subprocess.Popen[bytes]:
    # Not the words of our environment: they hold secrets. The search path as it is here, so that
    # the process finds the same code; -P and -s add nothing to it.
    environment = {
        "PYTHONPATH": os.pathsep.join(code_folders()),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Blocks of 16 MB that Pillow keeps: to get fresh ones costs as much as decoding a JPEG.
        "PILLOW_BLOCKS_MAX": "4",
    }
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = libraries
    words = [str(door), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-s", "-P", "-m", "triptych.media.sandbox", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(door,),
        cwd="/",
        env=environment,
        # Ctrl-C is for us: the process ends when we do. No session of its own: Linux shares out
        # cores by sessions, and one process alone in its own waited for seconds on busy cores.
        process_group=0,
    )


def code_folders() -> tuple[str, ...]:
    """Where modules are found, but for the folders that we and our script were started in."""
    own = str(Path(triptych.__file__).parent.parent)
    chance = {str(Path.cwd()), str(Path(sys.argv[0]).absolute().parent)}
    found = (path for path in sys.path if Path(path).is_absolute() and path not in chance)
    return tuple(dict.fromkeys((own, *found)))


def _memory(size: int) -> int:
    """A descriptor of so much anonymous memory, all of it there, of a size that stays."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check(offered: Offered, item: MediaItem, most: int) -> None:
    """ValueError for an offer that no sound process makes."""
    meta = offered.meta
    if not 0 < offered.size <= most:
        raise ValueError(f"it offers {offered.size} bytes")
    if len(meta.key) != _KEY_BYTES or meta.kind != item.kind:
        raise ValueError("what it offers is not what it was given")
    # A token, or a unit of the encoder's work, stands for a byte at least.
    if not 0 < meta.tokens <= offered.size or not 0 <= offered.cost <= offered.size:
        raise ValueError(f"it offers {meta.tokens} tokens of {offered.size} bytes")
    offsets, size = stacked(byte_count(part.dtype, part.shape) for part in offered.parts)
    if size != offered.size or any(
        part.offset != offset for part, offset in zip(offered.parts, offsets, strict=True)
    ):
        raise ValueError("its arrays do not lie as they should")


def _cut(view: memoryview, part: Part) -> Array:
    end = part.offset + byte_count(part.dtype, part.shape)
    return Array(view[part.offset : end], part.dtype, part.shape)


def _believed(failure: Failure) -> Failure:
    """A process may refuse a file, and nothing else."""
    error = revive(failure)
    if isinstance(error, MediaError):
        return failure
    return InvalidMedia(failure.message).failure()
