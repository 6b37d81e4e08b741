"""A process's access to all transports: it publishes by its own and fetches by any.

With ``auto`` the caller says by which transport to publish, since it knows the readers; without
that shared memory is used. A transport is opened for the first ticket that needs it, or by
``check_transports``. Where the engine works on a GPU, ``auto`` also lends memory of that, and hands
it over in place to readers on the same GPU; for all others it copies it to the host when it
publishes.

``offer`` and ``borrow`` are the scopes that stages use: however they end, cancelled or not, the
memory goes back. Counts the bytes that go out and come in, by transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec
from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, TicketLost, install_hint
from triptych.messages import Ticket
from triptych.requirements import EXTRAS, is_installed
from triptych.transfer.base import Array, FetchedArrays, Transport, TransportError
from triptych.transfer.cuda import CudaTransport
from triptych.transfer.cuda_driver import CudaError, open_shareable_gpu
from triptych.transfer.registry import SELECTABLE, TRANSPORTS, TransportContext, TransportEntry

log = logging.getLogger(__name__)


def readable_transports(**settings: str) -> tuple[str, ...]:
    """The transports whose tickets a process with these settings can read, as far as installed
    packages show."""
    entries = [TRANSPORTS[name] for name in SELECTABLE]
    return tuple(
        entry.name
        for entry in entries
        if not _lacks_package(entry) and (not entry.setting or settings.get(entry.setting))
    )


class TransferCounts(Struct, frozen=True):
    bytes_sent: dict[str, int]  # by transport
    bytes_received: dict[str, int]
    tickets: int  # published and not yet released or expired
    segments: int  # in use, by tickets or by arrays that have not been published


class TransferClient:
    """``host``: the address at which other hosts reach this process. ``settings``: those that
    entries of the table name."""

    def __init__(
        self, transport: str, owner: str, epoch: int, *, host: str = "127.0.0.1", **settings: str
    ) -> None:
        self._auto = transport == "auto"
        self._chosen = "shm" if self._auto else transport
        self._settings = settings
        self._check_choice()
        self._context = TransportContext(owner, epoch, host, settings, find=self.find)
        self._open: dict[str, Transport] = {}
        self._own = self.find(self._chosen)
        self._gpu: CudaTransport | None = None
        self._used = transport
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    @classmethod
    def from_config(cls, config: Config, owner: str, epoch: int) -> Self:
        names = {entry.setting for entry in TRANSPORTS.values() if entry.setting}
        settings = {name: getattr(config, name) for name in names}
        return cls(config.transport, owner, epoch, host=config.worker_host, **settings)

    @property
    def readable(self) -> tuple[str, ...]:
        """The transports whose tickets this process can read, before any was tried."""
        return readable_transports(**self._settings)

    @property
    def folder(self) -> str:
        """The id of the folder of transport 'file'; empty: that is not open."""
        return str(getattr(self._open.get("file"), "folder_id", ""))

    @property
    def transport(self) -> str:
        """The transport of the last ticket; what is configured, before the first."""
        return self._used

    async def check_transports(self, *, other_hosts: bool = False) -> tuple[str, ...]:
        """The transports whose tickets this process can read.

        Opens those that have to be opened to know it: the one that is configured, and with
        ``other_hosts`` all. Raises InvalidConfig where the configured one does not work; leaves
        out others, and logs why.
        """
        names = []
        for name in self.readable:
            named = not self._auto and name == self._chosen
            if TRANSPORTS[name].opened_early and (named or other_hosts):
                try:
                    await self.find(name).open()
                except (TransportError, InvalidConfig) as error:
                    if named:
                        raise InvalidConfig(
                            f"transport '{name}' does not work here: {error}"
                        ) from error
                    log.warning("transport '%s' does not work here, left out: %s", name, error)
                    continue
            names.append(name)
        return tuple(names)

    async def use_gpu(self, number: int, limit: int = 0) -> str:
        """Lend memory of the GPU that the engine works on, and read others' on it.

        Returns the GPU's identity for others to compare; empty: its memory cannot be shared here,
        or --transport names a transport. ``limit`` bounds the memory; 0: a fraction of the GPU's.
        """
        if not self._auto:
            return ""
        try:
            gpu = await asyncio.to_thread(open_shareable_gpu, number)
        except CudaError as error:
            log.warning("GPU %d shares no memory, tensors go over the host: %s", number, error)
            return ""
        owner, epoch = self._context.owner, self._context.epoch
        self.add_gpu(CudaTransport(gpu, owner, epoch, limit=limit))
        return gpu.identity.hex()

    def add_gpu(self, transport: CudaTransport) -> None:
        self._gpu = self._open[transport.name] = transport

    def empty(self, dtype: str, shape: tuple[int, ...], *, gpu: int | None = None) -> Array:
        """Memory that ``publish`` hands over without a copy. May be called from any thread.

        ``gpu``: the GPU whose memory would be best. The array is in the host's memory where that
        GPU has none left, or where the array is too small for it to pay.
        """
        if self._gpu is not None and gpu == self._gpu.gpu.number:
            array = self._gpu.lend(dtype, shape)
            if array is not None:
                return array
        return self._own.empty(dtype, shape)

    async def publish(
        self, arrays: Sequence[Array], *, lifetime: float = 60.0, by: str = ""
    ) -> Ticket:
        """``by``: the transport that all readers can take; applies where ours is auto."""
        transport: Transport
        if self._gpu is not None and by == self._gpu.name and self._gpu.can_publish(arrays):
            transport = self._gpu
        else:
            transport = self.find(by) if self._auto and by in SELECTABLE else self._own
            arrays = await self._on_host(arrays, transport)
        ticket = await transport.publish(arrays, lifetime=lifetime)
        self._used = ticket.transport
        self._sent[ticket.transport] += ticket.size
        return ticket

    async def fetch(self, ticket: Ticket) -> FetchedArrays:
        fetched = await self.find(ticket.transport).fetch(ticket)
        self._received[fetched.transport] += ticket.size
        return fetched

    def release(self, ticket: Ticket) -> None:
        self.find(ticket.transport).release(ticket)

    @contextlib.asynccontextmanager
    async def offer(
        self, arrays: Sequence[Array], *, lifetime: float = 600.0, by: str = ""
    ) -> AsyncIterator[Ticket]:
        """A ticket for as long as the scope is open.

        The lifetime is long because the end of the scope gives the memory back; expiry is for
        readers, which must not trust an owner that has been standing still.
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
            tickets=sum(transport.tickets for transport in self._open.values()),
            segments=sum(transport.segments for transport in self._open.values()),
        )

    async def close(self) -> None:
        # NIXL is opened after the shared memory that it registers, and closes before it.
        for transport in reversed(list(self._open.values())):
            await transport.close()

    def find(self, name: str) -> Transport:
        """The transport of that name, opened now if need be; TicketLost where there is none."""
        if name not in self._open:
            if name not in SELECTABLE or self._lacks_setting(TRANSPORTS[name]):
                raise TicketLost(f"the ticket's transport '{name}' is unknown here")
            only = not self._auto and name == self._chosen
            context = msgspec.structs.replace(self._context, only=only)
            self._open[name] = TRANSPORTS[name].open(context)
        return self._open[name]

    def _check_choice(self) -> None:
        name = self._chosen
        if name not in SELECTABLE:
            raise InvalidConfig(
                f"transport '{name}' is unknown; there are auto, {', '.join(SELECTABLE)}"
            )
        entry = TRANSPORTS[name]
        if _lacks_package(entry):
            raise InvalidConfig(f"transport '{name}' needs packages. {install_hint(entry.extra)}")
        if self._lacks_setting(entry):
            flag = "--" + entry.setting.replace("_", "-")
            raise InvalidConfig(f"transport '{name}' needs {flag}")

    def _lacks_setting(self, entry: TransportEntry) -> bool:
        return bool(entry.setting) and not self._settings.get(entry.setting)

    async def _on_host(self, arrays: Sequence[Array], transport: Transport) -> Sequence[Array]:
        """The arrays in memory that every reader can take."""
        gpu = self._gpu
        if gpu is None or not any(map(gpu.owns, arrays)):
            return arrays

        def copied(array: Array) -> Array:
            own = transport.empty(array.dtype, array.shape)
            gpu.read(array, own.buffer)
            return own

        return await asyncio.to_thread(
            lambda: [copied(array) if gpu.owns(array) else array for array in arrays]
        )


def _lacks_package(entry: TransportEntry) -> bool:
    return not all(is_installed(package) for package in EXTRAS.get(entry.extra, ()))
