"""What a worker holds of transfer: it publishes by its own transport and fetches by any.

``auto`` publishes as whoever knows the readers says, and else by shared memory; NIXL is not loaded
before the first ticket that needs it, or ``prove``. Where the engine works on a GPU, ``auto`` also
lends memory of that, and hands it over in place to readers on the same GPU; for all others it
copies it to the host when it publishes.

``offer`` and ``borrow`` are the scopes that stages use: whatever ends them, a cancel included, the
memory goes back. Counts what goes out and comes in, by transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from msgspec import Struct

from triptych.errors import InvalidConfig, TicketLost, install_hint
from triptych.messages import Ticket
from triptych.transfer.base import Array, FetchedArrays, Transport
from triptych.transfer.cuda import CudaTransport
from triptych.transfer.cuda_driver import CudaError, open_shareable_gpu
from triptych.transfer.inline import InlineTransport
from triptych.transfer.shm import MappedArrays, ShmTransport

log = logging.getLogger(__name__)


class Counted(Transport, Protocol):
    """A transport that can say what it holds."""

    @property
    def tickets(self) -> int: ...

    @property
    def segments(self) -> int: ...


TRANSPORTS = ("inline", "nixl", "shm")


def readable_transports() -> tuple[str, ...]:
    """The transports whose tickets can be read here, as far as what is installed tells."""
    there = importlib.util.find_spec("nixl_cu13") is not None
    return tuple(name for name in TRANSPORTS if there or name != "nixl")


class TransferCounts(Struct, frozen=True):
    bytes_sent: dict[str, int]  # by transport
    bytes_received: dict[str, int]
    tickets: int  # published and not yet released or expired
    segments: int  # in use, by tickets or by arrays that have not been published


class TransferClient:
    """``host``: the address at which other hosts reach this process."""

    def __init__(self, transport: str, owner: str, epoch: int, *, host: str = "127.0.0.1") -> None:
        if transport != "auto" and transport not in TRANSPORTS:
            raise InvalidConfig(
                f"transport '{transport}' is unknown; there are auto, {', '.join(TRANSPORTS)}"
            )
        if transport not in ("auto", *readable_transports()):
            raise InvalidConfig(f"transport 'nixl' needs NIXL. {install_hint('nixl')}")
        self._owner = owner
        self._epoch = epoch
        self._host = host
        self._auto = transport == "auto"
        self._always = transport == "nixl"
        self._open: dict[str, Counted] = {}
        self._mine = self._transfer("shm" if self._auto else transport)
        self._gpu: CudaTransport | None = None
        self._used = transport
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    @property
    def transport(self) -> str:
        """What was published by last; what is configured, while nothing was."""
        return self._used

    async def prove(self) -> tuple[str, ...]:
        """The transports whose tickets can really be read: NIXL is loaded and opened for it.

        Raises where NIXL is the one that was asked for; else says why it is left out.
        """
        names = readable_transports()
        if "nixl" not in names:
            return names
        try:
            from triptych.transfer.nixl import NixlTransport

            transfer = self._transfer("nixl")
            assert isinstance(transfer, NixlTransport)
            await transfer.open()
        except Exception as error:  # (libraries fail to load in many ways)
            if self._always:
                raise InvalidConfig(f"transport 'nixl' does not work here: {error}") from error
            log.warning("NIXL is installed but does not work, and is left out: %s", error)
            return tuple(name for name in names if name != "nixl")
        return names

    async def use_gpu(self, number: int, limit: int = 0) -> str:
        """Lend memory of the GPU that the engine works on, and read others' on it.

        Gives the GPU's name for others to compare; none: its memory cannot be shared here, or a
        transport was asked for. ``limit`` bounds what is taken of it; 0: a share.
        """
        if not self._auto:
            return ""
        try:
            gpu = await asyncio.to_thread(open_shareable_gpu, number)
        except CudaError as error:
            log.warning("GPU %d shares no memory: tensors go over the host (%s)", number, error)
            return ""
        self.add_gpu(CudaTransport(gpu, self._owner, self._epoch, limit=limit))
        return gpu.identity.hex()

    def add_gpu(self, transfer: CudaTransport) -> None:
        self._gpu = self._open[transfer.name] = transfer

    def empty(self, dtype: str, shape: tuple[int, ...], *, gpu: int | None = None) -> Array:
        """Memory that ``publish`` hands over without a copy. May be called from any thread.

        ``gpu``: whose memory would be best. The host's is given where that has none, or where it is
        not worth it.
        """
        if self._gpu is not None and gpu == self._gpu.gpu.number:
            array = self._gpu.lend(dtype, shape)
            if array is not None:
                return array
        return self._mine.empty(dtype, shape)

    async def publish(
        self, arrays: Sequence[Array], *, lifetime: float = 60.0, by: str = ""
    ) -> Ticket:
        """``by``: the transport that all readers can take; heeded where ours is auto."""
        transfer: Counted
        if self._gpu is not None and by == self._gpu.name and self._gpu.takes(arrays):
            transfer = self._gpu
        else:
            transfer = self._transfer(by) if self._auto and by in TRANSPORTS else self._mine
            arrays = await self._on_host(arrays, transfer)
        ticket = await transfer.publish(arrays, lifetime=lifetime)
        self._used = ticket.transport
        self._sent[ticket.transport] += ticket.size
        return ticket

    async def fetch(self, ticket: Ticket) -> FetchedArrays:
        fetched = await self._transfer(ticket.transport).fetch(ticket)
        way = ticket.transport
        if way == "nixl" and isinstance(fetched, MappedArrays):  # in place, as the ticket also says
            way = "shm"
        self._received[way] += ticket.size
        return fetched

    def release(self, ticket: Ticket) -> None:
        self._transfer(ticket.transport).release(ticket)

    @contextlib.asynccontextmanager
    async def offer(
        self, arrays: Sequence[Array], *, lifetime: float = 600.0, by: str = ""
    ) -> AsyncIterator[Ticket]:
        """A ticket for as long as the scope is open.

        The lifetime is long because the scope's end is what gives the memory back; expiry is there
        for readers, who may not trust an owner that has been standing still.
        """
        ticket = await self.publish(arrays, lifetime=lifetime, by=by)
        try:
            yield ticket
        finally:
            self.release(ticket)

    @contextlib.asynccontextmanager
    async def borrow(self, ticket: Ticket) -> AsyncIterator[FetchedArrays]:
        """Another worker's tensors, in place. ``check`` them after the last use."""
        fetched = await self.fetch(ticket)
        try:
            yield fetched
        finally:
            fetched.close()

    def counts(self) -> TransferCounts:
        return TransferCounts(
            bytes_sent=dict(self._sent),
            bytes_received=dict(self._received),
            tickets=sum(transfer.tickets for transfer in self._open.values()),
            segments=sum(transfer.segments for transfer in self._open.values()),
        )

    async def close(self) -> None:
        for name in sorted(self._open):  # NIXL before the shared memory that it has registered
            await self._open[name].close()

    async def _on_host(self, arrays: Sequence[Array], transfer: Transport) -> Sequence[Array]:
        """The arrays in memory that every reader can take."""
        gpu = self._gpu
        if gpu is None or not any(map(gpu.owns, arrays)):
            return arrays

        def copied(array: Array) -> Array:
            own = transfer.empty(array.dtype, array.shape)
            gpu.read(array, own.buffer)
            return own

        return await asyncio.to_thread(
            lambda: [copied(array) if gpu.owns(array) else array for array in arrays]
        )

    def _transfer(self, name: str) -> Counted:
        if name in self._open:
            return self._open[name]
        if name not in TRANSPORTS:
            raise TicketLost(f"the ticket's transport '{name}' is unknown here")
        self._open[name] = self._made(name)
        return self._open[name]

    def _made(self, name: str) -> Counted:
        if name == "inline":
            return InlineTransport(self._owner, self._epoch)
        if name == "shm":
            return ShmTransport(self._owner, self._epoch)
        shm = self._transfer("shm")
        assert isinstance(shm, ShmTransport)
        from triptych.transfer.nixl import NixlTransport

        return NixlTransport(shm, self._owner, self._epoch, self._host, always=self._always)
