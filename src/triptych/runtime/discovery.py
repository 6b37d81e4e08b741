"""Discovery: where workers are found. One door, and behind it a directory or NATS.

A worker claims an epoch, registers its record and renews the lease until it leaves. Readers see the
records whose lease is live; while discovery is away they keep their last view. Several clusters on
one NATS have a namespace each and see nothing of each other. Nothing here talks to a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct

from triptych.config import Config
from triptych.messages import WorkerRecord
from triptych.observe.progress import print_status
from triptych.runtime.lease import Lease

WAITING_SECONDS = 10.0  # in silence, after which it is said where somebody waits


class Standing(Struct, frozen=True):
    """Where discovery is, for people, and whether what it tells is only its last known view."""

    place: str  # NATS's servers, or the run directory
    away: bool
    namespace: str = ""  # of that NATS

    @property
    def setting(self) -> str:
        """What whoever is to be found must have too."""
        return f"--namespace {self.namespace}" if self.namespace else f"--run-dir {self.place}"


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

    async def others(self) -> tuple[str, ...]:
        """Namespaces beside ours where somebody is."""

    async def watched(self) -> bool:
        """Whether a frontend is known to read here. For workers: a frontend itself does."""

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        """Live records, as of the last look, that this cluster has not signed. Not to be used:
        anyone who can write to discovery may have made them."""

    @property
    def standing(self) -> Standing: ...


async def tell_waiting(
    discovery: Discovery, waits: Callable[[], str], found: Callable[[], Awaitable[str]]
) -> None:
    """Say, once and after a while, where we are and what we still wait for (empty: nothing). Who
    is not found may be elsewhere, because one of the two names was mistyped; but not where
    ``found`` tells of somebody who is here and of no use."""
    await asyncio.sleep(WAITING_SECONDS)
    if not waits():
        return
    standing = discovery.standing
    where = f"in {standing.setting}"
    if standing.namespace:
        where += f" of NATS at {standing.place}"
    if here := await found():
        also = f" ({here})"
    elif others := ", ".join(await discovery.others()):
        also = f". Somebody is in {others}: is --namespace right, here and there?"
    else:
        also = ""
    if what := waits():  # others take some seconds
        print_status(f"still waiting for {what} {where}{also}")


@asynccontextmanager
async def open_discovery(config: Config, name: str, secret: str) -> AsyncIterator[Discovery]:
    """The one that the config names: NATS where it says what to join, else the run directory.

    ``name`` tells whoever looks at NATS which process this is. Records are signed with ``secret``.
    """
    if not config.join:
        from triptych.runtime.directory import Directory

        yield Directory(config.run_dir, secret)
        return
    from triptych.runtime.nats import options_of
    from triptych.runtime.nats_discovery import open_nats

    async with open_nats(options_of(config), config.namespace, name, secret) as discovery:
        yield discovery
