"""Memory of a GPU between workers on it: a hand-over copies nothing, and nothing leaves the GPU.

It is shared memory with one more step: a segment's file holds its table of open tickets and a
descriptor of the memory, which lies on the GPU. The same table tells a reader whether what it read
is still what the ticket names. The reader must have finished reading when it checks, and the owner
must have finished writing when it publishes: neither knows what the other's GPU still has to do.

An array's buffer has the GPU's addresses: it can be measured and sliced, and reading it on the host
is a segmentation fault. Where the GPU has no memory left, arrays lie in the host's.
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

POOL_FRACTION = 16  # the pool takes at most one part of so many of the GPU's memory
SMALLEST_GPU_SEGMENT = 2 << 20  # bytes: what CUDA gives at least
SMALLEST_LOAN = 256 << 10  # bytes below which the way over the host costs no more
# CUDA does not promise that a process that has freed memory open can still read it, though it can.
# So it is freed when every reader that sweeps its maps has closed them.
FREE_DELAY_SECONDS = 4 * MAP_SWEEP_SECONDS
_DESCRIPTOR = struct.Struct(f"@{IDENTITY_BYTES}s{HANDLE_BYTES}sQ")  # GPU, handle, size


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
        _own_segments[self.nonce] = self


# Of this process, by nonce.
_own_segments: weakref.WeakValueDictionary[bytes, GpuSegment] = weakref.WeakValueDictionary()


class CudaTransport(ShmTransport):
    """``limit`` bounds the memory that this process takes of the GPU; 0: a fraction of it.

    ``smallest_loan``: arrays of fewer bytes get the host's memory.
    """

    name = "cuda"

    def __init__(
        self,
        gpu: GpuMemory,
        owner: str,
        epoch: int,
        *,
        limit: int = 0,
        smallest_loan: int = SMALLEST_LOAN,
    ) -> None:
        super().__init__(owner, epoch)
        self.gpu = gpu
        self._smallest_loan = max(smallest_loan, 1)
        self._limit = limit or gpu.memory // POOL_FRACTION
        self.pool = SegmentPool(
            epoch,
            limit=self._limit,
            idle_limit=self._limit // 4,
            smallest=SMALLEST_GPU_SEGMENT,
            make=self._make_segment,
        )
        self.pool.on_discard = self._discard
        self._discarded: deque[tuple[float, GpuSegment]] = deque()  # with the time to free it

    def lend(self, dtype: str, shape: tuple[int, ...]) -> Array | None:
        """Memory of the GPU. None: the array is too small for it, or none is left."""
        size = byte_count(dtype, shape)
        if size < self._smallest_loan:
            return None
        try:
            memory, _ = self.pool.lend(size)
        except PoolExhausted:
            return None
        return Array(byte_view(memory)[:size], dtype, shape, self.gpu.number)

    def can_publish(self, arrays: Sequence[Array]) -> bool:
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
        await asyncio.to_thread(self._discarded.clear)

    async def _copy_in(self, buffers: list[memoryview]) -> tuple[Memory, Segment, list[int]]:
        raise AssertionError("only what ``can_publish`` accepts is published")

    async def _map(
        self, ticket: Ticket, pid: int, piece: SegmentReference
    ) -> tuple[AttachedSegment, memoryview]:
        attached = await self._attached(ticket, pid, piece, PAGE)
        identity, handle, capacity = _DESCRIPTOR.unpack_from(attached.body)
        if capacity != piece.size:
            raise TicketLost("the ticket is damaged: its address matches no segment")
        if identity != self.gpu.identity:
            raise TicketLost("the tensors lie on another GPU")
        if (own := _own_segments.get(piece.nonce)) is not None:  # CUDA does not open one's own
            return attached, byte_view(own.memory)
        if attached.leads_to is None:
            try:
                opened = await asyncio.to_thread(_open_handle, self.gpu, handle, capacity)
            except CudaError as error:
                raise TicketLost(f"the tensors' memory could not be opened: {error}") from None
            if attached.leads_to is None:  # else another task was quicker
                attached.leads_to = opened
        return attached, byte_view(attached.leads_to)

    def _make_segment(self, capacity: int, epoch: int) -> GpuSegment:
        discarded = sum(segment.capacity for _, segment in tuple(self._discarded))
        if self.pool.bytes + discarded > self._limit:
            raise CudaError(errno.ENOMEM, "discarded memory is not free yet")
        return GpuSegment(self.gpu, capacity, epoch)

    def _discard(self, segment: Segment) -> None:
        assert isinstance(segment, GpuSegment)
        self._discarded.append((time.monotonic() + FREE_DELAY_SECONDS, segment))

    @property
    def _holds_memory(self) -> bool:
        return super()._holds_memory or bool(self._discarded)

    def _trim(self) -> None:
        due = []
        while self._discarded and self._discarded[0][0] <= time.monotonic():
            due.append(self._discarded.popleft())
        if due:  # CUDA waits for all that the GPU has to do
            asyncio.get_running_loop().run_in_executor(None, due.clear)
        super()._trim()


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _memory(address: int, size: int) -> Memory:
    return (ctypes.c_ubyte * size).from_address(address)


def _open_handle(gpu: GpuMemory, handle: bytes, size: int) -> Memory:
    """It is closed when the last view of it is gone."""
    address = gpu.open(handle)
    memory = _memory(address, size)
    weakref.finalize(memory, gpu.close, address).atexit = False
    return memory
