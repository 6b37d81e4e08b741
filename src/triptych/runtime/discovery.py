"""Discovery: where workers are found. One door, and behind it a directory or NATS.

A worker claims an epoch, registers its record and renews the lease until it leaves. Readers see the
records whose lease is live; while discovery is away they keep their last view. Several clusters on
one NATS have a namespace each and see nothing of each other. Nothing here talks to a worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct

from triptych.config import Config
from triptych.messages import WorkerRecord
from triptych.runtime.lease import Lease


class Standing(Struct, frozen=True):
    """Where discovery is, for people, and whether what it tells is only its last known view."""

    place: str
    away: bool


class Discovery(Protocol):
    """The place where the workers of one cluster find each other."""

    async def claim(self, worker_id: str) -> int:
        """A new epoch for this worker, greater than any before: its older incarnations are fenced.

        Two that race get two epochs.
        """

    async def register(self, record: WorkerRecord) -> Lease:
        """Show this record to all readers until the lease is closed or lost."""

    async def view(self) -> dict[str, WorkerRecord]:
        """The workers whose lease is live, by id. While discovery is away: those of the last."""

    def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        """The view now, and again whenever it has changed."""

    @property
    def standing(self) -> Standing: ...


@asynccontextmanager
async def open_discovery(config: Config, name: str) -> AsyncIterator[Discovery]:
    """The one that the config names: NATS where it says what to join, else the run directory.

    ``name`` tells whoever looks at NATS which process this is.
    """
    if not config.join:
        from triptych.runtime.directory import Directory

        yield Directory(config.run_dir)
        return
    from triptych.runtime.nats import options_of
    from triptych.runtime.nats_discovery import open_nats

    async with open_nats(options_of(config), config.namespace, name) as discovery:
        yield discovery
