"""The decoding process: ``python -m triptych.media.sandbox``, started by a decode pool.

It locks itself down, then prepares one media item after the other: it receives the bytes over its
socket and writes the result to memory that the pool sends. An unexpected error ends the process,
since its state can no longer be trusted; the pool starts another.
"""

from __future__ import annotations

import importlib
import mmap
import os
import socket
import sys
import traceback
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from triptych.errors import MediaError
from triptych.media import lockdown
from triptych.media.decoder_channel import (
    DecoderChannel,
    DecoderCrashed,
    DecodeRequest,
    DecodeResult,
    DecoderOutOfMemory,
    DecoderReady,
    DecoderSetup,
    LibraryMismatch,
    MediaRejected,
    ResultWritten,
)
from triptych.messages import MediaForm, MediaKind, MediaMeta, TensorSpec
from triptych.runtime.parent_death import die_with_parent
from triptych.transfer.base import aligned_offsets

if TYPE_CHECKING:
    import numpy as np

_MAX_TRACEBACK = 4000  # characters
# What code raises whose library has another version than it expects. A bad file can cause them too.
_MISMATCH = (TypeError, AttributeError, ImportError)
_PACKAGES = {name: name for name in ("av", "numpy", "safetensors", "torch")} | {"PIL": "pillow"}
_DECODERS: dict[MediaKind, str] = {"image": "pillow", "video": "av", "audio": "av"}


def main(words: list[str]) -> None:
    """``SOCKET PARENT``: serve the pool at the other end of the socket until it is gone."""
    sock, parent = (int(word) for word in words)
    die_with_parent(parent)
    channel = DecoderChannel(socket.socket(fileno=sock))
    sys.excepthook = _CrashReporter(channel)
    try:
        _serve(channel)
    except (EOFError, ConnectionError):
        return


def _serve(channel: DecoderChannel) -> None:
    setup = channel.receive(msgspec.msgpack.Decoder(DecoderSetup))
    lockdown.limit_resources(setup.limits.decode_bytes)
    # A torch for GPUs searches for their libraries when it is loaded, which the sandbox forbids.
    # And torch imports dill where it is installed, which wants a folder to write to.
    sys.modules["cuda"] = sys.modules["dill"] = None  # type: ignore[assignment]
    try:
        preparer = importlib.import_module(setup.preparer)
        preparer.load_libraries(setup.recipes)  # now, so that no item waits for it or pays for it
    except _MISMATCH as error:
        channel.send(_describe_mismatch(error))
        return
    channel.send(DecoderReady(lockdown.lock_down()))
    given = msgspec.msgpack.Decoder(DecodeRequest)
    while True:
        item = channel.receive(given)
        data = memoryview(channel.read(item.size))
        out_of_memory = False
        mismatch: LibraryMismatch | None = None
        may_be_file = False
        try:
            prepared = preparer.prepare(
                item.kind,
                item.form,
                data,
                setup.recipes,
                setup.limits,
                setup.allow_torch,
                item.options,
            )
        except MediaError as error:
            channel.send(MediaRejected(error.failure()))
            continue
        except MemoryError:
            out_of_memory = True  # its frames are freed before the answer is sent
        except _MISMATCH as error:
            mismatch = _describe_mismatch(error, item.kind, item.form)
            may_be_file = not isinstance(error, ImportError)
        finally:
            del data
        if mismatch is not None:
            by_file = may_be_file and _decodes_good_files(preparer, item, setup)
            channel.send(msgspec.structs.replace(mismatch, caused_by_file=by_file))
            continue
        if out_of_memory:
            channel.send(DecoderOutOfMemory(lockdown.has_memory_left()))
            continue
        _send_result(channel, *prepared)
        del prepared


def _decodes_good_files(preparer: ModuleType, item: DecodeRequest, setup: DecoderSetup) -> bool:
    try:
        preparer.self_test(item.kind, item.form, setup.recipes, setup.limits)
    except MemoryError:
        return True  # the file has used up the memory
    except _MISMATCH:
        return False
    return True


def _describe_mismatch(
    error: Exception, kind: MediaKind | None = None, form: MediaForm = "file"
) -> LibraryMismatch:
    """Names the package that raised it, or the one that decodes such items."""
    package = _PACKAGES.get((getattr(error, "name", None) or "").partition(".")[0], "")
    trace = error.__traceback__
    while trace is not None and not isinstance(error, ImportError):
        module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        package = _PACKAGES.get(module, package)
        trace = trace.tb_next
    if not package and kind is not None:
        package = "safetensors" if form == "embeds" else _DECODERS[kind]
    return LibraryMismatch(package, "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:])


def _send_result(
    channel: DecoderChannel,
    meta: MediaMeta,
    arrays: list[np.ndarray[Any, Any]],
    cost: int,
    encoded: bool,
) -> None:
    from triptych.media.prepare import dtype_name

    offsets, size = aligned_offsets(array.nbytes for array in arrays)
    parts = tuple(
        TensorSpec(dtype_name(array), array.shape, offset)
        for array, offset in zip(arrays, offsets, strict=True)
    )
    channel.send(DecodeResult(meta, parts, size, cost, encoded))
    fd = channel.receive_file()
    # Populate it at once: one call instead of a page fault for every 4 KiB.
    with mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
        for array, offset in zip(arrays, offsets, strict=True):
            _copy(array, memory, offset)
    os.close(fd)
    channel.send(ResultWritten())


def _copy(array: np.ndarray[Any, Any], memory: mmap.mmap, offset: int) -> None:
    import numpy as np

    target = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    np.copyto(target, array)


class _CrashReporter:
    """Sends the pool the error that ends the process; a sandbox has no other way to report it."""

    def __init__(self, channel: DecoderChannel) -> None:
        self._channel = channel

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._channel.send(DecoderCrashed(text[-_MAX_TRACEBACK:]))


if __name__ == "__main__":
    main(sys.argv[1:])
