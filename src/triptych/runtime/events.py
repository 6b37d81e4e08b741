"""The event plane: what a worker tells everybody of its prefix cache, without being asked.

By default nothing stands here: whoever wants to know keeps a call open (WatchCache). Over ZMQ a
worker tells once, however many frontends listen; over NATS what it told stays in a stream besides,
so that a new frontend catches up without the worker. On either an event may be lost; changes are
numbered, and who misses one asks the worker for the whole. For routing alone: nothing that is told
here, late, twice or never, changes a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.messages import CacheChange

Hear = Callable[[CacheChange], None]
Whole = Callable[[], CacheChange]  # all that a worker's cache holds now


class Teller(Protocol):
    """A worker's end."""

    @property
    def address(self) -> str:
        """For its record in discovery; empty where listeners need none."""

    def tell(self, change: CacheChange) -> None:
        """Never blocks, and never fails: what can't be sent is lost."""

    async def close(self) -> None: ...


class Listener(Protocol):
    """A frontend's end, for all its workers."""

    def follow(self, worker: str, epoch: int, address: str, hear: Hear) -> Callable[[], None]:
        """Hear what this incarnation tells, until the function that is given back is called."""

    async def close(self) -> None: ...
