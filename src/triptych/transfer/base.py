"""The door of every transport: tensors go from worker to worker by ticket.

``publish`` puts tensors where a reader can reach them and gives a ticket; ``fetch`` makes them
readable, in place where the transport can; ``release`` gives the memory back. The owner keeps the
memory until release or expiry. Nothing here knows torch: an Array is bytes with a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.messages import Ticket


@dataclass(frozen=True, slots=True)
class Array:
    """A C-contiguous tensor without a library: bytes, dtype name and shape."""

    buffer: memoryview  # flat, format "B"
    dtype: str  # "float32", "bfloat16", "uint8" ...
    shape: tuple[int, ...]
    gpu: int | None = None  # whose memory it is, by CUDA's count; the host must not touch it then


class Fetched(Protocol):
    """Tensors of another worker, readable until ``close``."""

    arrays: tuple[Array, ...]

    def check(self) -> None:
        """Raise TicketLost if the owner has taken the memory back meanwhile."""

    def close(self) -> None: ...


class Transfer(Protocol):
    """One transport. All methods are safe to call from the event loop."""

    name: str

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Memory that ``publish`` hands over without a copy."""

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket: ...

    async def fetch(self, ticket: Ticket) -> Fetched: ...

    def release(self, ticket: Ticket) -> None:
        """Give the memory back. Releasing twice, or after expiry, does nothing."""

    async def close(self) -> None: ...
