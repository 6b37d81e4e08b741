"""The memory of one GPU, by CUDA's driver library alone: no tensor library is needed for it.

Another process on the GPU opens an allocation by its handle, 64 bytes that may travel in any
message, and reads it in place. A process that has opened it can read it even when its owner
has freed it or was killed; it is free when the last process has closed it. Every call works in the
GPU's primary context, which tensor libraries use too, from any thread.

Run as a program it is another process that opens a handle: see ``open_shareable_gpu``. Knows no
ticket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Protocol

HANDLE_BYTES = 64  # bytes
IDENTITY_BYTES = 16
_LAZY_PEER_ACCESS = 1  # the only flag there is
_PROOF = 16
_CHILD_SECONDS = 60.0  # for a child to say what it reads


class CudaError(OSError):
    """CUDA refused. An OSError, as a shortage of the host's memory is one."""


class GpuMemory(Protocol):
    """What the transport needs of a GPU."""

    @property
    def number(self) -> int:
        """As CUDA counts in this process."""

    @property
    def identity(self) -> bytes:
        """The same in all processes."""

    @property
    def memory(self) -> int:
        """Bytes in all."""

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def handle(self, address: int) -> bytes: ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. To be closed as often as it is opened."""

    def close(self, address: int) -> None: ...

    def read(self, address: int, into: memoryview) -> None:
        """Copy to the host's memory, after everything that the GPU has queued."""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaGpu:
    """The GPU of a number, as CUDA counts in this process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._library = _library()
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        uuid = (ctypes.c_ubyte * IDENTITY_BYTES)()
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self.identity = bytes(uuid)
        size = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        self.memory = size.value
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuCtxSynchronize")  # a cancelled step may still be reading
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def read(self, address: int, into: memoryview) -> None:
        if into.nbytes:
            place = (ctypes.c_char * into.nbytes).from_buffer(into)
            with self._current():
                size = ctypes.c_size_t(into.nbytes)
                self._call("cuMemcpyDtoH_v2", place, ctypes.c_uint64(address), size)

    def write(self, address: int, data: bytes) -> None:
        with self._current():
            size = ctypes.c_size_t(len(data))
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, size)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """CUDA takes the GPU from the thread's current context."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(errno.EIO, f"{name}: {(text.value or b'').decode() or code}")


def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(errno.ENODEV, str(error)) from None


def open_shareable_gpu(number: int) -> CudaGpu:
    """A GPU whose memory another process could open, and read there what we had written."""
    gpu, secret = CudaGpu(number), os.urandom(_PROOF)
    address = gpu.allocate(_PROOF)
    try:
        gpu.write(address, secret)
        argv = [sys.executable, "-P", __file__, str(gpu.number), gpu.handle(address).hex()]
        done = subprocess.run(argv, capture_output=True, timeout=_CHILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CudaError(errno.ETIMEDOUT, str(error)) from None
    finally:
        gpu.free(address)
    if done.stdout.strip() != secret.hex().encode():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise CudaError(errno.EACCES, f"another process could not open it: {said[-1:]}")
    return gpu


def _read_handle(number: str, handle: str) -> None:
    gpu, found = CudaGpu(int(number)), bytearray(_PROOF)
    address = gpu.open(bytes.fromhex(handle))
    gpu.read(address, memoryview(found))
    gpu.close(address)
    print(found.hex())


if __name__ == "__main__":
    _read_handle(*sys.argv[1:])
