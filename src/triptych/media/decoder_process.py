"""One decoding process, as its pool sees it. Every method blocks: call it in a thread.

The process starts clean: none of our memory, no environment, no descriptor but its socket.
Every message from it is checked, since a hostile file may have taken it over. After it raised
DecoderProcessLost the process is dead and reaped.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

import triptych
from triptych import errors
from triptych.config import Limits
from triptych.errors import (
    BrokenInstallation,
    InvalidMedia,
    MediaError,
    MediaTooLarge,
    rebuild_error,
)
from triptych.media.base import PreparedMedia
from triptych.media.decoder_channel import (
    DecoderChannel,
    DecoderCrashed,
    DecodeRequest,
    DecodeResult,
    DecoderMessage,
    DecoderOutOfMemory,
    DecoderReady,
    DecoderSetup,
    LibraryMismatch,
    MediaRejected,
    ResultWritten,
)
from triptych.media.process_monitor import DecoderProcessLost, LossCause, ProcessMonitor
from triptych.messages import Failure, MediaItem, MediaKind, TensorSpec
from triptych.observe.log import RateLimitedLog
from triptych.transfer.base import Array, aligned_offsets, byte_count
from triptych.transfer.segment import Memory, byte_view, map_file

DECODER_START_SECONDS = 60.0  # for the libraries to load, on a busy machine
MAX_ITEMS_PER_PROCESS = 1000  # for one process: libraries leak
REPLACE_AFTER_ITEMS = 950  # from then on its successor is started
CLOCK_PER_CPU_SECOND = (
    3.0  # time on the clock for an item, in times of the most CPU time of any kind
)
KILL_SECONDS = 5.0  # for a process that was killed to be gone

_NAME = "triptych-media"
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_KEY_BYTES = 32
_PACKAGES = frozenset({"av", "numpy", "pillow", "safetensors", "torch"})
_PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "sounds"}
# No file brings these about: a locked-in process can send no signal, and does not stop itself.
_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"})

_log = logging.getLogger(__name__)


class DecoderProcess:
    def __init__(
        self,
        setup: DecoderSetup,
        spawned: Callable[[DecoderProcess], None] = lambda child: None,
        misfits: RateLimitedLog | None = None,
    ) -> None:
        """Start it, and wait until it is locked in. OSError: there is no process to be had.

        ``spawned`` is called when there is a process, which may be killed from then on. ``misfits``
        limits what is logged about files that raise errors like those of a broken library.
        BrokenInstallation: a library that it needs is missing or does not fit.
        """
        self._limits = setup.limits
        self._served = 0
        self._misfits = misfits or mismatch_log()
        self._said: msgspec.msgpack.Decoder[DecoderMessage] = msgspec.msgpack.Decoder(
            DecoderMessage
        )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs.fileno())
            except OSError:
                ours.close()
                raise
        self._watch = ProcessMonitor(self._process.pid, DECODER_START_SECONDS)
        self._wire = DecoderChannel(ours, self._watch)
        spawned(self)
        try:
            self._wire.send(setup)
            ready = self._hear()
            if isinstance(ready, LibraryMismatch):
                self.close()
                raise self._broken(ready, "media")
            if not isinstance(ready, DecoderReady):
                raise ValueError("it does not say that it is ready")
        except (OSError, EOFError, ValueError, DecoderProcessLost) as error:
            raise self._lost(error) from None
        self.lacking = ready.lacking

    def prepare(
        self, item: MediaItem, given_back: Callable[[list[Memory]], None]
    ) -> PreparedMedia | Failure:
        """What became of an item.

        ``given_back`` gets the memory of its arrays when the last view of them is gone, in any
        thread; emptying the list unmaps it. ServiceError: there is no memory to be had.
        """
        try:
            self._served += 1
            self._grant_time(item)
            self._wire.send(DecodeRequest(item.kind, item.form, len(item.data)), item.data)
            said = self._hear()
            if isinstance(said, LibraryMismatch):
                return self._misfit(said, item).failure()
            if isinstance(said, MediaRejected | DecoderOutOfMemory):
                return _failure(said, item, self._limits)
            if not isinstance(said, DecodeResult):
                raise ValueError("it neither offers nor refuses")
            _check(said, item, self._limits.decode_bytes)
            memory = self._filled(said.size)
        except (OSError, EOFError, ValueError, DecoderProcessLost) as error:
            raise self._lost(error) from None
        # Views are of a second object over the same memory, so that the first outlives them: to
        # unmap much memory takes long, and the last view may die on an event loop.
        seen = (ctypes.c_ubyte * said.size).from_address(ctypes.addressof(memory))
        weakref.finalize(seen, given_back, [memory]).atexit = False
        arrays = tuple(_cut(byte_view(seen), part) for part in said.parts)
        return PreparedMedia(said.meta, arrays, said.cost, said.encoded)

    @property
    def fresh(self) -> bool:
        """Whether it lives, and has not served so long that leaks could matter."""
        return self._process.poll() is None and self._served < MAX_ITEMS_PER_PROCESS

    @property
    def worn(self) -> bool:
        """Whether it will soon be fresh no more."""
        return self._served >= REPLACE_AFTER_ITEMS

    def kill(self) -> None:
        """From any thread: whoever waits for the process then finds it lost."""
        self._process.kill()

    def close(self) -> None:
        """Kill it, and leave nothing of it behind."""
        self._wire.door.close()
        self._process.kill()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel holds it, in a call that cannot be ended
            _log.error("decoding process %d does not end", self._process.pid)

    def _grant_time(self, item: MediaItem) -> None:
        cpu = cpu_limit(item, self._limits)
        # By the longest of all: on busy cores a short item may wait as long as any other.
        self._watch.grant(cpu, CLOCK_PER_CPU_SECOND * max(cpu, self._limits.decode_seconds))

    def _misfit(self, said: LibraryMismatch, item: MediaItem) -> BrokenInstallation | InvalidMedia:
        if not said.by_file:
            return self._broken(said, _PLURALS[item.kind])
        self._misfits.warning("file", f"a decoder failed on a client's {item.kind}: {said.text}")
        return InvalidMedia(f"The {item.kind} could not be decoded.")

    def _broken(self, said: LibraryMismatch, what: str) -> BrokenInstallation:
        library = "a library that is installed"
        if said.package in _PACKAGES:
            library = f"the installed {said.package} {_version(said.package)}"
        self._misfits.warning(
            "installation",
            f"{what} cannot be decoded: {library} is broken or does not fit: {said.text}",
        )
        return BrokenInstallation(
            f"This server cannot decode {what}: {library} is broken or does not fit this version "
            "of Triptych. Its operator can run `triptych doctor`."
        )

    def _filled(self, size: int) -> Memory:
        """Memory that the process has written what it made to, and can change no more."""
        try:
            fd = _memory(size)
        except OSError as error:
            self.close()
            raise errors.OutOfMemory(
                "There is no memory for decoded media at the moment. Try again later."
            ) from error
        try:
            self._wire.send_file(fd)
            if not isinstance(self._hear(), ResultWritten):
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

    def _hear(self) -> DecoderMessage:
        said: DecoderMessage = self._wire.receive(self._said)
        if isinstance(said, DecoderCrashed):
            raise ValueError(said.text)
        return said

    def _lost(self, error: Exception) -> DecoderProcessLost:
        code = self._ended() if isinstance(error, EOFError | ConnectionError) else None
        self.close()
        if isinstance(error, DecoderProcessLost):
            return error
        if code is None:
            return DecoderProcessLost(str(error) or "it hung up")
        if code >= 0:
            return DecoderProcessLost(f"it exited with code {code}")
        name = signal.Signals(-code).name
        cause: LossCause = "killed" if name in _FROM_OUTSIDE else "crashed"
        return DecoderProcessLost(f"it was ended by {name}", "cpu" if name == "SIGXCPU" else cause)

    def _ended(self) -> int | None:
        """How a process ended that has let go of its socket; None: it has not."""
        try:
            return self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return None


def mismatch_log() -> RateLimitedLog:
    return RateLimitedLog(_log, "file", "installation")


def cpu_limit(item: MediaItem, limits: Limits) -> float:
    """How much CPU time an item may take."""
    if item.form == "file" and item.kind == "image":
        return limits.decode_image_seconds
    if item.form == "file" and item.kind == "audio":
        return limits.decode_audio_seconds
    return limits.decode_seconds


def _spawn(door: int) -> subprocess.Popen[bytes]:
    # Not the words of our environment: they hold secrets. The search path as it is here, so that
    # the process finds the same code; -P and -s add nothing to it.
    environment = {
        "PYTHONPATH": os.pathsep.join(import_folders()),
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


def import_folders() -> tuple[str, ...]:
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


def _check(offered: DecodeResult, item: MediaItem, most: int) -> None:
    """ValueError for an offer that no sound process makes."""
    meta = offered.meta
    if not 0 < offered.size <= most:
        raise ValueError(f"it offers {offered.size} bytes")
    if len(meta.key) != _KEY_BYTES or meta.kind != item.kind:
        raise ValueError("what it offers is not what it was given")
    # A token, or a unit of the encoder's work, stands for a byte at least.
    if not 0 < meta.tokens <= offered.size or not 0 <= offered.cost <= offered.size:
        raise ValueError(f"it offers {meta.tokens} tokens of {offered.size} bytes")
    offsets, size = aligned_offsets(byte_count(part.dtype, part.shape) for part in offered.parts)
    if size != offered.size or any(
        part.offset != offset for part, offset in zip(offered.parts, offsets, strict=True)
    ):
        raise ValueError("its arrays do not lie as they should")


def _cut(view: memoryview, part: TensorSpec) -> Array:
    end = part.offset + byte_count(part.dtype, part.shape)
    return Array(view[part.offset : end], part.dtype, part.shape)


def _failure(said: MediaRejected | DecoderOutOfMemory, item: MediaItem, limits: Limits) -> Failure:
    """What a process says of an item that it does not prepare, measured."""
    match said:
        case DecoderOutOfMemory(own_limit=True):
            return MediaTooLarge(
                f"To decode the {item.kind} takes more memory than a file may have here "
                f"({limits.decode_bytes >> 20} MiB). Send a smaller one."
            ).failure()
        case DecoderOutOfMemory():
            return errors.OutOfMemory(
                f"There is no memory to decode the {item.kind} at the moment. Try again later."
            ).failure()
    # A process may refuse a file, and nothing else.
    if isinstance(rebuild_error(said.failure), MediaError):
        return said.failure
    return InvalidMedia(said.failure.message).failure()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(missing)"
