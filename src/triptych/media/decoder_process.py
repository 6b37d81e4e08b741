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
import weakref
from collections.abc import Callable

import msgspec

from triptych import errors
from triptych.config import Limits
from triptych.errors import (
    BrokenInstallation,
    InvalidMedia,
    MediaError,
    MediaTooLarge,
    rebuild_error,
)
from triptych.media import lockdown
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
from triptych.messages import PLURALS, Failure, MediaItem, TensorSpec
from triptych.observe.log import RateLimitedLog
from triptych.transfer.base import Array, aligned_offsets, byte_count
from triptych.transfer.segment import Memory, byte_view, map_sealed_file

DECODER_START_SECONDS = 60.0  # for the libraries to load, on a busy machine
MAX_ITEMS_PER_PROCESS = 1000  # libraries leak
REPLACE_AFTER_ITEMS = 950  # from then on its successor is started
CLOCK_PER_CPU_SECOND = 3.0  # wall-clock time of an item, per second of the longest CPU limit
KILL_SECONDS = 5.0  # for a killed process to be gone

SANDBOX = "triptych.media.sandbox"
_NAME = "triptych-media"
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_KEY_BYTES = 32
_PACKAGES = frozenset({"av", "numpy", "pillow", "safetensors", "torch"})
# A file cannot cause these: a locked down process can send no signal, and does not stop itself.
_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"})

_log = logging.getLogger(__name__)


class DecoderProcess:
    def __init__(
        self,
        setup: DecoderSetup,
        on_spawn: Callable[[DecoderProcess], None] = lambda process: None,
        mismatches: RateLimitedLog | None = None,
    ) -> None:
        """Start it, and wait until it is locked down.

        ``on_spawn`` is called as soon as the process exists and may be killed. ``mismatches``
        limits what is logged about errors like those of a broken library. Raises OSError if no
        process can be started, BrokenInstallation if a library is missing or does not fit.
        """
        self._limits = setup.limits
        self._items = 0
        self._mismatches = mismatches or mismatch_log()
        self._decoder: msgspec.msgpack.Decoder[DecoderMessage] = msgspec.msgpack.Decoder(
            DecoderMessage
        )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = lockdown.spawn_clean(SANDBOX, theirs, _environment(), quiet=True)
            except OSError:
                ours.close()
                raise
        self._monitor = ProcessMonitor(self._process.pid, DECODER_START_SECONDS)
        self._channel = DecoderChannel(ours, self._monitor)
        on_spawn(self)
        try:
            self._channel.send(setup)
            ready = self._receive()
            if isinstance(ready, LibraryMismatch):
                self.close()
                raise self._broken(ready, "media")
            if not isinstance(ready, DecoderReady):
                raise ValueError("it did not report that it is ready")
        except (OSError, EOFError, ValueError, DecoderProcessLost) as error:
            raise self._lost(error) from None
        self.lacking = ready.lacking

    def prepare(
        self, item: MediaItem, release: Callable[[list[Memory]], None]
    ) -> PreparedMedia | Failure:
        """The prepared item, or why it cannot be prepared.

        ``release`` gets the memory of its arrays when the last view of them is gone, in any thread;
        emptying the list unmaps it. Raises a ServiceError if there is no memory for it.
        """
        try:
            self._items += 1
            self._set_time_limits(item)
            request = DecodeRequest(item.kind, item.form, len(item.data), item.options)
            self._channel.send(request, item.data)
            message = self._receive()
            if isinstance(message, LibraryMismatch):
                return self._mismatch(message, item).failure()
            if isinstance(message, MediaRejected | DecoderOutOfMemory):
                return _failure(message, item, self._limits)
            if not isinstance(message, DecodeResult):
                raise ValueError("it sent neither a result nor a refusal")
            _check_result(message, item, self._limits.decode_bytes)
            memory = self._receive_result(message.size)
        except (OSError, EOFError, ValueError, DecoderProcessLost) as error:
            raise self._lost(error) from None
        # Views refer to a second object over the same memory, so the first outlives them: unmapping
        # much memory takes long, and the last view may die on an event loop.
        viewed = (ctypes.c_ubyte * message.size).from_address(ctypes.addressof(memory))
        weakref.finalize(viewed, release, [memory]).atexit = False
        arrays = tuple(_array(byte_view(viewed), part) for part in message.parts)
        return PreparedMedia(message.meta, arrays, message.cost, message.encoded)

    @property
    def usable(self) -> bool:
        """Whether it is alive, and has not served so many items that leaks could matter."""
        return self._process.poll() is None and self._items < MAX_ITEMS_PER_PROCESS

    @property
    def nearly_used_up(self) -> bool:
        """Whether it needs a successor soon."""
        return self._items >= REPLACE_AFTER_ITEMS

    def kill(self) -> None:
        """From any thread. A ``prepare`` under way then raises DecoderProcessLost."""
        self._process.kill()

    def close(self) -> None:
        """Kill and reap it, and close its socket."""
        self._channel.sock.close()
        self._process.kill()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel holds it in an uninterruptible call
            _log.error("decoder process %d was killed and does not end", self._process.pid)

    def _set_time_limits(self, item: MediaItem) -> None:
        cpu = cpu_limit(item, self._limits)
        # Wall-clock time by the longest limit: on busy cores a short item may wait as long as any.
        self._monitor.start_item(cpu, CLOCK_PER_CPU_SECOND * max(cpu, self._limits.decode_seconds))

    def _mismatch(
        self, message: LibraryMismatch, item: MediaItem
    ) -> BrokenInstallation | InvalidMedia:
        if not message.caused_by_file:
            return self._broken(message, PLURALS[item.kind])
        self._mismatches.warning(
            "decoder_file_errors", f"a decoder failed on a client's {item.kind}: {message.text}"
        )
        return InvalidMedia(f"The {item.kind} could not be decoded.")

    def _broken(self, message: LibraryMismatch, what: str) -> BrokenInstallation:
        library = "a library that is installed"
        if message.package in _PACKAGES:
            library = f"the installed {message.package} {_version(message.package)}"
        self._mismatches.warning(
            "decoder_library_errors",
            f"{what} cannot be decoded: {library} is broken or does not fit: {message.text}",
        )
        return BrokenInstallation(
            f"This server cannot decode {what}: {library} is broken or does not fit this version "
            "of Triptych. Its operator can run `triptych doctor`."
        )

    def _receive_result(self, size: int) -> Memory:
        """Sealed memory with the result: the process has written it and can no longer change it."""
        try:
            fd = _create_memory(size)
        except OSError as error:
            self.close()
            raise errors.OutOfMemory(
                "There is no memory for decoded media at the moment. Try again later."
            ) from error
        try:
            self._channel.send_file(fd)
            if not isinstance(self._receive(), ResultWritten):
                raise ValueError("it did not report that it has written the result")
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL)  # fails while it is mapped for writing
            return map_sealed_file(fd, size)
        finally:
            os.close(fd)

    def _receive(self) -> DecoderMessage:
        message: DecoderMessage = self._channel.receive(self._decoder)
        if isinstance(message, DecoderCrashed):
            raise ValueError(message.text)
        return message

    def _lost(self, error: Exception) -> DecoderProcessLost:
        """Kill and reap the process; the reason why it is lost."""
        code = self._wait_for_exit() if isinstance(error, EOFError | ConnectionError) else None
        self.close()
        if isinstance(error, DecoderProcessLost):
            return error
        if code is None:
            return DecoderProcessLost(str(error) or "it closed its socket")
        if code >= 0:
            return DecoderProcessLost(f"it exited with code {code}")
        name = signal.Signals(-code).name
        cause: LossCause = "killed" if name in _FROM_OUTSIDE else "crashed"
        return DecoderProcessLost(f"it was ended by {name}", "cpu" if name == "SIGXCPU" else cause)

    def _wait_for_exit(self) -> int | None:
        """The exit code of a process that has closed its socket; None: it still runs."""
        try:
            return self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return None


def mismatch_log() -> RateLimitedLog:
    """A log of errors like those of a broken library: by files, and by the installation."""
    return RateLimitedLog(_log, "decoder_file_errors", "decoder_library_errors")


def cpu_limit(item: MediaItem, limits: Limits) -> float:
    """How much CPU time an item may take."""
    if item.form == "file" and item.kind == "image":
        return limits.decode_image_seconds
    if item.form == "file" and item.kind == "audio":
        return limits.decode_audio_seconds
    return limits.decode_seconds


def _environment() -> dict[str, str]:
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    # Blocks of 16 MB that Pillow keeps: allocating them costs as much as decoding a JPEG.
    found = threads | {"PILLOW_BLOCKS_MAX": "4"}
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return found | {"LD_LIBRARY_PATH": libraries} if libraries else found


def _create_memory(size: int) -> int:
    """A descriptor of anonymous memory, allocated in full, whose size is sealed."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_result(result: DecodeResult, item: MediaItem, max_bytes: int) -> None:
    """Raises ValueError for a result that no intact process sends."""
    meta = result.meta
    if not 0 < result.size <= max_bytes:
        raise ValueError(f"its result has {result.size} bytes")
    if len(meta.key) != _KEY_BYTES or meta.kind != item.kind:
        raise ValueError("its result is of another kind than the item")
    # A token, or a unit of the encoder's work, stands for a byte at least.
    if not 0 < meta.tokens <= result.size or not 0 <= result.cost <= result.size:
        raise ValueError(f"its result has {meta.tokens} tokens in {result.size} bytes")
    offsets, size = aligned_offsets(byte_count(part.dtype, part.shape) for part in result.parts)
    if size != result.size or any(
        part.offset != offset for part, offset in zip(result.parts, offsets, strict=True)
    ):
        raise ValueError("its arrays are at wrong offsets")


def _array(view: memoryview, part: TensorSpec) -> Array:
    end = part.offset + byte_count(part.dtype, part.shape)
    return Array(view[part.offset : end], part.dtype, part.shape)


def _failure(
    message: MediaRejected | DecoderOutOfMemory, item: MediaItem, limits: Limits
) -> Failure:
    """Why the process does not prepare an item, in words for the client."""
    match message:
        case DecoderOutOfMemory(own_limit=True):
            return MediaTooLarge(
                f"To decode the {item.kind} takes more memory than a file may have here "
                f"({limits.decode_bytes >> 20} MiB). Send a smaller one."
            ).failure()
        case DecoderOutOfMemory():
            return errors.OutOfMemory(
                f"There is no memory to decode the {item.kind} at the moment. Try again later."
            ).failure()
    # A process may reject a file; it may not raise any other error of ours.
    if isinstance(rebuild_error(message.failure), MediaError):
        return message.failure
    return InvalidMedia(message.failure.message).failure()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(missing)"
