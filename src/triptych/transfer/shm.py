"""Shared memory between workers of one host: a hand-over copies nothing.

``empty`` lends memory of a pool's segment; ``publish`` enters the ticket in the segment's table
and says where it is; ``fetch`` maps the segment and gives views in place; ``release`` removes the
ticket from the table. The memory goes back to the pool when its ticket and the owner's views are
gone, so a reader never takes new contents for the old ones: by then the table says otherwise. Where
no shared memory is left ``publish`` fails with a 503 and nothing else breaks. Knows no other hosts.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import ctypes
import itertools
import os
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from triptych.errors import InvalidConfig, ServiceError, TicketLost
from triptych.host import boot_time, machine_memory
from triptych.messages import TensorSpec, Ticket
from triptych.transfer.base import (
    Array,
    aligned_offsets,
    byte_count,
    checked_sizes,
    decode_address,
    part_sizes,
    run_sized,
    slice_part,
    ticket_parts,
)
from triptych.transfer.pool import PoolExhausted, SegmentPool
from triptych.transfer.registry import TransportContext
from triptych.transfer.segment import (
    PAGE,
    SLOTS,
    AttachedSegment,
    Memory,
    NotASegment,
    Segment,
    SegmentMaps,
    byte_view,
)

IDLE_SECONDS = 5.0  # memory that nothing used for so long is freed, with its descriptor


class SegmentReference(Struct, frozen=True, array_like=True):
    """One segment. A ticket's memory is its pieces, one behind the other."""

    fd: int
    nonce: bytes
    slot: int  # the ticket's place in the segment's table
    size: int


class ShmAddress(Struct, frozen=True, array_like=True):
    pid: int
    pieces: tuple[SegmentReference, ...]


class OpenTicket:
    """What the owner keeps for a ticket: its slots in tables, and the memory itself."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.expires = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.pieces: list[SegmentReference] = []
        self._segments: dict[int, tuple[Memory, Segment, int]] = {}  # by id of the memory object
        self._size = 0

    def add(self, memory: Memory, segment: Segment) -> int:
        """Add this memory, once; returns where it begins in the ticket's."""
        if id(memory) not in self._segments:
            slot = segment.add_ticket(self.serial)
            self.pieces.append(SegmentReference(segment.fd, segment.nonce, slot, segment.capacity))
            self._segments[id(memory)] = (memory, segment, self._size)
            self._size += segment.capacity
        return self._segments[id(memory)][2]

    @property
    def segments(self) -> list[tuple[Memory, Segment]]:
        """The memory of its pieces, in order; none once it is closed. For any thread."""
        return [(memory, segment) for memory, segment, _ in tuple(self._segments.values())]

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for (_, segment, _), piece in zip(self._segments.values(), self.pieces, strict=True):
            segment.remove_ticket(piece.slot)
        self._segments.clear()
        self.pieces.clear()


class MappedArrays:
    """Views into the owner's memory. They can be read and must not be written."""

    def __init__(
        self,
        arrays: tuple[Array, ...],
        transport: str,
        maps: list[AttachedSegment],
        slots: list[int],
        serial: int,
    ) -> None:
        self.arrays = arrays
        self.transport = transport
        self._places = list(zip(maps, slots, strict=True))
        self._serial = serial
        self.check()

    def check(self) -> None:
        if any(attached.table[slot] != self._serial for attached, slot in self._places):
            raise TicketLost("the owner of the tensors has taken their memory back")

    def close(self) -> None:
        # Views are dropped, not released: a tensor made from one would be left without its memory.
        self.arrays = ()
        self._places = []


def open_transport(context: TransportContext) -> ShmTransport:
    return ShmTransport(context.owner, context.epoch)


class ShmTransport:
    """``limit`` bounds this process's shared memory, ``idle_limit`` what is kept for re-use."""

    name = "shm"

    def __init__(
        self, owner: str, epoch: int, *, limit: int | None = None, idle_limit: int = 512 << 20
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise InvalidConfig("transport 'shm' needs Linux; use transport 'inline' here")
        self._owner = owner
        self._epoch = epoch
        self.pool = SegmentPool(
            epoch, limit=machine_memory() // 2 if limit is None else limit, idle_limit=idle_limit
        )
        self._maps = SegmentMaps()
        self._serials = itertools.count(1)
        self._tickets: dict[int, OpenTicket] = {}  # by serial
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def tickets(self) -> int:
        return len(self._tickets)

    @property
    def segments(self) -> int:
        """Segments in use, by tickets or by arrays that are not published (yet, or any more)."""
        self.settle()
        return self.pool.lent

    async def open(self) -> None:
        return

    def find_ticket(self, serial: int) -> OpenTicket | None:
        """An open ticket that has not expired. For any thread."""
        ticket = self._tickets.get(serial)
        return ticket if ticket is not None and ticket.expires > boot_time() else None

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Memory of the pool, or plain memory where that has none: then ``publish`` tries again.

        So a shortage fails the one request that publishes, and never an engine's whole batch.
        """
        size = byte_count(dtype, shape)
        try:
            memory = self.pool.lend(size)[0] if size else None
        except PoolExhausted:
            memory = None
        if memory is None:
            return Array(memoryview(bytearray(size)), dtype, shape)
        return Array(byte_view(memory)[PAGE : PAGE + size], dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        """Arrays from ``empty`` stay where they are and must not be written any more."""
        sizes = checked_sizes(arrays)
        offsets = [0] * len(arrays)
        opened = OpenTicket(next(self._serials))
        with contextlib.ExitStack() as undo:
            undo.callback(opened.close)
            foreign = []
            for index, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
                lent = self.pool.find(array.buffer) if size else None
                if lent is not None and lent[1].shareable:
                    offsets[index] = opened.add(*lent) + _offset(array, *lent)
                elif size:
                    foreign.append(index)
            if foreign or not opened.pieces:
                outside = [arrays[index].buffer for index in foreign]
                memory, segment, places = await self._copy_in(outside)
                start = opened.add(memory, segment)
                for index, place in zip(foreign, places, strict=True):
                    offsets[index] = start + place
            undo.pop_all()
        self._keep(opened, lifetime)
        return Ticket(
            owner=self._owner,
            epoch=self._epoch,
            transport=self.name,
            serial=opened.serial,
            address=msgspec.msgpack.encode(ShmAddress(os.getpid(), tuple(opened.pieces))),
            parts=ticket_parts(arrays, offsets),
            size=sum(sizes),
            checksum=0,  # the table vouches for the contents
            expires=opened.expires,
        )

    async def fetch(self, ticket: Ticket) -> MappedArrays:
        sizes = part_sizes(ticket)
        if not ticket.expires > boot_time():
            raise TicketLost("the ticket has expired")
        # 0 stands for no ticket in the tables, so no reader may ask for it.
        if ticket.serial < 1:
            raise TicketLost("the ticket is damaged: it has no serial")
        address = decode_address(ticket.address, ShmAddress)
        mapped = [await self._map(ticket, address.pid, piece) for piece in address.pieces]
        if not mapped:
            raise TicketLost("the ticket is damaged: it has no memory")
        maps, bodies = [attached for attached, _ in mapped], [body for _, body in mapped]
        starts = [0, *itertools.accumulate(piece.size for piece in address.pieces)]
        arrays = tuple(
            _view(part, size, bodies, starts)
            for part, size in zip(ticket.parts, sizes, strict=True)
        )
        slots = [piece.slot for piece in address.pieces]
        return MappedArrays(arrays, self.name, maps, slots, ticket.serial)

    def release(self, ticket: Ticket) -> None:
        if (ticket.owner, ticket.epoch) == (self._owner, self._epoch):
            self._close_ticket(ticket.serial)

    async def close(self) -> None:
        for serial in list(self._tickets):
            self._close_ticket(serial)
        if self._trim_timer is not None:
            self._trim_timer.cancel()
            self._trim_timer = None
        self._maps.close()
        self.pool.close()
        await asyncio.to_thread(self.pool.clean)

    async def _copy_in(self, buffers: list[memoryview]) -> tuple[Memory, Segment, list[int]]:
        try:
            size = sum(buffer.nbytes for buffer in buffers)
            return await run_sized(size, _copy, self.pool, buffers)
        except PoolExhausted:
            raise ServiceError(
                "the worker has no shared memory left for its tensors; try again later, or give "
                "the machine more memory"
            ) from None

    async def _map(
        self, ticket: Ticket, pid: int, piece: SegmentReference
    ) -> tuple[AttachedSegment, memoryview]:
        """The map of a piece, and the memory that the ticket means by it."""
        attached = await self._attached(ticket, pid, piece, piece.size)
        return attached, attached.body

    async def _attached(
        self, ticket: Ticket, pid: int, piece: SegmentReference, size: int
    ) -> AttachedSegment:
        try:
            attached = await self._maps.find(pid, piece.fd, piece.nonce, ticket.epoch, size)
        except NotASegment:
            raise TicketLost("the owner of the tensors is gone, or has released them") from None
        if attached.capacity != size or not 0 <= piece.slot < SLOTS:
            raise TicketLost("the ticket is damaged: its address matches no segment")
        return attached

    def _keep(self, opened: OpenTicket, lifetime: float) -> None:
        opened.expires = boot_time() + lifetime
        self._tickets[opened.serial] = opened
        loop = asyncio.get_running_loop()
        opened.timer = loop.call_later(lifetime, self._close_ticket, opened.serial)
        self.settle()

    def _close_ticket(self, serial: int) -> None:
        opened = self._tickets.pop(serial, None)
        if opened is not None:
            opened.close()
        self.settle()

    def settle(self) -> None:
        """Return memory without views to the pool, and free in time what stays idle there."""
        self.pool.settle()
        loop = asyncio.get_running_loop()
        if self.pool.has_discarded:
            loop.run_in_executor(None, self.pool.clean)
        if self._trim_timer is None and self._holds_memory:
            self._trim_timer = loop.call_later(IDLE_SECONDS / 4, self._trim)

    @property
    def _holds_memory(self) -> bool:
        return self.pool.bytes > 0

    def _trim(self) -> None:
        """Free what has been idle long enough, and look again while there is any memory."""
        self._trim_timer = None
        self.pool.trim(IDLE_SECONDS)
        self.settle()


def _copy(pool: SegmentPool, buffers: list[memoryview]) -> tuple[Memory, Segment, list[int]]:
    places, total = aligned_offsets(buffer.nbytes for buffer in buffers)
    memory, segment = pool.lend(total)
    for buffer, place in zip(buffers, places, strict=True):
        segment.write(place, buffer)
    return memory, segment, places


def _offset(array: Array, memory: Memory, segment: Segment) -> int:
    """Where an array of the pool lies behind its segment's first page."""
    here = ctypes.addressof(ctypes.c_char.from_buffer(array.buffer))
    return here - ctypes.addressof(memory) - segment.start


def _view(part: TensorSpec, size: int, bodies: list[memoryview], starts: list[int]) -> Array:
    if not size:
        return Array(memoryview(bytearray()), part.dtype, part.shape)
    index = bisect.bisect_right(starts, part.offset) - 1
    if not 0 <= index < len(bodies):
        raise TicketLost("the ticket is damaged: a part lies outside its memory")
    return slice_part(bodies[index], part, part.offset - starts[index], size)
