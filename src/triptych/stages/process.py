"""``triptych worker``: the process around one worker, from its start to its last request.

It loads the parts that its role needs, sends a canary through them, registers in discovery, serves,
and stops on a signal, or when it can no longer serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import msgspec
import uvloop

from triptych import placement
from triptych.checkpoint import fingerprint, open_model
from triptych.config import Config
from triptych.engines.base import AllocateOnGpu, Encoder, LoadedEngine, find_engine
from triptych.errors import InvalidConfig, StartError
from triptych.host import free_port, is_loopback
from triptych.media.pool import DecodePool
from triptych.observe import log as logs
from triptych.observe.log import Progress, print_status
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
from triptych.runtime.lease import WorkerLease
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.runtime.planes import Planes, open_planes
from triptych.runtime.process import (
    CLOSE_SECONDS,
    EXIT_NATS_LOST,
    descriptor_share,
    exit_within,
    memory_map_share,
    raise_descriptor_limit,
    ready_marker,
    stop_signals,
)
from triptych.runtime.server import CallServer
from triptych.stages import health
from triptych.stages.cache_reporter import EventPlaneWatcher
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeStage
from triptych.stages.health import EngineHealth
from triptych.stages.worker import Worker
from triptych.topology import Role
from triptych.transfer.client import TransferClient

log = logging.getLogger(__name__)
FENCED = 3  # exit code of a worker whose id another incarnation took over
ENGINE_DIED = 4  # exit code of a worker whose engine died or hangs
EMBEDDING_CACHE_SHARE = 0.25  # of all file descriptors and memory maps


def main(config: Config, role: str, worker_id: str, secret: str, ready_file: str = "") -> int:
    logs.configure(config.log_format)
    os.dup2(2, 1)  # what engines print joins the log, which has this worker's name
    raise_descriptor_limit()
    roles = config.topology.roles
    if role not in roles:
        raise InvalidConfig(
            f"--pattern {config.pattern} has no role '{role}'. Use one of {', '.join(roles)}."
        )
    free_port(config.worker_host, 0, "--worker-host")  # refused before minutes of loading
    if config.join:
        _check_reachable(config)
    with ready_marker(ready_file) as ready:
        ending = partial(exit_within, CLOSE_SECONDS)
        return uvloop.run(run_worker(config, Role(role), worker_id, secret, ready, ending))


async def run_worker(
    config: Config,
    role: Role,
    worker_id: str,
    secret: str,
    ready: Callable[[], None] = lambda: None,
    ending: Callable[[int], None] = lambda code: None,
) -> int:
    """Be a worker until SIGTERM, SIGHUP, Ctrl-C or a lost lease. Returns the exit code.

    Calls ``ready`` once the worker is in discovery, and ``ending`` with the exit code before the
    engine is closed, after an error too: to close an engine may take for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until stop_event
    model, device = fingerprint(open_model(config.model)), config.device
    config = restrict_gpus(config)
    async with AsyncExitStack() as scope:
        discovery = await scope.enter_async_context(open_discovery(config, worker_id, secret))
        await _check_id_is_free(discovery, worker_id)
        planes = await scope.enter_async_context(open_planes(config, worker_id))
        await planes.prepare()  # refused before minutes of loading
        epoch = await discovery.claim(worker_id)
        transfers = TransferClient.from_config(config, worker_id, epoch)
        scope.push_async_callback(transfers.close)
        loaded = await asyncio.to_thread(_load, config, role, device, transfers.empty)
        scope.callback(loaded.close)
        scope.push(partial(_bound_close_after_error, worker_id, ending))
        encoding = None
        parts = EngineHealth(), EngineHealth()
        loaded = health.monitor(loaded, *parts)
        if loaded.encoder is not None:
            encoding = open_encode_stage(config, loaded.encoder, transfers)
            scope.push_async_callback(encoding.close)
        gpu = ""
        if loaded.gpu is not None:
            gpu = await transfers.use_gpu(loaded.gpu, loaded.gpu_lent)
        worker = Worker(config, role, worker_id, epoch, loaded, encoding, transfers)
        if device != "auto":
            worker.device = device
        await health.check_start(loaded.engine, encoding)
        # After the engine, which may fork and read UCX's settings.
        transports = await transfers.check_transports(other_hosts=bool(config.join))
        stop = stop_event()
        server = CallServer(worker.answer, secret, worker_id, epoch)
        scope.push_async_callback(server.close)
        plane = planes.named(config.request_plane)
        worker.address = await server.start(config.worker_host, 0, plane)
        events = await scope.enter_async_context(
            _publish_cache_changes(config, planes, secret, worker)
        )
        lease = await discovery.register(worker.record(model, transports, events, gpu))
        scope.push_async_callback(lease.close)
        print_status(f"worker {worker_id} is ready at {worker.address}")
        ready()
        waiting = asyncio.create_task(
            report_waiting(
                discovery,
                lambda: "" if server.called else "a frontend",
                partial(_explain_no_calls, discovery),
            )
        )
        scope.push_async_callback(cancel_and_wait, waiting)
        hung = asyncio.Event()
        seconds = config.limits.engine_seconds
        watching = asyncio.create_task(
            health.watch_for_hang(loaded, encoding, *parts, seconds, hung)
        )
        log_failure(watching, log, "the watch for an engine that hangs has ended")
        scope.push_async_callback(cancel_and_wait, watching)
        over_nats = "nats" in (config.request_plane, config.event_plane)
        lost = planes.lost if over_nats else asyncio.Event()
        reasons = StopReasons(stop, lease.fenced, loaded.died or asyncio.Event(), lost, hung)
        code = await serve_until_stopped(
            reasons, worker, server, lease, config.limits.drain_seconds
        )
        ending(code)
        return code


def open_encode_stage(config: Config, encoder: Encoder, transfers: TransferClient) -> EncodeStage:
    """An encoder with its cache of embeddings, and a decode pool unless it takes files."""
    pool = None if encoder.recipes is None else DecodePool(encoder.recipes, config)
    most = min(descriptor_share(EMBEDDING_CACHE_SHARE), memory_map_share(EMBEDDING_CACHE_SHARE))
    cache = EmbeddingCache(config.cache.embeddings, config.cache.largest_embedding, most)
    return EncodeStage(encoder, pool, cache, transfers)


def restrict_gpus(config: Config) -> Config:
    """Let this process see the GPUs that --device numbers and no others, as ``cuda``."""
    if not (numbers := placement.gpu_numbers(config.device)):
        return config
    try:
        gpus.restrict_visible_gpus(numbers)
    except ValueError as error:
        raise InvalidConfig(f"--device {config.device} is not there: {error}") from None
    return msgspec.structs.replace(config, device="cuda")


def _load(config: Config, role: Role, device: str, empty: AllocateOnGpu) -> LoadedEngine:
    """Load the engine. Workers that share a GPU load one after the other: each measures the free
    memory, and would count what another allocates meanwhile as its own."""
    with contextlib.ExitStack() as locks:
        if config.run_dir and config.gpu_memory_utilization:
            for number in sorted(placement.gpu_numbers(device)):
                locks.enter_context(run_dir.lock(Path(config.run_dir), f"loading-on-{number}"))
        return find_engine(config.engine)(config, role, empty, Progress())


def _bound_close_after_error(
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


@asynccontextmanager
async def _publish_cache_changes(
    config: Config, planes: Planes, secret: str, worker: Worker
) -> AsyncIterator[str]:
    """Publish the worker's cache changes on the event plane; yields where. Empty: in calls only."""
    reporter, publisher = worker.cache_reporter, None
    if reporter is not None:
        publisher = open_publisher(
            config, planes, secret, worker.id, worker.epoch, reporter.snapshot
        )
    if reporter is None or publisher is None:
        yield ""
        return
    publishing = asyncio.create_task(reporter.watch(EventPlaneWatcher(publisher)))
    try:
        yield publisher.address
    finally:
        await cancel_and_wait(publishing)
        await publisher.close()


async def _explain_no_calls(discovery: Discovery) -> str:
    """What may be wrong when a frontend is there and does not call this worker."""
    if not await discovery.watched():
        return ""
    return (
        "one is there and does not use this worker: its /cluster says why, as another model, "
        "--pattern or TRIPTYCH_SECRET, or a --worker-host that does not lead here from there"
    )


async def _check_id_is_free(discovery: Discovery, worker_id: str) -> None:
    """Refuse the id of a living worker."""
    other = await find_conflict(discovery, [worker_id])
    if other is not None:
        place = discovery.status.setting
        raise InvalidConfig(
            f"{describe_conflict(other)}, in {place}: give another --index, or another "
            f"{place.split()[0]}"
        )


def _check_reachable(config: Config) -> None:
    """Other hosts must be able to reach the address that this worker registers."""
    if config.worker_host in ("0.0.0.0", "::"):
        raise InvalidConfig(
            f"--worker-host {config.worker_host} is not an address that other hosts can connect "
            "to. Give the address by which they reach this host."
        )
    remote = [s for s in config.servers if not is_loopback(urlsplit(s).hostname or "")]
    if remote and is_loopback(config.worker_host):
        log.warning(
            "NATS is on another host, but this worker listens on %s, where only its own host "
            "reaches it: give --worker-host the address of this host",
            config.worker_host,
        )


def stop_event() -> asyncio.Event:
    """An event that stop signals set from now on. Until then, while loading, they end the process:
    it serves no request yet, and a thread that reads weights cannot be interrupted."""
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@dataclass(frozen=True, slots=True)
class StopReasons:
    """Events that stop a worker."""

    stop: asyncio.Event  # a signal
    fenced: asyncio.Event  # the lease was lost
    died: asyncio.Event  # the engine
    lost: asyncio.Event  # the connection to NATS
    hung: asyncio.Event  # the engine

    async def wait(self) -> None:
        """Until one of them is set."""
        events = (self.stop, self.fenced, self.died, self.lost, self.hung)
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()


async def serve_until_stopped(
    reasons: StopReasons,
    worker: Worker,
    server: CallServer,
    lease: WorkerLease,
    drain_seconds: float,
) -> int:
    """Serve until a reason to stop; returns the exit code. A signal drains the worker first; any
    other reason ends it at once, since it cannot serve any more."""
    await reasons.wait()
    if reasons.fenced.is_set():
        log.error(
            "the lease was lost (this process was stopped too long, or another took its id): "
            "this incarnation is fenced and stops"
        )
        return FENCED
    if reasons.died.is_set():
        log.error("the engine died: this worker ends, and another takes its place")
        return ENGINE_DIED
    if reasons.hung.is_set():
        log.error(
            "the engine has work and did nothing for --limits-engine-seconds: it hangs. This "
            "worker ends, and another takes its place"
        )
        return ENGINE_DIED
    if reasons.lost.is_set():
        log.error(
            "NATS has closed the connection for good: no frontend reaches this worker any more"
        )
        return EXIT_NATS_LOST
    worker.drain()
    await lease.update(state="draining")
    await server.drain(drain_seconds)
    return 0
