"""Between hosts: tensors move by NIXL, from the same memory that shared memory reads in place.

A ticket has two addresses of its memory. A reader on the owner's host maps it; another one has the
bytes moved into a buffer of its own, and sees them once they are verified. The agent is made when
it is first needed, and every call of it is off the event loop. What lies on a GPU was copied to the
host before, which is faster over TCP (ADR 14): a descriptor's device is always 0.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import ServiceError, TicketLost
from triptych.host import boot_time
from triptych.messages import TensorSpec, Ticket
from triptych.transfer.base import (
    Array,
    CopiedArrays,
    FetchedArrays,
    aligned_offsets,
    decode_address,
    no_memory_to_receive,
    part_sizes,
    run_sized,
)
from triptych.transfer.nixl_agent import MemoryDescriptor, NixlAgent, NixlError
from triptych.transfer.nixl_transfers import (
    ENDING,
    GONE,
    ByteRange,
    NixlTransfers,
    ReceiveBuffer,
    RemoteTensors,
    fail,
)
from triptych.transfer.pool import PoolExhausted
from triptych.transfer.registry import TransportContext
from triptych.transfer.segment import PAGE, SLOTS, memory_domain
from triptych.transfer.shm import ShmAddress, ShmTransport

Method = Literal["read", "write"]
T = TypeVar("T")


class NixlAddress(Struct, frozen=True, array_like=True):
    host: str  # the memory domain: processes of it map the memory, others have it moved
    shm: bytes  # the address for shared memory
    agent: str
    metadata: bytes
    places: tuple[MemoryDescriptor, ...]  # of the segments, their first pages included


def open_transport(context: TransportContext) -> NixlTransport:
    assert context.find is not None
    shm = context.find("shm")
    return NixlTransport(shm, context.owner, context.epoch, context.host, context.only)


class NixlTransport:
    """``shm`` has the memory. ``host``: the address where others reach this process.

    ``always``: move also what could be read in place. ``method``: and how; None: the faster one.
    """

    name = "nixl"
    tickets = 0  # shared memory counts them
    segments = 0

    def __init__(
        self,
        shm: ShmTransport,
        owner: str,
        epoch: int,
        host: str,
        always: bool = False,
        method: Method | None = None,
    ) -> None:
        self._shm = shm
        self._agent_name = f"{owner}-{epoch}-{os.urandom(8).hex()}"
        self._host = host
        self._always = always
        self._method = method
        self._lock = threading.Lock()
        self._closed = False
        self._agent: NixlAgent | None = None
        self._transfers: NixlTransfers | None = None

    @property
    def regions(self) -> int:
        """Segments that are registered."""
        return 0 if self._agent is None else self._agent.regions

    @property
    def operations(self) -> int:
        """Transfers under way."""
        return 0 if self._agent is None else len(self._agent.operations)

    async def open(self) -> None:
        """Make the agent now."""
        await self._ready()

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return self._shm.empty(dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        with _reported("publish"):
            agent, _ = await self._ready()
            ticket = await self._shm.publish(arrays, lifetime=lifetime)
            with contextlib.ExitStack() as undo:
                undo.callback(self._shm.release, ticket)
                described = agent.submit(self._describe, agent, ticket.serial)
                metadata, places = await _result(described)
                undo.pop_all()
        address = NixlAddress(memory_domain(), ticket.address, agent.name, metadata, places)
        packed = pack_address(address)
        return msgspec.structs.replace(ticket, transport=self.name, address=packed)

    async def fetch(self, ticket: Ticket) -> FetchedArrays:
        address = unpack_address(ticket.address)
        near = address.host == memory_domain()
        if address.agent == self._agent_name or (near and not self._always):
            return await self._shm.fetch(msgspec.structs.replace(ticket, address=address.shm))
        if near and not ticket.expires > boot_time():  # else the clock is another host's
            raise TicketLost("the ticket has expired")
        sizes = part_sizes(ticket)
        source = _source(ticket, address)
        ranges = tuple(
            _range(part, size, source) for part, size in zip(ticket.parts, sizes, strict=True)
        )
        needed = tuple(r for r in ranges if r is not None)
        method = self._method or ("read" if near else "write")
        with _reported("fetch"):
            arrays = iter(await self._move(source, needed, method) if needed else ())
        return CopiedArrays(
            tuple(
                Array(next(arrays) if size else memoryview(bytearray()), part.dtype, part.shape)
                for part, size in zip(ticket.parts, sizes, strict=True)
            ),
            self.name,
        )

    def release(self, ticket: Ticket) -> None:
        self._shm.release(ticket)

    async def close(self) -> None:
        """Before that of shared memory: registered memory must not be unmapped."""
        await asyncio.to_thread(self._close_agent)

    def _close_agent(self) -> None:
        with self._lock:  # an agent may be in the making
            self._closed = True
            if self._agent is not None:
                self._agent.close()

    async def _move(
        self, source: RemoteTensors, ranges: tuple[ByteRange, ...], method: Method
    ) -> list[memoryview]:
        agent, transfers = await self._ready()
        buffer = await self._allocate(ranges, len(source.pieces))
        done: Future[None] = Future()
        if method == "read":
            begun = agent.submit(transfers.read, source, buffer, done)
        else:
            begun = agent.submit(transfers.request_write, source, buffer, os.urandom(16), done)
        begun.add_done_callback(functools.partial(_pass_on, done))
        try:
            await _result(done)
        finally:
            del done, begun  # else an error would hold it, and it the error, until a collection
        return buffer.views()

    async def _allocate(self, ranges: tuple[ByteRange, ...], pieces: int) -> ReceiveBuffer:
        size = aligned_offsets(r.size for r in ranges)[1] + pieces * PAGE
        try:
            lent = await run_sized(size, self._shm.pool.lend, size)
        except PoolExhausted:
            raise no_memory_to_receive() from None
        self._shm.settle()
        return ReceiveBuffer(*lent, ranges)

    async def _ready(self) -> tuple[NixlAgent, NixlTransfers]:
        if self._agent is None or self._transfers is None:
            await asyncio.to_thread(self._make_agent)
        assert self._agent is not None
        assert self._transfers is not None
        return self._agent, self._transfers

    def _make_agent(self) -> None:
        with self._lock:
            if self._closed:
                raise TicketLost(ENDING)
            if self._transfers is None:
                self._agent = NixlAgent(self._agent_name, self._host, self._awake)
                self._transfers = NixlTransfers(self._agent, self._shm.find_ticket)
                self._shm.pool.on_discard = self._agent.deregister

    def _awake(self) -> bool:
        """Whether a ticket is open that others may ask for."""
        return self._shm.tickets > 0

    def _describe(
        self, agent: NixlAgent, serial: int
    ) -> tuple[bytes, tuple[MemoryDescriptor, ...]]:
        """In the agent's thread: what readers need to reach a ticket's segments."""
        ticket = self._shm.find_ticket(serial)
        segments = [] if ticket is None else [segment for _, segment in ticket.segments]
        if not segments:
            raise TicketLost(GONE)
        return agent.metadata(segments), tuple(agent.register(segment) for segment in segments)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """An error of NIXL's as one that fails the request and tells the client to try again."""
    try:
        yield
    except NixlError as error:
        raise ServiceError(f"NIXL could not {what} the tensors: {error}") from error


async def _result(future: Future[T]) -> T:
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future  # as above


def _pass_on(done: Future[None], begun: Future[None]) -> None:
    """A command that failed has begun no transfer."""
    if not begun.cancelled() and (error := begun.exception()) is not None:
        fail(done, error)


def pack_address(address: NixlAddress) -> bytes:
    """With a checksum: NIXL must not load metadata that were damaged on their way."""
    packed = msgspec.msgpack.encode(address)
    return zlib.crc32(packed).to_bytes(4, "big") + packed


def unpack_address(sealed: bytes) -> NixlAddress:
    packed = sealed[4:]
    if zlib.crc32(packed).to_bytes(4, "big") != sealed[:4]:
        raise TicketLost("the ticket is damaged: its checksum does not match its address")
    return decode_address(packed, NixlAddress)


def _source(ticket: Ticket, address: NixlAddress) -> RemoteTensors:
    shm = decode_address(address.shm, ShmAddress)
    if ticket.serial < 1 or not shm.pieces or len(shm.pieces) != len(address.places):
        raise TicketLost("the ticket is damaged: it has no memory")
    for piece, place in zip(shm.pieces, address.places, strict=True):
        if not 0 <= piece.slot < SLOTS or place[1] != PAGE + piece.size:
            raise TicketLost("the ticket is damaged: its address matches no segment")
    pieces = (
        (place, piece.nonce, piece.slot)
        for piece, place in zip(shm.pieces, address.places, strict=True)
    )
    key = shm.pieces[0].nonce
    return RemoteTensors(
        address.agent, address.metadata, ticket.serial, ticket.epoch, key, tuple(pieces)
    )


def _range(part: TensorSpec, size: int, source: RemoteTensors) -> ByteRange | None:
    """Where a part lies in the ticket's pieces; None: it is empty."""
    if not size:
        return None
    sizes = [place[1] - PAGE for place, _, _ in source.pieces]
    starts = [0, *itertools.accumulate(sizes)]
    index = bisect.bisect_right(starts, part.offset) - 1
    if not 0 <= index < len(sizes) or part.offset - starts[index] + size > sizes[index]:
        raise TicketLost("the ticket is damaged: a part lies outside its memory")
    return ByteRange(index, part.offset - starts[index], size)
