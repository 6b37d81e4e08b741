"""What every transport does: tensors go from worker to worker by ticket.

``publish`` puts tensors where a reader can reach them and returns a ticket; ``fetch`` makes them
readable, in place where the transport can; ``release`` gives the memory back. The owner keeps the
memory until release or expiry. Nothing here knows torch: an Array is bytes with a shape.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from triptych.errors import ServiceError, TicketLost
from triptych.messages import TensorSpec, Ticket

ARRAY_ALIGNMENT = 64  # a cache line, and what vector loads like best
LOOP_COPY_BYTES = 1 << 20  # may be copied or mapped on the event loop; more goes to a thread

T = TypeVar("T")

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


class TransportError(Exception):
    """A transport does not work in this process."""


@dataclass(frozen=True, slots=True)
class Array:
    """A C-contiguous tensor without a library: bytes, dtype name and shape."""

    buffer: memoryview  # one dimension, format "B"
    dtype: str  # "float32", "bfloat16", "uint8" ...
    shape: tuple[int, ...]
    gpu: int | None = None  # on which GPU it lies, by CUDA's count; the host must not touch it then


class FetchedArrays(Protocol):
    """Tensors of another worker, readable until ``close``."""

    arrays: tuple[Array, ...]
    transport: str  # by which they came: a ticket of NIXL may be read in place, by shm

    def check(self) -> None:
        """Raise TicketLost if the owner has taken the memory back meanwhile."""

    def close(self) -> None: ...


class CopiedArrays:
    """Arrays in memory of our own: nobody can take them back."""

    def __init__(self, arrays: tuple[Array, ...], transport: str) -> None:
        self.arrays = arrays
        self.transport = transport

    def check(self) -> None:
        return

    def close(self) -> None:
        self.arrays = ()


class Transport(Protocol):
    """One way for tensors. All methods are safe to call from the event loop."""

    name: str

    @property
    def tickets(self) -> int:
        """Published and not yet released or expired."""

    @property
    def segments(self) -> int:
        """Pieces of memory, or files, in use by tickets and by arrays that are not published."""

    async def open(self) -> None:
        """Acquire now what the first ticket would need. Raises TransportError or InvalidConfig
        where the transport does not work here."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Memory that ``publish`` hands over without a copy, where the transport has such."""

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket: ...

    async def fetch(self, ticket: Ticket) -> FetchedArrays: ...

    def release(self, ticket: Ticket) -> None:
        """Give the memory back. Releasing twice, or after expiry, does nothing."""

    async def close(self) -> None: ...


async def run_sized(size: int, call: Callable[..., T], *args: Any) -> T:
    """Run a call that moves or maps so many bytes: here if they are few, else in a thread."""
    if size <= LOOP_COPY_BYTES:
        return call(*args)
    return await asyncio.to_thread(call, *args)


def align(size: int) -> int:
    return -(-size // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT


def byte_count(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; ValueError for an unknown dtype or an impossible shape."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype '{dtype}' is unknown; there are {', '.join(DTYPE_BYTES)}")
    shape = tuple(shape)
    if any(length < 0 for length in shape):
        raise ValueError(f"shape {shape} has a negative length")
    return DTYPE_BYTES[dtype] * math.prod(shape)


def checked_sizes(arrays: Sequence[Array]) -> list[int]:
    """The arrays' sizes in bytes, checked against dtype and shape."""
    sizes = [byte_count(array.dtype, array.shape) for array in arrays]
    for array, size in zip(arrays, sizes, strict=True):
        if array.buffer.nbytes != size:
            raise ValueError(
                f"{array.dtype}{array.shape} takes {size} bytes, not {array.buffer.nbytes}"
            )
    return sizes


def aligned_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Aligned offsets for things of these sizes, one behind the other, and the size of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += align(size)
    return offsets, end


def ticket_parts(arrays: Sequence[Array], offsets: Sequence[int]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(array.dtype, array.shape, offset)
        for array, offset in zip(arrays, offsets, strict=True)
    )


def part_sizes(ticket: Ticket) -> list[int]:
    """Bytes of each part of a ticket from another process; TicketLost if they make no sense."""
    try:
        sizes = [byte_count(part.dtype, part.shape) for part in ticket.parts]
    except ValueError as error:
        raise TicketLost(f"the ticket is damaged: {error}") from None
    if sum(sizes) != ticket.size:
        raise TicketLost("the ticket is damaged: its parts do not add up to its size")
    return sizes


def slice_part(memory: memoryview, part: TensorSpec, offset: int, size: int) -> Array:
    """One part out of the memory it lies in; TicketLost where it would reach beyond."""
    if offset < 0 or offset + size > memory.nbytes:
        raise TicketLost("the ticket is damaged: a part lies outside its memory")
    return Array(memory[offset : offset + size], part.dtype, part.shape)


def slice_parts(memory: memoryview, ticket: Ticket, sizes: Sequence[int]) -> tuple[Array, ...]:
    """All parts of a ticket out of the one memory they lie in."""
    return tuple(
        slice_part(memory, part, part.offset, size)
        for part, size in zip(ticket.parts, sizes, strict=True)
    )


def decode_address(address: bytes, kind: type[T]) -> T:
    """The address in a ticket from another process; TicketLost if it cannot be decoded."""
    try:
        return msgspec.msgpack.decode(address, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise TicketLost("the ticket is damaged: its address cannot be read") from None


def no_memory_to_receive() -> ServiceError:
    return ServiceError(
        "the worker has no memory left to receive tensors; try again later, or give the machine "
        "more memory"
    )
