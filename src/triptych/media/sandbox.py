"""The decoding process: ``python -m triptych.media.sandbox``, started by a decode pool.

It locks itself in, then prepares one media item after the other: bytes come in over its socket, and
what it made of them goes into memory that the pool hands it. Whatever goes wrong here in a way that
nobody foresaw ends the process, for its state is then not to be trusted; the pool starts another.
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

_LAST_WORDS = 4000  # characters
# Our code and what is installed do not fit; unless good files are decoded, then it is the file.
_MISFIT = (TypeError, AttributeError, ImportError)
_PACKAGES = {name: name for name in ("av", "numpy", "safetensors", "torch")} | {"PIL": "pillow"}
_DECODERS: dict[MediaKind, str] = {"image": "pillow", "video": "av", "audio": "av"}


def main(words: list[str]) -> None:
    """``SOCKET PARENT``: serve the pool at the other end of the socket until it is gone."""
    door, parent = (int(word) for word in words)
    die_with_parent(parent)
    wire = DecoderChannel(socket.socket(fileno=door))
    sys.excepthook = _Farewell(wire)
    try:
        _serve(wire)
    except (EOFError, ConnectionError):
        return


def _serve(wire: DecoderChannel) -> None:
    setup = wire.receive(msgspec.msgpack.Decoder(DecoderSetup))
    lockdown.limit_resources(setup.limits.decode_bytes)
    # A torch for GPUs looks around for their libraries when it is loaded, where none may look.
    # And any torch loads this pickler where it is installed, which wants a place to write.
    sys.modules["cuda"] = sys.modules["dill"] = None  # type: ignore[assignment]
    try:
        preparer = importlib.import_module(setup.preparer)
        preparer.load_libraries(setup.recipes)  # now, so that no item waits for it or pays for it
    except _MISFIT as error:
        wire.send(_misfit(error))
        return
    wire.send(DecoderReady(lockdown.lock_down(setup.readable)))
    given = msgspec.msgpack.Decoder(DecodeRequest)
    while True:
        item = wire.receive(given)
        data = memoryview(wire.read(item.size))
        full = False
        misfit: LibraryMismatch | None = None
        may_be_file = False
        try:
            made = preparer.prepare(
                item.kind, item.form, data, setup.recipes, setup.limits, setup.allow_torch
            )
        except MediaError as error:
            wire.send(MediaRejected(error.failure()))
            continue
        except MemoryError:
            full = True  # what it holds is let go first
        except _MISFIT as error:
            misfit = _misfit(error, item.kind, item.form)
            may_be_file = not isinstance(error, ImportError)
        finally:
            del data
        if misfit is not None:
            by_file = may_be_file and _decodes_good_files(preparer, item, setup)
            wire.send(msgspec.structs.replace(misfit, by_file=by_file))
            continue
        if full:
            wire.send(DecoderOutOfMemory(lockdown.has_memory_left()))
            continue
        _hand_over(wire, *made)
        del made


def _decodes_good_files(preparer: ModuleType, item: DecodeRequest, setup: DecoderSetup) -> bool:
    try:
        preparer.self_test(item.kind, item.form, setup.recipes, setup.limits)
    except MemoryError:
        return True  # the file has used it up
    except _MISFIT:
        return False
    return True


def _misfit(
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
    return LibraryMismatch(package, "".join(traceback.format_exception(error))[-_LAST_WORDS:])


def _hand_over(
    wire: DecoderChannel,
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
    wire.send(DecodeResult(meta, parts, size, cost, encoded))
    fd = wire.receive_file()
    # Populated at once: one call instead of a page fault for every 4 KiB.
    with mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
        for array, offset in zip(arrays, offsets, strict=True):
            _copy(array, memory, offset)
    os.close(fd)
    wire.send(ResultWritten())


def _copy(array: np.ndarray[Any, Any], memory: mmap.mmap, offset: int) -> None:
    import numpy as np

    target = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    np.copyto(target, array)


class _Farewell:
    """Tells the pool of an error that ends the process; there is no other way out for it."""

    def __init__(self, wire: DecoderChannel) -> None:
        self._wire = wire

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._wire.send(DecoderCrashed(text[-_LAST_WORDS:]))


if __name__ == "__main__":
    main(sys.argv[1:])
