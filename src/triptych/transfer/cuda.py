"""Memory of a GPU between workers on it: a hand-over copies nothing, and nothing leaves the GPU.

As shared memory, with one more step: a segment's file holds its table of open tickets and a
descriptor of the memory, which lies on the GPU. So a reader knows by the same table that what it
read is what it was promised. It must be done with reading when it looks, and the owner with writing
when it publishes: neither knows what the other's GPU still has to do.

An array's buffer has the GPU's addresses: good to measure and to slice, and a segmentation fault
where the host reads it. Where no memory of the GPU is to be had, the host's is used.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from triptych.errors import TicketLost
from triptych.messages import Ticket
from triptych.transfer.base import Array, byte_count
from triptych.transfer.cuda_driver import HANDLE_BYTES, IDENTITY_BYTES, CudaError, GpuMemory
from triptych.transfer.pool import PoolExhausted, SegmentPool
from triptych.transfer.segment import (
    MAP_SWEEP_SECONDS,
    PAGE,
    AttachedSegment,
    Memory,
    Segment,
    byte_view,
)
from triptych.transfer.shm import MappedArrays, SegmentReference, ShmTransport

POOL_FRACTION = 16  # of the GPU's memory the pool may have one part
SMALLEST_GPU_SEGMENT = 2 << 20  # bytes: what CUDA gives at least
SMALLEST_LOAN = 256 << 10  # bytes below which the way over the host costs no more
# CUDA does not promise that freed memory can still be read by who has it open, though it can. So it
# is freed when all who look after their maps have closed theirs.
FREE_DELAY_SECONDS = 4 * MAP_SWEEP_SECONDS
_DESCRIPTOR = struct.Struct(
    f"@{IDENTITY_BYTES}s{HANDLE_BYTES}sQ"
)  # whose memory, its handle, its size


class GpuSegment(Segment):
    """The owner's side: the file has the table and a descriptor, ``memory`` lies on the GPU."""

    start = 0

    def __init__(self, gpu: GpuMemory, capacity: int, epoch: int) -> None:
        super().__init__(PAGE, epoch)
        try:
            address = gpu.allocate(capacity)
            body = byte_view(self.memory)[PAGE:]
            self.memory = _memory(address, capacity)
            weakref.finalize(self.memory, gpu.free, address).atexit = False
            self.capacity = capacity
            _DESCRIPTOR.pack_into(body, 0, gpu.identity, gpu.handle(address), capacity)
        except CudaError:
            self.close()
            raise
        _ours[self.nonce] = self


# Of this process, by nonce.
_ours: weakref.WeakValueDictionary[bytes, GpuSegment] = weakref.WeakValueDictionary()


class CudaTransport(ShmTransport):
    """``limit`` bounds the memory that this process takes of the GPU; 0: a share of it.

    ``worth``: of arrays of fewer bytes none is lent.
    """

    name = "cuda"

    def __init__(
        self, gpu: GpuMemory, owner: str, epoch: int, *, limit: int = 0, worth: int = SMALLEST_LOAN
    ) -> None:
        super().__init__(owner, epoch)
        self.gpu = gpu
        self._worth = max(worth, 1)
        self._limit = limit or gpu.memory // POOL_FRACTION
        self.pool = SegmentPool(
            epoch,
            limit=self._limit,
            idle_limit=self._limit // 4,
            smallest=SMALLEST_GPU_SEGMENT,
            make=self._made,
        )
        self.pool.on_discard = self._bury
        self._buried: deque[tuple[float, GpuSegment]] = deque()  # with the time to free it

    def lend(self, dtype: str, shape: tuple[int, ...]) -> Array | None:
        """Memory of the GPU. None: it is not worth it, or there is none left."""
        size = byte_count(dtype, shape)
        if size < self._worth:
            return None
        try:
            memory, _ = self.pool.lend(size)
        except PoolExhausted:
            return None
        return Array(byte_view(memory)[:size], dtype, shape, self.gpu.number)

    def takes(self, arrays: Sequence[Array]) -> bool:
        """Whether a ticket of ours can be opened on all of them as they are."""
        found = [self.pool.find(array.buffer) for array in arrays if array.buffer.nbytes]
        return bool(found) and all(lent is not None and lent[1].shareable for lent in found)

    def owns(self, array: Array) -> bool:
        return self.pool.find(array.buffer) is not None

    def read(self, array: Array, into: memoryview) -> None:
        """Copy one of our arrays to the host. Not for the event loop."""
        self.gpu.read(address_of(array.buffer), into)

    async def fetch(self, ticket: Ticket) -> MappedArrays:
        fetched = await super().fetch(ticket)
        fetched.arrays = tuple(
            replace(array, gpu=self.gpu.number) if array.buffer.nbytes else array
            for array in fetched.arrays
        )
        return fetched

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._buried.clear)

    async def _copied(self, buffers: list[memoryview]) -> tuple[Memory, Segment, list[int]]:
        raise AssertionError("only what ``takes`` agrees to is published")

    async def _reached(
        self, ticket: Ticket, pid: int, piece: SegmentReference
    ) -> tuple[AttachedSegment, memoryview]:
        attached = await self._attached(ticket, pid, piece, PAGE)
        identity, handle, capacity = _DESCRIPTOR.unpack_from(attached.body)
        if capacity != piece.size:
            raise TicketLost("the ticket is damaged: its address fits no segment")
        if identity != self.gpu.identity:
            raise TicketLost("the tensors lie on another GPU")
        if (own := _ours.get(piece.nonce)) is not None:  # CUDA does not open one's own
            return attached, byte_view(own.memory)
        if attached.leads_to is None:
            try:
                opened = await asyncio.to_thread(_opened, self.gpu, handle, capacity)
            except CudaError as error:
                raise TicketLost(f"the tensors' memory could not be opened: {error}") from None
            if attached.leads_to is None:  # else another was quicker
                attached.leads_to = opened
        return attached, byte_view(attached.leads_to)

    def _made(self, capacity: int, epoch: int) -> GpuSegment:
        buried = sum(segment.capacity for _, segment in tuple(self._buried))
        if self.pool.bytes + buried > self._limit:
            raise CudaError(errno.ENOMEM, "what was given up is not free yet")
        return GpuSegment(self.gpu, capacity, epoch)

    def _bury(self, segment: Segment) -> None:
        assert isinstance(segment, GpuSegment)
        self._buried.append((time.monotonic() + FREE_DELAY_SECONDS, segment))

    @property
    def _bare(self) -> bool:
        return super()._bare and not self._buried

    def _tidy(self) -> None:
        due = []
        while self._buried and self._buried[0][0] <= time.monotonic():
            due.append(self._buried.popleft())
        if due:  # CUDA waits for all that the GPU has to do
            asyncio.get_running_loop().run_in_executor(None, due.clear)
        super()._tidy()


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _memory(address: int, size: int) -> Memory:
    return (ctypes.c_ubyte * size).from_address(address)


def _opened(gpu: GpuMemory, handle: bytes, size: int) -> Memory:
    """It is closed when the last view of it is gone."""
    address = gpu.open(handle)
    memory = _memory(address, size)
    weakref.finalize(memory, gpu.close, address).atexit = False
    return memory
