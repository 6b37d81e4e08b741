"""Who is there: workers found in discovery, each with two connections of ours.

The second one is for calls with much media in them, so that no other call waits behind those. A
worker is found by its lease and lives as long as its connections do: beats show that, also where
the lease could not be renewed. Which of them to ask is the router's choice; what to ask is the
pipeline's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Set
from contextlib import AsyncExitStack
from typing import Self

import msgspec

from triptych.errors import NatsUnavailable, NoWorkers, WorkerLost
from triptych.messages import Job, MediaItem, WorkerAnswer, WorkerRecord, WorkerRequest
from triptych.observe.log import RateLimitedLog
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.kv.watch import watch_cache
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

log = logging.getLogger(__name__)
FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 2.0
HEAVY = 64 << 10  # bytes of media
MOST_REJECTED = 100  # records without our signature that are shown


class Peer:
    """A worker that we are connected to: once for most calls, and once for heavy ones."""

    def __init__(
        self, record: WorkerRecord, connection: WorkerConnection, heavy: WorkerConnection
    ) -> None:
        self.record = record
        self.connections = (connection, heavy)
        self.load = 0
        self.prefilling = 0.0  # blocks that it must compute for calls without an answer yet
        self._hearing: asyncio.Task[None] | None = None

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
    def blocks(self) -> float:
        """Of work that it has to do for us: one for every open call, and what it must prefill; of
        that half, since it is half done on average. So who shares a long prompt with somebody
        that is being prefilled waits for him, and does not compute it elsewhere once more."""
        return self.load + self.prefilling / 2

    @property
    def ready(self) -> bool:
        """Whether it can be asked now. A connection that breaks says so before its loss is told."""
        return self.record.state == "ready" and not any(c.closing for c in self.connections)

    def call(self, ask: WorkerRequest, on_answer: Callable[[WorkerAnswer], None]) -> Call:
        return self.connections[_heavy(ask)].call(ask, on_answer)

    def drains(self) -> None:
        """It has told us so before discovery did: ask it no more."""
        self.update(msgspec.structs.replace(self.record, state="draining"))

    def update(self, record: WorkerRecord) -> None:
        self.record = record
        if record.state == "draining":  # an open call would hold it up
            self.ignore()

    def hear(self, kv: KvRouting, listener: EventSubscriber | None) -> None:
        """Let ``kv`` know what its cache holds, from now on."""
        if self.block_size and kv.settings.events:
            self._hearing = asyncio.create_task(watch_cache(self, kv, listener))
            lost = f"what worker {self.name} has cached is not heard any more"
            log_failure(self._hearing, log, lost)

    def ignore(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            self._hearing = None


class Membership:
    """The ready workers of a topology, kept current in the background (``async with``).

    ``model`` is the fingerprint of the checkpoint that they must serve. ``planes`` lead to them,
    each by its address; none given: those that need no NATS. ``kv``: what is known of their caches,
    kept current too, by ``listener`` where workers tell it as events.
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
        self._rejected: set[str] = set()  # of discovery that are not signed, and told
        self._unused: dict[str, UnusedWorker] = {}  # those of discovery that are not peers, by id
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
        peers, self._peers = self._peers, {}  # whoever is left by us is not lost
        for peer in peers.values():
            peer.ignore()
        async with AsyncExitStack() as closing:
            for connection in (c for peer in peers.values() for c in peer.connections):
                closing.push_async_callback(connection.close)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    @property
    def unused(self) -> tuple[UnusedWorker, ...]:
        """Workers that discovery shows and we do not use."""
        rejected = self._discovery.rejected.values()
        forged = (unsigned_worker(record, self.standing) for record in rejected)
        return (*self._unused.values(), *itertools.islice(forged, MOST_REJECTED))

    @property
    def standing(self) -> DiscoveryStatus:
        """Where workers are looked for. While that is away, we go on with those that we know."""
        return self._discovery.standing

    def missing(self) -> tuple[str, ...]:
        """Roles of the topology that no worker can serve now."""
        there = {peer.record.role for peer in self._peers.values() if peer.ready}
        return tuple(str(role) for role in self._choose if role not in there)

    @property
    def resumes(self) -> bool:
        """Whether whoever generates can go on after what another has made."""
        ready = [peer.record for peer in self._peers.values() if peer.ready]
        return all(record.resumes for record in ready if Role(record.role).span)

    def common_transport(self, *publishers: str) -> str:
        """The transport that every ready worker can read, whichever is asked next.

        ``publishers``: hosts that publish besides the workers', from their own memory.
        """
        ready = [peer.record for peer in self._peers.values() if peer.ready]
        hosts = {record.memory for record in ready}.union(publishers)
        if len(hosts - {""}) <= 1:
            gpus = {record.gpu for record in ready}
            return "cuda" if len(gpus) == 1 and "" not in gpus and not publishers else "shm"
        return "nixl" if all("nixl" in record.transports for record in ready) else "inline"

    def choose(
        self, role: Role, item: MediaItem | None = None, avoided: Set[tuple[str, int]] = frozenset()
    ) -> Peer:
        """A ready worker. ``item``: the first media item that it would encode. ``avoided``: ids
        and epochs of workers that are chosen only if there is no other."""
        peers = self.ready(role, avoided)
        if item is not None and self._by_media and len(peers) > 1:
            return by_media_affinity(peers, item)
        peer = self._choose[role](peers)
        assert isinstance(peer, Peer)
        return peer

    def ready(self, role: Role, avoided: Set[tuple[str, int]] = frozenset()) -> list[Peer]:
        """Workers to choose from: one at least."""
        peers = [p for p in self._peers.values() if p.ready and p.record.role == role]
        if not peers:
            if any(r.role == role and self._cut_off(r) for r in self._view.values()):
                raise NatsUnavailable(
                    "NATS, through which workers are called, is away: see /cluster."
                )
            raise NoWorkers(
                f"No worker of role {role} is ready. It may be starting or restarting: try again "
                "shortly, and see /cluster."
            )
        if avoided:
            peers = [p for p in peers if (p.record.id, p.record.epoch) not in avoided] or peers
        return peers

    def need(self, role: Role) -> None:
        """Raise as ``ready`` does, unless a worker is being reached and no try has failed: it may
        be there when its turn comes."""
        near = (r for w, r in self._view.items() if w in self._joining and w not in self._unused)
        if not any(record.role == role and record.state == "ready" for record in near):
            self.ready(role)

    def least_work(self, role: Role) -> float:
        """Blocks that the ready worker with the least has to do; without any there is no end."""
        ready = (p for p in self._peers.values() if p.ready and p.record.role == role)
        return min((peer.blocks for peer in ready), default=math.inf)

    def _cut_off(self, record: WorkerRecord) -> bool:
        """Whether a worker can't be called since NATS is away."""
        return self._planes.away and record.address.startswith("nats:")

    async def _watch(self) -> None:
        async for view in self._discovery.watch():
            self._tell_rejected()
            self._unused = {w: one for w, one in self._unused.items() if w in view}
            self._view = ours = {w: r for w, r in view.items() if self._serves(r)}
            for worker, record in ours.items():
                peer = self._peers.get(worker)
                if peer is not None and peer.record.epoch == record.epoch:
                    peer.update(record)
                else:
                    self._join(record)
            # A lease that ran out drops nobody: a connection whose beats come shows life, and one
            # whose beats do not is lost by itself. Another incarnation takes the place at once.
            for worker in [w for w in self._peers if w in view and w not in ours]:
                await self._drop(worker)
            for worker in [w for w in self._joining if w not in ours]:
                self._joining.pop(worker)[1].cancel()

    def _tell_rejected(self) -> None:
        """Say which records are not signed by this cluster, each once while it is there."""
        rejected = self._discovery.rejected
        for worker in rejected.keys() - self._rejected:
            why = unsigned_worker(rejected[worker], self.standing).why
            self._limited.warning("records_rejected", f"worker {worker!r} is not used. {why}")
        self._rejected = set(rejected)

    def _serves(self, record: WorkerRecord) -> bool:
        """Whether a worker is one of ours: of a role of the topology, with the same model. Others
        may well be there, for a frontend of their own."""
        other = incompatible_worker(record, self._model, self._choose, self.standing)
        if other is None:
            return True
        if self._unused.get(record.id) != other:
            self._unused[record.id] = other
            log.warning("worker %s is not used. %s", record.id, other.why)
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
            heavy = await self._reach(record)
            undo.pop_all()
        peer = self._peers[record.id] = Peer(record, connection, heavy)
        self._joining.pop(record.id, None)
        self._unused.pop(record.id, None)
        log.info("worker %s joined (epoch %d)", record.id, record.epoch)
        if self._kv is not None:
            peer.hear(self._kv, self._listener)
        for one in peer.connections:
            one.on_lost(lambda: self._lost(peer))

    async def _reach(self, record: WorkerRecord) -> WorkerConnection:
        """Connect, however long it takes: as long as its lease lives, so may the worker."""
        pause, told = FIRST_RETRY_SECONDS, False
        while True:
            try:
                return await WorkerConnection.open(
                    record.address, self._secret, record.id, record.epoch, planes=self._planes
                )
            except WorkerLost as error:
                self._unused[record.id] = unreachable_worker(record, error)
                if pause > LAST_RETRY_SECONDS / 2 and not (told or self._cut_off(record)):
                    log.warning("%s", self._unused[record.id].why)
                    told = True
            await asyncio.sleep(pause)
            pause = min(LAST_RETRY_SECONDS, 2 * pause)

    def _lost(self, peer: Peer) -> None:
        """The connection broke: stop choosing this worker at once, and try to reach it again."""
        if self._peers.get(peer.record.id) is peer:
            del self._peers[peer.record.id]
            self._forget(peer)
            for connection in peer.connections:
                connection.drop("another connection to it broke")
            log.warning("worker %s is gone (epoch %d)", peer.record.id, peer.record.epoch)
            if peer.record.id in self._view:
                self._join(self._view[peer.record.id])

    async def _drop(self, worker: str) -> None:
        peer = self._peers.pop(worker, None)
        if peer is not None:
            self._forget(peer)
            await asyncio.gather(*(connection.close() for connection in peer.connections))

    def _forget(self, peer: Peer) -> None:
        peer.ignore()
        if self._kv is not None:
            self._kv.drop(peer.name)


def _heavy(ask: WorkerRequest) -> bool:
    media = ask.work.media if isinstance(ask, Job) else ()
    return sum(len(item.data) for item in media) > HEAVY
