"""One worker: the stages of its role, reached over the request plane.

Loads the parts that its role needs and no others, shows by a canary that they work, takes its
place in discovery and answers until it is told to stop or is fenced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from triptych.config import Config
from triptych.engines.base import Encoder, Loaded, find
from triptych.errors import Draining, InvalidConfig
from triptych.media.pool import DecodePool
from triptych.messages import Ask, AskRecipes, Describe, Job, WorkerRecord, WorkerReport
from triptych.model import fingerprint, open_model
from triptych.observe.lag import Lag
from triptych.observe.progress import Progress, say
from triptych.recipe import Recipes
from triptych.runtime import descriptors
from triptych.runtime.discovery import Directory, Lease
from triptych.runtime.requests import Reply, Server
from triptych.runtime.signals import stop_signals
from triptych.stages import canary, decode, encode, prefill
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeRoom
from triptych.stages.visit import open_visit
from triptych.topology import Role
from triptych.transfer.exchange import Exchange

log = logging.getLogger(__name__)
KEPT = 0.25  # of all descriptors and maps may be embeddings that are kept
FENCED = 3  # exit code of a worker whose place was taken
ENGINE_DIED = 4  # exit code of a worker whose engine can't go on


class Worker:
    """The stages of one role over one loaded engine."""

    def __init__(
        self,
        config: Config,
        role: Role,
        worker_id: str,
        epoch: int,
        loaded: Loaded,
        encoding: EncodeRoom | None,
        exchange: Exchange,
    ) -> None:
        self._config = config
        self._role = role
        self._id = worker_id
        self._epoch = epoch
        self._loaded = loaded
        self._encoding = encoding
        self._exchange = exchange
        self._lag = Lag()
        self.draining = False

    async def answer(self, ask: Ask, reply: Reply) -> None:
        match ask:
            case Describe():
                reply.send(self.report())
            case Job():
                await self._visit(ask, reply)
            case AskRecipes():
                encoder = self._loaded.encoder
                reply.send((encoder and encoder.recipes) or Recipes(revision=""))

    async def _visit(self, job: Job, reply: Reply) -> None:
        """Run the stages of this role, one room after the other."""
        if self._loaded.died is not None and self._loaded.died.is_set():
            # Some moments are left until this process ends: what comes meanwhile has lost nothing.
            raise Draining("This worker is ending, since its engine died. Try again.")
        encoding, engine, exchange = self._encoding, self._loaded.engine, self._exchange
        media, spent = await encoding.encode(job) if encoding else ((), {})
        if engine is None:
            await encode.hand_over(media, spent, exchange, reply)
            return
        async with open_visit(job, self._role, media, spent, exchange) as visit:
            if visit.generation.span == "P":
                await prefill.hand_over(visit, engine, exchange, reply)
            else:
                await decode.stream(visit, engine, reply)

    def report(self) -> WorkerReport:
        engine, counts = self._loaded.report(), self._exchange.counts()
        queued, kept, counters = engine.queued, 0, engine.counters
        if (room := self._encoding) is not None:
            # What the cache keeps is no request's: only what goes beyond it could be a leak.
            queued, kept = queued + room.queued, room.cache.arrays
            counters = counters | room.counters
        return WorkerReport(
            id=self._id,
            role=str(self._role),
            pid=os.getpid(),
            epoch=self._epoch,
            state="draining" if self.draining else "ready",
            engine=self._config.engine,
            parameters=engine.parameters,
            queued=queued,
            running=engine.running,
            kv_blocks_total=engine.kv_blocks_total,
            kv_blocks_free=engine.kv_blocks_free,
            tickets=counts.tickets,
            segments=max(0, counts.segments - kept),
            descriptors=len(os.listdir("/proc/self/fd")),
            bytes_sent=counts.bytes_sent,
            bytes_received=counts.bytes_received,
            counters=counters,
            loop_lag=self._lag.late,
            loop_work=self._lag.work,
            loop_stalls=self._lag.stalls,
        )


def encode_room(config: Config, encoder: Encoder, exchange: Exchange) -> EncodeRoom:
    """What stands around an encoder: a decode pool, unless it takes files as they are, and the
    cache of embeddings."""
    pool = None if encoder.recipes is None else DecodePool(encoder.recipes, config)
    most = min(descriptors.share(KEPT), descriptors.maps_share(KEPT))
    cache = EmbeddingCache(config.cache.embeddings, config.cache.largest_embedding, most)
    return EncodeRoom(encoder, pool, cache, exchange)


async def serve(
    config: Config,
    role: Role,
    worker_id: str,
    secret: str,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Be a worker until SIGTERM, SIGHUP, Ctrl-C or a lost lease. Gives the exit code.

    ``ready`` is called once others can see it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until _stop_signals
    directory = Directory(config.run_dir)
    _check_free(directory, worker_id)
    epoch = directory.claim(worker_id)
    model = fingerprint(open_model(config.model))
    async with AsyncExitStack() as scope:
        exchange = Exchange(config.transport, worker_id, epoch)
        scope.push_async_callback(exchange.close)
        load = find(config.engine)
        loaded = await asyncio.to_thread(load, config, role, exchange.empty, Progress())
        scope.callback(loaded.close)
        encoding = None
        if loaded.encoder is not None:
            encoding = encode_room(config, loaded.encoder, exchange)
            scope.push_async_callback(encoding.close)
        worker = Worker(config, role, worker_id, epoch, loaded, encoding, exchange)
        await canary.prove(loaded.engine, encoding)
        stop = _stop_signals()
        server = Server(worker.answer, secret, worker_id, epoch)
        scope.push_async_callback(server.close)
        address = await server.start(config.worker_host, 0)
        record = WorkerRecord(worker_id, str(role), epoch, address, os.getpid(), model)
        lease = await directory.register(record)
        scope.push_async_callback(lease.close)
        say(f"worker {worker_id} is ready at {address}")
        ready()
        ends = Ends(stop, lease.fenced, loaded.died or asyncio.Event())
        return await _until_stopped(ends, worker, server, lease, config.limits.drain_seconds)


def _check_free(directory: Directory, worker_id: str) -> None:
    """Refuse the id of a worker that lives. One that died may be replaced before its lease ends."""
    other = directory.view().get(worker_id)
    if other is not None and _lives(other):
        raise InvalidConfig(
            f"worker {worker_id} is there already (process {other.pid}): give another --index"
        )


def _lives(worker: WorkerRecord) -> bool:
    """Whether the process is there that registered this record, and not a later one of its pid."""
    try:
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
    except OSError:
        return False
    state, *fields = stat.rpartition(")")[2].split()
    begun_ms = 1000 * int(fields[18]) / os.sysconf("SC_CLK_TCK")  # since boot, as epochs are
    return state not in "ZX" and begun_ms <= worker.epoch  # Z, X: dead, and nobody has looked yet


def _stop_signals() -> asyncio.Event:
    """Set by the signals to stop, from now on. Until then, while loading, they end the process:
    nothing is served yet, and a thread that reads weights cannot be interrupted."""
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a worker."""

    stop: asyncio.Event
    fenced: asyncio.Event
    died: asyncio.Event

    async def wait(self) -> None:
        """Until one of them is set."""
        waiting = [asyncio.ensure_future(e.wait()) for e in (self.stop, self.fenced, self.died)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()


async def _until_stopped(
    ends: Ends, worker: Worker, server: Server, lease: Lease, drain_seconds: float
) -> int:
    """Drain when told to stop; leave at once when there is nothing left to serve with, or another
    incarnation has taken our place."""
    await ends.wait()
    if ends.fenced.is_set():
        log.error(
            "the lease was lost (this process was stopped too long, or another took its id): "
            "this incarnation is fenced and stops"
        )
        return FENCED
    if ends.died.is_set():
        log.error("the engine died: this worker ends, and another takes its place")
        return ENGINE_DIED
    worker.draining = True
    await lease.update(state="draining")
    await server.drain(drain_seconds)
    return 0
