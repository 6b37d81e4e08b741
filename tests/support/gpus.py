"""The GPU that tests have: CUDA's where there is one, and else a part of the host's memory.

What plays a GPU obeys the same rules: memory is opened by a handle in another process and in no
other, stays readable to who has it open, and counts what is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from triptych.messages import Ticket
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient
from triptych.transfer.cuda import CudaTransport, address_of
from triptych.transfer.cuda_driver import HANDLE_BYTES, CudaError, CudaGpu, GpuMemory
from triptych.transfer.segment import Memory, map_file

_HANDLE = struct.Struct("@QQQ")


class PlayedGpu:
    number = 0
    identity = b"a GPU of a test."

    def __init__(self, memory: int = 1 << 30) -> None:
        self.memory = memory
        self.allocated: dict[int, tuple[int, Memory]] = {}  # by address, with its descriptor
        self.opened: dict[int, Memory] = {}
        self.copied = 0  # bytes, to the host
        self.opens = 0

    def allocate(self, size: int) -> int:
        if sum(map(ctypes.sizeof, (memory for _, memory in self.allocated.values()))) + size > (
            self.memory
        ):
            raise CudaError(errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY")
        door = os.memfd_create("played-gpu")
        os.ftruncate(door, size)
        memory = map_file(door, size, writable=True)
        address = ctypes.addressof(memory)
        self.allocated[address] = door, memory
        return address

    def free(self, address: int) -> None:
        os.close(self.allocated.pop(address)[0])

    def handle(self, address: int) -> bytes:
        door, memory = self.allocated[address]
        return _HANDLE.pack(os.getpid(), door, ctypes.sizeof(memory)).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        pid, door, size = _HANDLE.unpack_from(handle)
        try:
            if pid == os.getpid():
                raise OSError(errno.EINVAL, "CUDA_ERROR_INVALID_CONTEXT")
            here = os.open(f"/proc/{pid}/fd/{door}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CudaError(error.errno, error.strerror) from None
        try:
            memory = map_file(here, size, writable=True)
        finally:
            os.close(here)
        self.opens += 1
        self.opened[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def close(self, address: int) -> None:
        del self.opened[address]

    def read(self, address: int, into: memoryview) -> None:
        ctypes.memmove(address_of(into), address, into.nbytes)
        self.copied += into.nbytes

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


def _found() -> CudaGpu | None:
    try:
        return CudaGpu(0)
    except CudaError:
        return None


REAL = _found()
GPU: CudaGpu | PlayedGpu = REAL or PlayedGpu()


class OnGpu(TransferClient):
    """Whatever it is asked for lies on the GPU, and all readers are on it."""

    def __init__(
        self, owner: str, epoch: int, gpu: GpuMemory = GPU, limit: int = 512 << 20
    ) -> None:
        super().__init__("auto", owner, epoch)
        self.add_gpu(CudaTransport(gpu, owner, epoch, limit=limit, smallest_loan=1))

    def empty(self, dtype: str, shape: tuple[int, ...], *, gpu: int | None = 0) -> Array:
        return super().empty(dtype, shape, gpu=gpu)

    async def publish(
        self, arrays: Sequence[Array], *, lifetime: float = 60.0, by: str = ""
    ) -> Ticket:
        return await super().publish(arrays, lifetime=lifetime, by=by or "cuda")


def put(array: Array, data: bytes) -> None:
    if array.gpu is None:
        array.buffer[:] = data
    elif data:
        GPU.write(address_of(array.buffer), data)


def got(array: Array) -> bytes:
    if array.gpu is None:
        return bytes(array.buffer)
    found = bytearray(array.buffer.nbytes)
    GPU.read(address_of(array.buffer), memoryview(found))
    return bytes(found)
