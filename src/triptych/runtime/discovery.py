"""Discovery: where workers are found. One door, and behind it a directory or NATS.

A worker claims an epoch, registers its record and renews the lease until it leaves. Readers see the
records whose lease is live; while discovery is away they keep their last view. Several clusters on
one NATS have a namespace each and see nothing of each other. Nothing here talks to a worker.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.host import host_id, host_name, is_running
from triptych.messages import WorkerRecord
from triptych.observe.progress import print_status
from triptych.runtime.lease import LEASE_SECONDS, WorkerLease

WAITING_SECONDS = 10.0  # in silence, after which it is said where somebody waits


class DiscoveryStatus(Struct, frozen=True):
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

    async def register(self, record: WorkerRecord) -> WorkerLease:
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
    def standing(self) -> DiscoveryStatus: ...


async def report_waiting(
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
    from triptych.runtime.nats import nats_options
    from triptych.runtime.nats_discovery import open_nats

    async with open_nats(nats_options(config), config.namespace, name, secret) as discovery:
        yield discovery


WAIT_LEASES = 1.5  # for a worker of another host that may be dead


async def find_conflict(
    discovery: Discovery, ids: Collection[str], *, unsigned: bool = False
) -> WorkerRecord | None:
    """A worker that lives and has one of these ids; None: they are free.

    A record that this cluster has not signed takes no id, and is warned of: anyone who can write to
    discovery can make one. ``unsigned``: it does, if its process lives on this host.
    """
    view = await discovery.view()
    known = [view[one] for one in ids if one in view]
    foreign = [discovery.rejected[one] for one in ids if one in discovery.rejected]
    for other in known + (foreign if unsigned else []):
        if other.host == host_id() and is_running(other):
            return other
    for other in foreign:
        print_status(
            f"  warning: {discovery.standing.setting} holds a record of worker {other.id} that is "
            f"not signed with this TRIPTYCH_SECRET (process {other.pid}): it is ignored"
        )
    far = {other.id: other for other in known if other.host != host_id()}
    if not far:
        return None
    for other in far.values():
        place = host_name(other.host)
        print_status(f"worker {other.id} is known on {place}: waiting whether its lease runs out")
    return await _left(discovery, far)


def describe_conflict(other: WorkerRecord) -> str:
    """Who it is, for people."""
    if other.host == host_id():
        return f"worker {other.id} is there already (process {other.pid})"
    place = f"on {host_name(other.host)} ({other.address}, process {other.pid})"
    return f"worker {other.id} is there already, {place}"


async def _left(discovery: Discovery, far: dict[str, WorkerRecord]) -> WorkerRecord | None:
    """One of these whose lease does not run out while we look."""
    left = list(far.values())
    try:
        async with (
            asyncio.timeout(WAIT_LEASES * LEASE_SECONDS),
            aclosing(discovery.watch()) as views,
        ):
            async for view in views:
                left = [other for other in left if other.id in view]
                if not left:
                    break
    except TimeoutError:
        pass
    return left[0] if left else None


SCHEME = "triptych://"
GENERATE = "generate"  # the one endpoint of a worker
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Endpoint(Struct, frozen=True):
    namespace: str
    component: str
    endpoint: str

    def __post_init__(self) -> None:
        for what in self.__struct_fields__:
            check_name(what, getattr(self, what))

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}.{self.component}.{self.endpoint}"

    def subject(self, epoch: int) -> str:
        """Of NATS, for one incarnation of the worker."""
        return f"triptych.{self.namespace}.requests.{self.component}.{self.endpoint}.{epoch}"


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"'{name}' cannot be the name of a {what}. Use letters, digits, '-' and '_', at "
            "most 64."
        )
