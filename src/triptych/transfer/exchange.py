"""What a worker holds of transfer: it publishes by its own transport and fetches by any.

``offer`` and ``borrow`` are the scopes that stages use: whatever ends them, a cancel included, the
memory goes back. Counts what goes out and comes in, by transport.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from triptych.errors import InvalidConfig, TicketLost
from triptych.messages import Ticket
from triptych.transfer.base import Array, Fetched, Transfer
from triptych.transfer.inline import InlineTransfer
from triptych.transfer.shm import ShmTransfer


class Counted(Transfer, Protocol):
    """A transport that can say what it holds."""

    @property
    def tickets(self) -> int: ...

    @property
    def segments(self) -> int: ...


TRANSPORTS: dict[str, Callable[[str, int], Counted]] = {  # made from owner and epoch
    "inline": InlineTransfer,
    "shm": ShmTransfer,
}


class Counts(Struct, frozen=True):
    bytes_sent: dict[str, int]  # by transport
    bytes_received: dict[str, int]
    tickets: int  # published and not yet released or expired
    segments: int  # in use, by tickets or by arrays that have not been published


class Exchange:
    def __init__(self, transport: str, owner: str, epoch: int) -> None:
        if transport not in TRANSPORTS:
            raise InvalidConfig(
                f"transport '{transport}' is unknown; there are {', '.join(sorted(TRANSPORTS))}"
            )
        self._owner = owner
        self._epoch = epoch
        self._open: dict[str, Counted] = {}
        self._mine = self._transfer(transport)
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Memory that ``publish`` hands over without a copy. May be called from any thread."""
        return self._mine.empty(dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        ticket = await self._mine.publish(arrays, lifetime=lifetime)
        self._sent[ticket.transport] += ticket.size
        return ticket

    async def fetch(self, ticket: Ticket) -> Fetched:
        fetched = await self._transfer(ticket.transport).fetch(ticket)
        self._received[ticket.transport] += ticket.size
        return fetched

    def release(self, ticket: Ticket) -> None:
        self._transfer(ticket.transport).release(ticket)

    @contextlib.asynccontextmanager
    async def offer(
        self, arrays: Sequence[Array], *, lifetime: float = 600.0
    ) -> AsyncIterator[Ticket]:
        """A ticket for as long as the scope is open.

        The lifetime is long because the scope's end is what gives the memory back; expiry is there
        for readers, who may not trust an owner that has been standing still.
        """
        ticket = await self.publish(arrays, lifetime=lifetime)
        try:
            yield ticket
        finally:
            self.release(ticket)

    @contextlib.asynccontextmanager
    async def borrow(self, ticket: Ticket) -> AsyncIterator[Fetched]:
        """Another worker's tensors, in place. ``check`` them after the last use."""
        fetched = await self.fetch(ticket)
        try:
            yield fetched
        finally:
            fetched.close()

    def counts(self) -> Counts:
        return Counts(
            bytes_sent=dict(self._sent),
            bytes_received=dict(self._received),
            tickets=sum(transfer.tickets for transfer in self._open.values()),
            segments=sum(transfer.segments for transfer in self._open.values()),
        )

    async def close(self) -> None:
        for transfer in self._open.values():
            await transfer.close()

    def _transfer(self, name: str) -> Counted:
        if name not in TRANSPORTS:
            raise TicketLost(f"the ticket's transport '{name}' is unknown here")
        if name not in self._open:
            self._open[name] = TRANSPORTS[name](self._owner, self._epoch)
        return self._open[name]
