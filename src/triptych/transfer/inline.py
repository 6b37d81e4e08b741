"""The bytes travel inside the ticket.

For tests and for hosts without shared memory. It is not the default because a ticket goes through
the frontend: so do its bytes, copied three times. The owner holds nothing, so it can take nothing
back: a ticket is good as long as a process has it, and expiry does not apply.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

from triptych.errors import TicketLost
from triptych.host import boot_time
from triptych.messages import Ticket
from triptych.transfer.base import (
    Array,
    CopiedArrays,
    align,
    aligned_offsets,
    byte_count,
    checked_sizes,
    part_sizes,
    run_sized,
    slice_parts,
    ticket_parts,
)
from triptych.transfer.registry import TransportContext


def open_transport(context: TransportContext) -> InlineTransport:
    return InlineTransport(context.owner, context.epoch)


class InlineTransport:
    name = "inline"
    tickets = 0
    segments = 0

    def __init__(self, owner: str, epoch: int) -> None:
        self._owner = owner
        self._epoch = epoch
        self._serials = itertools.count(1)

    async def open(self) -> None:
        return

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return Array(memoryview(bytearray(byte_count(dtype, shape))), dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        sizes = checked_sizes(arrays)
        offsets, total = aligned_offsets(sizes)
        address, checksum = await run_sized(total, _packed, arrays)
        return Ticket(
            owner=self._owner,
            epoch=self._epoch,
            transport=self.name,
            serial=next(self._serials),
            address=address,
            parts=ticket_parts(arrays, offsets),
            size=sum(sizes),
            checksum=checksum,
            expires=boot_time() + lifetime,
        )

    async def fetch(self, ticket: Ticket) -> CopiedArrays:
        sizes = part_sizes(ticket)
        memory = await run_sized(len(ticket.address), _verified, ticket)
        return CopiedArrays(slice_parts(memory, ticket, sizes), self.name)

    def release(self, ticket: Ticket) -> None:
        return

    async def close(self) -> None:
        return


def _packed(arrays: Sequence[Array]) -> tuple[bytes, int]:
    pieces: list[bytes | memoryview] = []
    for array in arrays:
        pieces.append(array.buffer)
        pieces.append(bytes(align(array.buffer.nbytes) - array.buffer.nbytes))
    packed = b"".join(pieces)
    return packed, zlib.crc32(packed)


def _verified(ticket: Ticket) -> memoryview:
    # A copy, because tensor libraries want memory that is not read-only.
    memory = bytearray(ticket.address)
    if zlib.crc32(memory) != ticket.checksum:
        raise TicketLost("the ticket is damaged: its checksum does not match its bytes")
    return memoryview(memory)
