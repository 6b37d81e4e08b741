"""Between hosts: tensors move by NIXL, from the same memory that shared memory reads in place.

A ticket says both ways to its memory. A reader on the owner's host maps it; another one has the
bytes moved into scratch memory of its own, and gets to see them when they are known to be right.
The agent is made when it is first needed, and every call of it is off the event loop. What lies on
a GPU was copied to the host before, which is faster over TCP (ADR 14): a spot's device is always 0.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import itertools
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import ServiceError, TicketLost
from triptych.messages import TensorSpec, Ticket
from triptych.transfer.base import (
    LOOP_COPY_BYTES,
    Array,
    FetchedArrays,
    aligned_offsets,
    boot_time,
    part_sizes,
)
from triptych.transfer.fetching import GONE, ReceiveBuffer, RemoteTensors, fail
from triptych.transfer.inline import CopiedArrays
from triptych.transfer.nixl_agent import MemoryDescriptor, NixlAgent
from triptych.transfer.nixl_transfers import NixlTransfers
from triptych.transfer.pool import PoolExhausted
from triptych.transfer.segment import PAGE, SLOTS, memory_domain
from triptych.transfer.shm import ShmAddress as ShmAddress
from triptych.transfer.shm import ShmTransport
from triptych.transfer.wire import ByteRange

Way = Literal["read", "write"]
T = TypeVar("T")


class NixlAddress(Struct, frozen=True, array_like=True):
    host: str  # whose processes map the memory; others have it moved
    near: bytes  # as shared memory has it
    agent: str
    metadata: bytes
    spots: tuple[MemoryDescriptor, ...]  # of the pieces, their first pages included


class NixlTransport:
    """``shm`` has the memory. ``host``: the address to be reached at.

    ``always``: move also what could be read in place. ``way``: and how; None: as is best.
    """

    name = "nixl"

    def __init__(
        self,
        shm: ShmTransport,
        owner: str,
        epoch: int,
        host: str,
        always: bool = False,
        way: Way | None = None,
    ) -> None:
        self._shm = shm
        self._agent_name = f"{owner}-{epoch}-{os.urandom(8).hex()}"
        self._host = host
        self._always = always
        self._way = way
        self._lock = threading.Lock()
        self._closed = False
        self._agent: NixlAgent | None = None
        self._mover: NixlTransfers | None = None

    @property
    def tickets(self) -> int:
        return 0  # they are shared memory's too, which counts them

    @property
    def segments(self) -> int:
        return 0

    @property
    def regions(self) -> int:
        """Segments that are registered."""
        return 0 if self._agent is None else self._agent.regions

    @property
    def operations(self) -> int:
        """Transfers under way."""
        return 0 if self._agent is None else len(self._agent.operations)

    async def open(self) -> None:
        """Make the agent now. Raises whatever keeps NIXL from working."""
        await self._ready()

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return self._shm.empty(dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        agent, _ = await self._ready()
        ticket = await self._shm.publish(arrays, lifetime=lifetime)
        with contextlib.ExitStack() as undo:
            undo.callback(self._shm.release, ticket)
            metadata, spots = await _result(agent.do(self._described, agent, ticket.generation))
            undo.pop_all()
        address = NixlAddress(memory_domain(), ticket.address, agent.name, metadata, spots)
        return msgspec.structs.replace(ticket, transport=self.name, address=_sealed(address))

    async def fetch(self, ticket: Ticket) -> FetchedArrays:
        address = _opened(ticket.address)
        near = address.host == memory_domain()
        if address.agent == self._agent_name or (near and not self._always):
            return await self._shm.fetch(msgspec.structs.replace(ticket, address=address.near))
        if near and not ticket.expires > boot_time():  # else the clock is another's
            raise TicketLost("the ticket has expired")
        sizes = part_sizes(ticket)
        source = _source(ticket, address)
        ranges = tuple(
            _range(part, size, source) for part, size in zip(ticket.parts, sizes, strict=True)
        )
        wanted = tuple(r for r in ranges if r is not None)
        way = self._way or ("read" if near else "write")
        arrays = iter(await self._moved(source, wanted, way) if wanted else ())
        return CopiedArrays(
            tuple(
                Array(next(arrays) if size else memoryview(bytearray()), part.dtype, part.shape)
                for part, size in zip(ticket.parts, sizes, strict=True)
            )
        )

    def release(self, ticket: Ticket) -> None:
        self._shm.release(ticket)

    async def close(self) -> None:
        """Before that of shared memory: what is registered must not be unmapped."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._lock:  # an agent may be in the making
            self._closed = True
            if self._agent is not None:
                self._agent.close()

    async def _moved(
        self, source: RemoteTensors, ranges: tuple[ByteRange, ...], way: Way
    ) -> list[memoryview]:
        agent, mover = await self._ready()
        scratch = await self._scratch(ranges, len(source.pieces))
        done: Future[None] = Future()
        if way == "read":
            begun = agent.do(mover.read, source, scratch, done)
        else:
            begun = agent.do(mover.ask, source, scratch, os.urandom(16), done)
        begun.add_done_callback(functools.partial(_pass_on, done))
        try:
            await _result(done)
        finally:
            del done, begun  # else an error would hold it, and it the error, until a collection
        return scratch.views()

    async def _scratch(self, ranges: tuple[ByteRange, ...], pieces: int) -> ReceiveBuffer:
        size = aligned_offsets(r.size for r in ranges)[1] + pieces * PAGE
        try:
            if size <= LOOP_COPY_BYTES:
                lent = self._shm.pool.lend(size)
            else:
                lent = await asyncio.to_thread(self._shm.pool.lend, size)
        except PoolExhausted:
            raise ServiceError(
                "the worker has no memory left to receive tensors; try again later, or give the "
                "machine more memory"
            ) from None
        self._shm.settle()
        return ReceiveBuffer(*lent, ranges)

    async def _ready(self) -> tuple[NixlAgent, NixlTransfers]:
        if self._agent is None or self._mover is None:
            await asyncio.to_thread(self._make)
        assert self._agent is not None
        assert self._mover is not None
        return self._agent, self._mover

    def _make(self) -> None:
        with self._lock:
            if self._closed:
                raise TicketLost("this process is ending")
            if self._mover is None:
                self._agent = NixlAgent(self._agent_name, self._host, self._awake)
                self._mover = NixlTransfers(self._agent, self._shm.grant)
                self._shm.pool.on_discard = self._agent.forget

    def _awake(self) -> bool:
        """Whether a ticket is open that others may ask for."""
        return self._shm.tickets > 0

    def _described(
        self, agent: NixlAgent, generation: int
    ) -> tuple[bytes, tuple[MemoryDescriptor, ...]]:
        """In the agent's thread: what readers need to reach a ticket's segments."""
        grant = self._shm.grant(generation)
        segments = [] if grant is None else [segment for _, segment in grant.held]
        if not segments:
            raise TicketLost(GONE)
        return agent.metadata(segments), tuple(agent.register(segment) for segment in segments)


async def _result(future: Future[T]) -> T:
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future  # as above


def _pass_on(done: Future[None], begun: Future[None]) -> None:
    """What was not even begun has failed."""
    if not begun.cancelled() and (error := begun.exception()) is not None:
        fail(done, error)


def _sealed(address: NixlAddress) -> bytes:
    """With a checksum: NIXL must not be given metadata that were damaged on their way."""
    packed = msgspec.msgpack.encode(address)
    return zlib.crc32(packed).to_bytes(4, "big") + packed


def _opened(sealed: bytes) -> NixlAddress:
    packed = memoryview(sealed)[4:]
    if zlib.crc32(packed).to_bytes(4, "big") != sealed[:4]:
        raise TicketLost("the ticket is damaged: its checksum does not fit its address")
    try:
        return msgspec.msgpack.decode(packed, type=NixlAddress)
    except msgspec.MsgspecError:
        raise TicketLost("the ticket is damaged: its address cannot be read") from None


def _source(ticket: Ticket, address: NixlAddress) -> RemoteTensors:
    try:
        near = msgspec.msgpack.decode(address.near, type=ShmAddress)
    except msgspec.MsgspecError:
        raise TicketLost("the ticket is damaged: its address cannot be read") from None
    if ticket.generation < 1 or not near.pieces or len(near.pieces) != len(address.spots):
        raise TicketLost("the ticket is damaged: it has no memory")
    for piece, spot in zip(near.pieces, address.spots, strict=True):
        if not 0 <= piece.slot < SLOTS or spot[1] != PAGE + piece.size:
            raise TicketLost("the ticket is damaged: its address fits no segment")
    pieces = (
        (spot, piece.nonce, piece.slot)
        for piece, spot in zip(near.pieces, address.spots, strict=True)
    )
    key = near.pieces[0].nonce
    return RemoteTensors(
        address.agent, address.metadata, ticket.generation, ticket.epoch, key, tuple(pieces)
    )


def _range(part: TensorSpec, size: int, source: RemoteTensors) -> ByteRange | None:
    """Where a part lies in the ticket's pieces; None: nowhere, for it is empty."""
    if not size:
        return None
    sizes = [spot[1] - PAGE for spot, _, _ in source.pieces]
    starts = [0, *itertools.accumulate(sizes)]
    index = bisect.bisect_right(starts, part.offset) - 1
    if not 0 <= index < len(sizes) or part.offset - starts[index] + size > sizes[index]:
        raise TicketLost("the ticket is damaged: a part lies outside its memory")
    return ByteRange(index, part.offset - starts[index], size)
