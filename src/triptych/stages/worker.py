"""One worker: the stages of its role, reached over the request plane.

Loads the parts that its role needs and no others, shows by a canary that they work, takes its
place in discovery and answers until it is told to stop or is fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from triptych import placement
from triptych.checkpoint import fingerprint, open_model
from triptych.config import Config
from triptych.engines.base import AllocateOnGpu, Encoder, LoadedEngine, find_engine
from triptych.errors import Draining, InvalidConfig, PrefixEvicted, StartError
from triptych.host import host_id, host_name, process_start
from triptych.media.pool import DecodePool
from triptych.messages import (
    GetRecipes,
    GetReport,
    Job,
    WatchCache,
    WorkerRecord,
    WorkerReport,
    WorkerRequest,
)
from triptych.observe.event_loop_lag import EventLoopLag
from triptych.observe.log import warning_totals
from triptych.observe.progress import Progress, print_status
from triptych.recipe import Recipes
from triptych.runtime import gpus, run_dir
from triptych.runtime.concurrency import cancel_and_wait, log_failure
from triptych.runtime.discovery import (
    Discovery,
    describe_conflict,
    find_conflict,
    open_discovery,
    report_waiting,
)
from triptych.runtime.events import open_publisher
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.runtime.planes import Planes, open_planes
from triptych.runtime.process import descriptor_share, memory_map_share
from triptych.runtime.server import Reply, RequestServer
from triptych.stages import canary, decode, encode, prefill
from triptych.stages.cache_reporter import CacheReporter, EventPlaneWatcher
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeStage
from triptych.stages.ending import StopReasons, stop_event, until_stopped
from triptych.stages.generate import open_inputs
from triptych.stages.health import EngineHealth, MonitoredEncoder, MonitoredEngine, wait_for_hang
from triptych.topology import Role
from triptych.transfer.client import TransferClient
from triptych.transfer.segment import memory_domain

log = logging.getLogger(__name__)
KEPT = 0.25  # of all descriptors and maps may be embeddings that are kept


class Worker:
    """The stages of one role over one loaded engine."""

    def __init__(
        self,
        config: Config,
        role: Role,
        worker_id: str,
        epoch: int,
        loaded: LoadedEngine,
        encoding: EncodeStage | None,
        transfers: TransferClient,
    ) -> None:
        self._config = config
        self._role = role
        self.id = worker_id
        self.epoch = epoch
        self._loaded = loaded
        self._encoding = encoding
        self._transfers = transfers
        self._lag = EventLoopLag()
        self.draining = False
        self.address = ""  # where it is called, once it can be
        self.device = loaded.device  # unless the operator has named one
        self.ledger: CacheReporter | None = None
        if (cache := loaded.cache) is not None:
            self.ledger = CacheReporter(cache.block_size, cache.blocks)
            cache.listen(self.ledger.receive)

    async def answer(self, ask: WorkerRequest, reply: Reply) -> None:
        match ask:
            case GetReport():
                reply.send(self.report())
            case Job():
                await self._visit(ask, reply)
            case GetRecipes():
                encoder = self._loaded.encoder
                reply.send((encoder and encoder.recipes) or Recipes(revision=""))
            case WatchCache() if self.ledger is not None:
                await self.ledger.watch(reply)

    def drain(self) -> None:
        """Nothing new comes from now on. Whoever watches is let go: no drain waits for that."""
        self.draining = True
        if self.ledger is not None:
            self.ledger.close()

    async def _visit(self, job: Job, reply: Reply) -> None:
        """Run the stages of this role, one room after the other."""
        if self._loaded.died is not None and self._loaded.died.is_set():
            # Some moments are left until this process ends: what comes meanwhile has lost nothing.
            raise Draining("This worker is ending, since its engine died. Try again.")
        cache = self._loaded.cache
        if job.cached_media and (cache is None or not cache.can_prefill_from_cache):
            raise PrefixEvicted("This worker finds no media in its cache. Try again.")
        encoding, engine, transfers = self._encoding, self._loaded.engine, self._transfers
        media, spent = await encoding.encode(job) if encoding else ((), {})
        if engine is None:
            await encode.offer_embeddings(media, spent, transfers, reply, job.transport)
            return
        async with open_inputs(job, self._role, media, spent, transfers) as visit:
            if visit.generation.span == "P":
                await prefill.prefill(visit, engine, transfers, reply, job.transport)
            else:
                await decode.decode(visit, engine, reply)

    def report(self) -> WorkerReport:
        engine, counts = self._loaded.report(), self._transfers.counts()
        queued, kept, counters = engine.queued, 0, engine.counters
        if (room := self._encoding) is not None:
            # What the cache keeps is no request's: only what goes beyond it could be a leak.
            queued, kept = queued + room.queued, room.cache.arrays
            counters = counters | room.counters
        if self.ledger is not None:
            counters = counters | self.ledger.counters
        counters = counters | warning_totals()
        return WorkerReport(
            id=self.id,
            role=str(self._role),
            pid=os.getpid(),
            epoch=self.epoch,
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
            loop_lag=self._lag.max_lag,
            loop_work=self._lag.max_cpu,
            loop_stalls=self._lag.stalls,
            transport=self._transfers.transport,
            host=host_name(host_id()),
            address=self.address,
            request_plane=self._config.request_plane,
            event_plane="" if self.ledger is None else self._config.event_plane,
            device=self.device,
        )

    def record(
        self, model: str, transports: tuple[str, ...], events: str, gpu: str
    ) -> WorkerRecord:
        """What discovery tells of it."""
        pid, cache = os.getpid(), self._loaded.cache
        return WorkerRecord(
            self.id,
            str(self._role),
            self.epoch,
            self.address,
            pid,
            model,
            block_size=cache.block_size if cache else 0,
            host=host_id(),
            begun=process_start(pid),
            can_prefill_from_cache=cache is not None and cache.can_prefill_from_cache,
            memory=memory_domain(),
            transports=transports,
            events=events,
            resumes=self._loaded.resumes,
            gpu=gpu,
        )


def open_encode_stage(config: Config, encoder: Encoder, transfers: TransferClient) -> EncodeStage:
    """What stands around an encoder: a decode pool, unless it takes files as they are, and the
    cache of embeddings."""
    pool = None if encoder.recipes is None else DecodePool(encoder.recipes, config)
    most = min(descriptor_share(KEPT), memory_map_share(KEPT))
    cache = EmbeddingCache(config.cache.embeddings, config.cache.largest_embedding, most)
    return EncodeStage(encoder, pool, cache, transfers)


async def serve(
    config: Config,
    role: Role,
    worker_id: str,
    secret: str,
    ready: Callable[[], None] = lambda: None,
    ending: Callable[[int], None] = lambda code: None,
) -> int:
    """Be a worker until SIGTERM, SIGHUP, Ctrl-C or a lost lease. Gives the exit code.

    ``ready`` is called once others can see it, ``ending`` with the exit code before the engine is
    closed, after an error too: to close an engine may take for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until stop_event
    model, device = fingerprint(open_model(config.model)), config.device
    config = restrict_gpus(config)
    async with AsyncExitStack() as scope:
        discovery = await scope.enter_async_context(open_discovery(config, worker_id, secret))
        await _check_free(discovery, worker_id)
        planes = await scope.enter_async_context(open_planes(config, worker_id))
        await planes.prepare()  # refused before minutes of loading
        epoch = await discovery.claim(worker_id)
        transfers = TransferClient.from_config(config, worker_id, epoch)
        scope.push_async_callback(transfers.close)
        loaded = await asyncio.to_thread(_load, config, role, device, transfers.empty)
        scope.callback(loaded.close)
        scope.push(partial(_bound_closing, worker_id, ending))
        encoding = None
        pulses = EngineHealth(), EngineHealth()
        loaded = _heard(loaded, *pulses)
        if loaded.encoder is not None:
            encoding = open_encode_stage(config, loaded.encoder, transfers)
            scope.push_async_callback(encoding.close)
        gpu = ""
        if loaded.gpu is not None:
            gpu = await transfers.use_gpu(loaded.gpu, loaded.gpu_lent)
        worker = Worker(config, role, worker_id, epoch, loaded, encoding, transfers)
        if device != "auto":
            worker.device = device
        await canary.check_start(loaded.engine, encoding)
        # After the engine, which may fork and read UCX's settings.
        transports = await transfers.check_transports(other_hosts=bool(config.join))
        stop = stop_event()
        server = RequestServer(worker.answer, secret, worker_id, epoch)
        scope.push_async_callback(server.close)
        plane = planes.named(config.request_plane)
        worker.address = await server.start(config.worker_host, 0, plane)
        events = await scope.enter_async_context(_telling(config, planes, secret, worker))
        record = worker.record(model, transports, events, gpu)
        lease = await discovery.register(record)
        scope.push_async_callback(lease.close)
        print_status(f"worker {worker_id} is ready at {worker.address}")
        ready()
        waiting = asyncio.create_task(
            report_waiting(
                discovery,
                lambda: "" if server.called else "a frontend",
                partial(_uncalled, discovery),
            )
        )
        scope.push_async_callback(cancel_and_wait, waiting)
        hung = asyncio.Event()
        watching = asyncio.create_task(_watch(config, loaded, encoding, *pulses, hung))
        log_failure(watching, log, "nobody watches any more whether the engine hangs")
        scope.push_async_callback(cancel_and_wait, watching)
        over_nats = "nats" in (config.request_plane, config.event_plane)
        lost = planes.lost if over_nats else asyncio.Event()
        ends = StopReasons(stop, lease.fenced, loaded.died or asyncio.Event(), lost, hung)
        code = await until_stopped(ends, worker, server, lease, config.limits.drain_seconds)
        ending(code)
        return code


def _bound_closing(
    worker_id: str,
    ending: Callable[[int], None],
    _: type[BaseException] | None,
    error: BaseException | None,
    __: TracebackType | None,
) -> None:
    """After an error the engine's close has a deadline too. The error is logged here, because a
    process that reaches the deadline exits without it."""
    if error is not None:
        log.error("worker %s stops after an error: %s", worker_id, error)
        ending(EXIT_START_ERROR if isinstance(error, StartError) else 1)


def restrict_gpus(config: Config) -> Config:
    """From here on this process sees the GPUs that --device numbers and no others, as ``cuda``."""
    if not (numbers := placement.gpu_numbers(config.device)):
        return config
    try:
        gpus.restrict_visible_gpus(numbers)
    except ValueError as error:
        raise InvalidConfig(f"--device {config.device} is not there: {error}") from None
    return msgspec.structs.replace(config, device="cuda")


def _load(config: Config, role: Role, device: str, empty: AllocateOnGpu) -> LoadedEngine:
    """Load the engine. Workers that share a GPU do so one after the other: each measures how much
    of it is free, and would take what another allocates meanwhile for its own."""
    with contextlib.ExitStack() as turns:
        if config.run_dir and config.gpu_memory_utilization:
            for number in sorted(placement.gpu_numbers(device)):
                turns.enter_context(run_dir.lock(Path(config.run_dir), f"loading-on-{number}"))
        return find_engine(config.engine)(config, role, empty, Progress())


def _heard(loaded: LoadedEngine, encodes: EngineHealth, generates: EngineHealth) -> LoadedEngine:
    """The same parts, with their answers counted."""
    engine, encoder = loaded.engine, loaded.encoder
    return replace(
        loaded,
        engine=None if engine is None else MonitoredEngine(engine, generates),
        encoder=None if encoder is None else MonitoredEncoder(encoder, encodes),
    )


async def _watch(
    config: Config,
    loaded: LoadedEngine,
    encoding: EncodeStage | None,
    encodes: EngineHealth,
    generates: EngineHealth,
    hung: asyncio.Event,
) -> None:
    """Tell when one of them hangs, each by a canary of its own."""
    seconds, engine = config.limits.engine_seconds, loaded.engine
    if not seconds:
        return

    def steps() -> float:
        return loaded.report().counters.get("steps", 0.0)

    watches = []
    if encoding is not None:
        watches.append(
            wait_for_hang(encodes, lambda: 0.0, partial(canary.encode_canary, encoding), seconds)
        )
    if engine is not None:
        watches.append(
            wait_for_hang(generates, steps, partial(canary.generate_canary, engine), seconds)
        )
    tasks = [asyncio.ensure_future(watch) for watch in watches]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        hung.set()
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _telling(
    config: Config, planes: Planes, secret: str, worker: Worker
) -> AsyncIterator[str]:
    """Tell on the event plane what the worker has cached; gives where. Empty: in calls alone."""
    ledger, teller = worker.ledger, None
    if ledger is not None:
        teller = open_publisher(config, planes, secret, worker.id, worker.epoch, ledger.whole)
    if ledger is None or teller is None:
        yield ""
        return
    telling = asyncio.create_task(ledger.watch(EventPlaneWatcher(teller)))
    try:
        yield teller.address
    finally:
        await cancel_and_wait(telling)
        await teller.close()


async def _uncalled(discovery: Discovery) -> str:
    """What is wrong where a frontend is there and calls nobody."""
    if not await discovery.watched():
        return ""
    return (
        "one is there and does not use this worker: its /cluster says why, as another model, "
        "--pattern or TRIPTYCH_SECRET, or a --worker-host that does not lead here from there"
    )


async def _check_free(discovery: Discovery, worker_id: str) -> None:
    """Refuse the id of a worker that lives."""
    other = await find_conflict(discovery, [worker_id])
    if other is not None:
        place = discovery.standing.setting
        raise InvalidConfig(
            f"{describe_conflict(other)}, in {place}: give another --index, or another "
            f"{place.split()[0]}"
        )
