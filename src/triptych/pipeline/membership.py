"""Who is there: workers found in discovery, each with a connection of ours.

A worker counts as ready while its lease is live and its connection stands. Which of them to ask is
the router's choice; what to ask is the pipeline's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from triptych.errors import NoWorkers, ServiceError
from triptych.messages import Answer, Ask, WorkerRecord
from triptych.pipeline.router import ROUTINGS
from triptych.runtime.discovery import Directory
from triptych.runtime.requests import Call, Connection
from triptych.topology import Role, Topology

log = logging.getLogger(__name__)
RECONNECT_SECONDS = 0.25


class Peer:
    """A worker that we are connected to."""

    def __init__(self, record: WorkerRecord, connection: Connection) -> None:
        self.record = record
        self.connection = connection
        self.load = 0

    def call(self, ask: Ask, on_answer: Callable[[Answer], None]) -> Call:
        return self.connection.call(ask, on_answer)


class Membership:
    """The ready workers of a topology, kept current in the background (``async with``)."""

    def __init__(self, topology: Topology, directory: Directory, secret: str, routing: str) -> None:
        self._directory = directory
        self._secret = secret
        self._view: dict[str, WorkerRecord] = {}
        self._peers: dict[str, Peer] = {}
        self._joining: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._choose = {role: ROUTINGS[routing]() for role in topology.roles}
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for _, task in self._joining.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with AsyncExitStack() as closing:
            for peer in self._peers.values():
                closing.push_async_callback(peer.connection.close)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    def missing(self) -> tuple[str, ...]:
        """Roles of the topology that no worker can serve now."""
        there = {peer.record.role for peer in self._peers.values() if _ready(peer)}
        return tuple(str(role) for role in self._choose if role not in there)

    def choose(self, role: Role) -> Peer:
        peers = [p for p in self._peers.values() if p.record.role == role and _ready(p)]
        if not peers:
            raise NoWorkers(
                f"No worker of role {role} is ready. It may be starting or restarting: try again "
                "shortly, and see /cluster."
            )
        peer = self._choose[role](peers)
        assert isinstance(peer, Peer)
        return peer

    async def _watch(self) -> None:
        async for view in self._directory.watch():
            self._view = view
            for worker, record in view.items():
                peer = self._peers.get(worker)
                if peer is not None and peer.record.epoch == record.epoch:
                    peer.record = record
                else:
                    self._join(record)
            for worker in [w for w in self._peers if w not in view]:
                await self._drop(worker)
            for worker in [w for w in self._joining if w not in view]:
                self._joining.pop(worker)[1].cancel()

    def _join(self, record: WorkerRecord) -> None:
        epoch, task = self._joining.get(record.id, (0, None))
        if task is not None:
            if epoch == record.epoch:
                return
            task.cancel()
        self._joining[record.id] = record.epoch, asyncio.create_task(self._connect(record))

    async def _connect(self, record: WorkerRecord) -> None:
        await self._drop(record.id)
        while True:
            try:
                connection = await Connection.open(
                    record.address, self._secret, record.id, record.epoch
                )
                break
            except ServiceError as error:
                log.debug("worker %s cannot be reached yet: %s", record.id, error)
                await asyncio.sleep(RECONNECT_SECONDS)
        peer = self._peers[record.id] = Peer(record, connection)
        self._joining.pop(record.id, None)
        log.info("worker %s joined (epoch %d)", record.id, record.epoch)
        connection.on_lost(lambda: self._lost(peer))

    def _lost(self, peer: Peer) -> None:
        """The connection broke: stop choosing this worker at once, and try to reach it again."""
        if self._peers.get(peer.record.id) is peer:
            del self._peers[peer.record.id]
            log.warning("worker %s is gone (epoch %d)", peer.record.id, peer.record.epoch)
            if peer.record.id in self._view:
                self._join(self._view[peer.record.id])

    async def _drop(self, worker: str) -> None:
        peer = self._peers.pop(worker, None)
        if peer is not None:
            await peer.connection.close()


def _ready(peer: Peer) -> bool:
    return peer.record.state == "ready"
