"""The workers that this frontend can call: found in discovery, each with two connections.

The second connection is for calls with much media, so that no other call waits behind those. A
worker joins by its lease in discovery and stays while its connections live: their heartbeats count,
also where the lease could not be renewed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Set
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

import msgspec

from triptych.errors import NatsAway, NoWorkers, WorkerLost
from triptych.messages import Job, MediaItem, WorkerAnswer, WorkerRecord, WorkerRequest
from triptych.observe.log import RateLimitedLog
from triptych.pipeline.kv.index import watch_cache
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.router import MEDIA_AFFINITY_ROUTINGS, ROUTINGS, by_media_affinity
from triptych.pipeline.unused_workers import (
    UnusedWorker,
    incompatible_worker,
    unreachable_worker,
    unsigned_worker,
)
from triptych.runtime.concurrency import log_failure
from triptych.runtime.connection import Call, WorkerConnection
from triptych.runtime.discovery import Discovery, DiscoveryStatus
from triptych.runtime.events import EventSubscriber
from triptych.runtime.planes import Planes
from triptych.topology import Role, Topology
from triptych.transfer.registry import TransferEndpoint, common_transport

log = logging.getLogger(__name__)
FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 2.0
MUCH_MEDIA = 64 << 10  # bytes
MAX_REJECTED_SHOWN = 100


class Peer:
    """A connected worker. ``media_connection``: for calls with much media."""

    def __init__(
        self,
        record: WorkerRecord,
        connection: WorkerConnection,
        media_connection: WorkerConnection,
    ) -> None:
        self.record = record
        self.connections = (connection, media_connection)
        self.load = 0  # open calls
        self.prefilling = 0.0  # blocks that it must compute for calls without an answer yet
        self._watching_cache: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its connections. To ask for the running loop costs a system call."""
        return self.connections[0].loop

    @property
    def name(self) -> str:
        return self.record.id

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def events(self) -> str:
        return self.record.events

    @property
    def block_size(self) -> int:
        return self.record.block_size

    @property
    def can_prefill_from_cache(self) -> bool:
        return self.record.can_prefill_from_cache

    @property
    def queued_blocks(self) -> float:
        """Blocks of work that it has to do for us: one per open call, and half of what it must
        prefill, since that is half done on average. So a request that shares a long prompt with one
        that is being prefilled waits for it, and another worker does not compute it again."""
        return self.load + self.prefilling / 2

    @property
    def ready(self) -> bool:
        """Whether it can be called. A connection that breaks shows before ``on_lost`` runs."""
        connection, media_connection = self.connections
        return self.record.state == "ready" and not (connection.closing or media_connection.closing)

    def call(self, ask: WorkerRequest, on_answer: Callable[[WorkerAnswer], None]) -> Call:
        return self.connections[_has_much_media(ask)].call(ask, on_answer)

    def mark_draining(self) -> None:
        """The worker said so in an answer, before discovery shows it: call it no more."""
        self.update(msgspec.structs.replace(self.record, state="draining"))

    def update(self, record: WorkerRecord) -> None:
        self.record = record
        if record.state == "draining":  # its drain would wait for the open call
            self.stop_watching_cache()

    def watch_cache(self, kv: KvRouting, listener: EventSubscriber | None) -> None:
        """Keep the index of ``kv`` current with this worker's prefix cache, from now on."""
        if self.block_size and kv.settings.events:
            self._watching_cache = asyncio.create_task(watch_cache(self, kv.index, listener))
            failure = f"cache changes of worker {self.name} are not followed any more"
            log_failure(self._watching_cache, log, failure)

    def stop_watching_cache(self) -> None:
        if self._watching_cache is not None:
            self._watching_cache.cancel()
            self._watching_cache = None


class Membership:
    """The ready workers of a topology, kept current in the background (``async with``).

    ``model``: fingerprint of the checkpoint that they must serve. ``planes``: request planes that
    reach them; default: those that need no NATS. ``kv``: its index is kept current too, by
    ``listener`` where workers publish cache changes as events.
    """

    def __init__(
        self,
        topology: Topology,
        discovery: Discovery,
        secret: str,
        routing: str,
        model: str,
        planes: Planes | None = None,
        kv: KvRouting | None = None,
        listener: EventSubscriber | None = None,
    ) -> None:
        self._discovery = discovery
        self._secret = secret
        self._planes = planes or Planes()
        self._model = model
        self._view: dict[str, WorkerRecord] = {}
        self._peers: dict[str, Peer] = {}
        self._limited = RateLimitedLog(log, "records_rejected")
        self._rejected: set[str] = set()  # unsigned records that a warning was logged for
        self._unused: dict[str, UnusedWorker] = {}  # by id
        self._joining: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._by_media = routing in MEDIA_AFFINITY_ROUTINGS
        self._kv = kv
        self._listener = listener
        self._choose = {role: ROUTINGS[routing]() for role in topology.roles}
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        log_failure(self._watching, log, "discovery is not watched any more: restart the frontend")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for _, task in self._joining.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers, self._peers = self._peers, {}  # first: to close a connection is no loss
        for peer in peers.values():
            peer.stop_watching_cache()
        async with AsyncExitStack() as closing:
            for connection in (c for peer in peers.values() for c in peer.connections):
                closing.push_async_callback(connection.close)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    @property
    def unused(self) -> tuple[UnusedWorker, ...]:
        """Workers in discovery that get no requests, with the reason."""
        rejected = self._discovery.rejected.values()
        unsigned = (unsigned_worker(record, self.discovery_status) for record in rejected)
        return (*self._unused.values(), *itertools.islice(unsigned, MAX_REJECTED_SHOWN))

    @property
    def discovery_status(self) -> DiscoveryStatus:
        """Where workers are found. While that is away, the known workers stay in use."""
        return self._discovery.status

    def missing(self) -> tuple[str, ...]:
        """Roles of the topology without a ready worker."""
        served = {peer.record.role for peer in self._peers.values() if peer.ready}
        return tuple(str(role) for role in self._choose if role not in served)

    @property
    def can_resume(self) -> bool:
        """Whether all workers that generate can continue after tokens of another worker."""
        ready = [peer.record for peer in self._peers.values() if peer.ready]
        return all(record.resumes for record in ready if Role(record.role).phases)

    def common_transport(self, *publishers: TransferEndpoint) -> str:
        """The best transport that every ready worker can read.

        ``publishers``: processes that publish from their own memory and are no workers.
        """
        ready = [peer.record for peer in self._peers.values() if peer.ready]
        workers = (
            TransferEndpoint(record.memory, record.gpu, record.transports, record.folder)
            for record in ready
        )
        return common_transport((*workers, *publishers))

    def choose(
        self, role: Role, item: MediaItem | None = None, avoided: Set[tuple[str, int]] = frozenset()
    ) -> Peer:
        """A ready worker. ``item``: the first media item that it would encode. ``avoided``: ids
        and epochs of workers to choose only if there is no other."""
        peers = self.ready(role, avoided)
        if len(peers) == 1:
            return peers[0]
        if item is not None and self._by_media:
            return by_media_affinity(peers, item)
        peer = self._choose[role](peers)
        assert isinstance(peer, Peer)
        return peer

    def ready(self, role: Role, avoided: Set[tuple[str, int]] = frozenset()) -> list[Peer]:
        """The workers to choose from, at least one; raises NoWorkers or NatsAway."""
        peers = [p for p in self._peers.values() if p.record.role == role and p.ready]
        if not peers:
            if any(r.role == role and self._cut_off(r) for r in self._view.values()):
                raise NatsAway("NATS, through which workers are called, is away: see /cluster.")
            raise NoWorkers(
                f"No worker of role {role} is ready. It may be starting or restarting: try again "
                "shortly, and see /cluster."
            )
        if avoided:
            peers = [p for p in peers if (p.record.id, p.record.epoch) not in avoided] or peers
        return peers

    def require(self, role: Role) -> None:
        """Raise as ``ready`` does, unless a first connection to a worker is under way: it may be
        ready when its step comes."""
        joining = (r for w, r in self._view.items() if w in self._joining and w not in self._unused)
        if not any(record.role == role and record.state == "ready" for record in joining):
            self.ready(role)

    def least_queued_blocks(self, role: Role) -> float:
        """Blocks queued at the least busy ready worker; infinite without one."""
        ready = (p for p in self._peers.values() if p.ready and p.record.role == role)
        return min((peer.queued_blocks for peer in ready), default=math.inf)

    def _cut_off(self, record: WorkerRecord) -> bool:
        """Whether a worker can't be called because NATS is away."""
        return self._planes.away and record.address.startswith("nats:")

    async def _watch(self) -> None:
        async for view in self._discovery.watch():
            self._warn_of_rejected()
            self._unused = {w: one for w, one in self._unused.items() if w in view}
            self._view = ours = {w: r for w, r in view.items() if self._is_compatible(r)}
            for worker, record in ours.items():
                peer = self._peers.get(worker)
                if peer is not None and peer.record.epoch == record.epoch:
                    peer.update(record)
                else:
                    self._join(record)
            # An expired lease drops no worker: heartbeats on its connection show that it lives, and
            # without them the connection is lost by itself. A new incarnation replaces it at once.
            for worker in [w for w in self._peers if w in view and w not in ours]:
                await self._drop(worker)
            for worker in [w for w in self._joining if w not in ours]:
                self._joining.pop(worker)[1].cancel()

    def _warn_of_rejected(self) -> None:
        """Log which records are not signed by this cluster, each once while it is there."""
        rejected = self._discovery.rejected
        for worker in rejected.keys() - self._rejected:
            why = unsigned_worker(rejected[worker], self.discovery_status).why
            self._limited.warning("records_rejected", f"worker {worker!r} is not used. {why}")
        self._rejected = set(rejected)

    def _is_compatible(self, record: WorkerRecord) -> bool:
        """Whether a worker has a role of the topology and the same model. Others may belong to
        another frontend."""
        unused = incompatible_worker(record, self._model, self._choose, self.discovery_status)
        if unused is None:
            return True
        if self._unused.get(record.id) != unused:
            self._unused[record.id] = unused
            log.warning("worker %s is not used. %s", record.id, unused.why)
        return False

    def _join(self, record: WorkerRecord) -> None:
        epoch, task = self._joining.get(record.id, (0, None))
        if task is not None:
            if epoch == record.epoch:
                return
            task.cancel()
        self._joining[record.id] = record.epoch, asyncio.create_task(self._connect(record))

    async def _connect(self, record: WorkerRecord) -> None:
        await self._drop(record.id)
        async with AsyncExitStack() as undo:
            connection = await self._reach(record)
            undo.push_async_callback(connection.close)
            media_connection = await self._reach(record)
            undo.pop_all()
        peer = self._peers[record.id] = Peer(record, connection, media_connection)
        self._joining.pop(record.id, None)
        self._unused.pop(record.id, None)
        log.info("worker %s joined (epoch %d)", record.id, record.epoch)
        if self._kv is not None:
            peer.watch_cache(self._kv, self._listener)
        for one in peer.connections:
            one.on_lost(partial(self._lost, peer, one))

    async def _reach(self, record: WorkerRecord) -> WorkerConnection:
        """Connect, and retry until the worker leaves discovery."""
        pause, warned = FIRST_RETRY_SECONDS, False
        while True:
            try:
                return await WorkerConnection.open(
                    record.address, self._secret, record.id, record.epoch, planes=self._planes
                )
            except WorkerLost as error:
                self._unused[record.id] = unreachable_worker(record, error)
                if pause > LAST_RETRY_SECONDS / 2 and not (warned or self._cut_off(record)):
                    log.warning("%s", self._unused[record.id].why)
                    warned = True
            await asyncio.sleep(pause)
            pause = min(LAST_RETRY_SECONDS, 2 * pause)

    def _lost(self, peer: Peer, broken: WorkerConnection) -> None:
        """A connection broke: stop choosing this worker at once, and connect again."""
        if self._peers.get(peer.record.id) is peer:
            del self._peers[peer.record.id]
            self._drop_cache(peer)
            for connection in peer.connections:
                connection.abort("another connection to it broke")
            log.warning(
                "worker %s was lost (epoch %d): %s",
                peer.record.id,
                peer.record.epoch,
                broken.reason,
            )
            if peer.record.id in self._view:
                self._join(self._view[peer.record.id])

    async def _drop(self, worker: str) -> None:
        peer = self._peers.pop(worker, None)
        if peer is not None:
            self._drop_cache(peer)
            await asyncio.gather(*(connection.close() for connection in peer.connections))

    def _drop_cache(self, peer: Peer) -> None:
        peer.stop_watching_cache()
        if self._kv is not None:
            self._kv.index.drop(peer.name)


def _has_much_media(ask: WorkerRequest) -> bool:
    media = ask.work.media if isinstance(ask, Job) else ()
    return bool(media) and sum(len(item.data) for item in media) > MUCH_MEDIA
