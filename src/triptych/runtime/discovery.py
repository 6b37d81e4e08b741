"""Discovery: where workers register and frontends find them, in a directory or on NATS.

A worker claims an epoch, registers its record and renews its lease until it leaves. Readers see the
records whose lease is live; while discovery is away they keep their last view. Clusters that share
one NATS server have a namespace each and do not see each other. Nothing here talks to a worker.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.host import host_id, host_name, is_running
from triptych.messages import WorkerRecord
from triptych.observe.log import print_status
from triptych.runtime.lease import LEASE_SECONDS, Clock, Registration, WorkerLease

WAITING_SECONDS = 10.0  # after which a process says what it waits for
WAIT_LEASES = 1.5  # for a worker of another host that may be dead
ENDPOINT_SCHEME = "triptych://"
GENERATE = "generate"  # the one endpoint of a worker
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class DiscoveryStatus(Struct, frozen=True):
    """Where discovery is, and whether it is away: then its view is only the last known one."""

    place: str  # NATS's servers, or the run directory
    away: bool
    namespace: str = ""  # of that NATS

    @property
    def setting(self) -> str:
        """The option that all processes of the cluster must share."""
        return f"--namespace {self.namespace}" if self.namespace else f"--run-dir {self.place}"


class Discovery(Protocol):
    """The registry of the workers of one cluster."""

    async def claim(self, worker_id: str) -> int:
        """A new epoch for this worker, greater than any before, which fences older incarnations.
        Two processes that race get two epochs."""

    async def register(self, record: WorkerRecord) -> WorkerLease:
        """Show this record to all readers until the lease is closed or lost."""

    async def view(self) -> dict[str, WorkerRecord]:
        """The workers whose lease is live, by id. While discovery is away: the last view."""

    def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        """The view now, and again whenever it changes."""

    async def others(self) -> tuple[str, ...]:
        """Other namespaces that have workers or readers."""

    async def watched(self) -> bool:
        """Whether a frontend is known to read here. Meant for workers: a frontend reads itself."""

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        """Live records, as of the last view, that this cluster did not sign. Do not use them:
        anyone who can write to discovery may have written them."""

    @property
    def status(self) -> DiscoveryStatus: ...


class Endpoint(Struct, frozen=True):
    """The name of what can be called: ``triptych://namespace.component.endpoint``.

    A namespace separates clusters that share one NATS server, a component is a worker, an endpoint
    is what it offers. /cluster shows these names, and NATS subjects consist of them, so they
    contain no dots, wildcards or blanks.
    """

    namespace: str
    component: str
    endpoint: str

    def __post_init__(self) -> None:
        for what in self.__struct_fields__:
            check_name(what, getattr(self, what))

    def __str__(self) -> str:
        return f"{ENDPOINT_SCHEME}{self.namespace}.{self.component}.{self.endpoint}"

    def subject(self, epoch: int) -> str:
        """The NATS subject of one incarnation of the worker."""
        return f"triptych.{self.namespace}.requests.{self.component}.{self.endpoint}.{epoch}"


def check_name(what: str, name: str) -> None:
    """Raise InvalidConfig unless ``name`` can be part of an endpoint."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"'{name}' cannot be the name of a {what}. Use letters, digits, '-' and '_', at "
            "most 64."
        )


async def register(
    registration: Registration, record: WorkerRecord, seconds: float, clock: Clock
) -> WorkerLease:
    """Write the record to discovery and renew it until the lease is closed."""
    check_name("worker", record.id)
    lease = WorkerLease(registration, record, seconds, clock)
    await lease.begin()
    return lease


@asynccontextmanager
async def open_discovery(config: Config, name: str, secret: str) -> AsyncIterator[Discovery]:
    """Discovery on NATS if the config says what to join, else in the run directory.

    NATS lists this process under ``name``. Records are signed with ``secret``.
    """
    if not config.join:
        from triptych.runtime.directory import Directory

        yield Directory(config.run_dir, secret)
        return
    from triptych.runtime.nats_discovery import open_nats

    async with open_nats(config, config.namespace, name, secret) as discovery:
        yield discovery


async def report_waiting(
    discovery: Discovery, missing: Callable[[], str], unusable: Callable[[], Awaitable[str]]
) -> None:
    """Print once, after a while, what is still ``missing`` (empty: nothing) and where we look.

    Also prints what is there but ``unusable``; if nothing is, the other namespaces in use, since
    one side may have mistyped the name.
    """
    await asyncio.sleep(WAITING_SECONDS)
    if not missing():
        return
    status = discovery.status
    where = f"in {status.setting}"
    if status.namespace:
        where += f" of NATS at {status.place}"
    if found := await unusable():
        also = f" ({found})"
    elif others := ", ".join(await discovery.others()):
        also = f". Other namespaces in use: {others}. Is --namespace right, here and there?"
    else:
        also = ""
    if what := missing():  # ``others`` takes some seconds
        print_status(f"still waiting for {what} {where}{also}")


async def find_conflict(
    discovery: Discovery, ids: Collection[str], *, unsigned: bool = False
) -> WorkerRecord | None:
    """A live worker that has one of these ids; None: they are free.

    A worker that died on this host can be replaced at once; of one on another host, only the end
    of its lease shows that it died. A record that this cluster did not sign blocks no id, but
    prints a warning: anyone who can write to discovery can write one. With ``unsigned`` it blocks
    its id if its process runs on this host.
    """
    view = await discovery.view()
    known = [view[one] for one in ids if one in view]
    foreign = [discovery.rejected[one] for one in ids if one in discovery.rejected]
    for other in known + (foreign if unsigned else []):
        if other.host == host_id() and is_running(other):
            return other
    for other in foreign:
        print_status(
            f"  warning: {discovery.status.setting} holds a record of worker {other.id} that is "
            f"not signed with this TRIPTYCH_SECRET (process {other.pid}): it is ignored"
        )
    remote = {other.id: other for other in known if other.host != host_id()}
    if not remote:
        return None
    for other in remote.values():
        print_status(
            f"worker {other.id} is registered on {host_name(other.host)}: waiting whether its "
            "lease expires"
        )
    return await _still_alive(discovery, remote)


def describe_conflict(other: WorkerRecord) -> str:
    """Which worker has the id, for an error message."""
    if other.host == host_id():
        return f"worker {other.id} is there already (process {other.pid})"
    place = f"on {host_name(other.host)} ({other.address}, process {other.pid})"
    return f"worker {other.id} is there already, {place}"


async def _still_alive(
    discovery: Discovery, remote: dict[str, WorkerRecord]
) -> WorkerRecord | None:
    """One of these workers whose lease does not expire while we wait."""
    alive = list(remote.values())
    try:
        async with (
            asyncio.timeout(WAIT_LEASES * LEASE_SECONDS),
            aclosing(discovery.watch()) as views,
        ):
            async for view in views:
                alive = [other for other in alive if other.id in view]
                if not alive:
                    break
    except TimeoutError:
        pass
    return alive[0] if alive else None
