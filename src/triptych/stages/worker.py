"""A worker answers calls: it runs the stages of its role over one loaded engine.

``process`` starts it, registers it in discovery and stops it.
"""

from __future__ import annotations

import logging
import os

from triptych.config import Config
from triptych.engines.base import LoadedEngine
from triptych.errors import Draining, PrefixGone
from triptych.host import host_id, host_name, process_start
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
from triptych.recipe import Recipes
from triptych.runtime.server import Reply
from triptych.stages.cache_reporter import CacheReporter
from triptych.stages.encode import EncodeStage, offer_embeddings
from triptych.stages.generate import open_inputs, run_decode, run_prefill
from triptych.topology import Role
from triptych.transfer.client import TransferClient
from triptych.transfer.segment import memory_domain

log = logging.getLogger(__name__)


class Worker:
    """``encoding``: None in roles that do not encode."""

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
        self.address = ""  # of its request plane, once that is open
        self.device = loaded.device  # unless the operator has named one
        self.cache_reporter: CacheReporter | None = None
        if (cache := loaded.cache) is not None:
            self.cache_reporter = CacheReporter(cache.block_size, cache.blocks)
            cache.listen(self.cache_reporter.receive)

    async def answer(self, request: WorkerRequest, reply: Reply) -> None:
        match request:
            case Job():
                await self._run_stages(request, reply)
            case GetReport():
                reply.send(self.report())
            case GetRecipes():
                encoder = self._loaded.encoder
                reply.send((encoder and encoder.recipes) or Recipes(revision=""))
            case WatchCache() if self.cache_reporter is not None:
                await self.cache_reporter.watch(reply)

    async def _run_stages(self, job: Job, reply: Reply) -> None:
        """Encode, then prefill or decode, as far as this role does."""
        log.debug("running %s", self._role, extra={"request_id": job.work.id})
        if self._loaded.died is not None and self._loaded.died.is_set():
            # This process ends in a moment. A job that arrives until then has lost no work.
            raise Draining("This worker is ending, since its engine died. Try again.")
        cache = self._loaded.cache
        if job.cached_media and (cache is None or not cache.can_prefill_from_cache):
            raise PrefixGone("This worker finds no media in its cache. Try again.")
        encoding, engine, transfers = self._encoding, self._loaded.engine, self._transfers
        media, timings = await encoding.encode(job) if encoding else ((), {})
        if engine is None:
            await offer_embeddings(media, timings, transfers, reply, job.transport)
            return
        async with open_inputs(job, self._role, media, timings, transfers) as inputs:
            if inputs.generation.phases == "P":
                await run_prefill(inputs, engine, transfers, reply, job.transport)
            else:
                await run_decode(inputs, engine, reply)

    def drain(self) -> None:
        """No new job comes from now on. Ends the calls that watch the cache, so that the drain does
        not wait for them."""
        self.draining = True
        if self.cache_reporter is not None:
            self.cache_reporter.close()

    def report(self) -> WorkerReport:
        engine, counts = self._loaded.report(), self._transfers.counts()
        queued, cached, counters = engine.queued, 0, engine.counters
        if (encoding := self._encoding) is not None:
            # Segments of the embedding cache belong to no request: more than those may be a leak.
            queued, cached = queued + encoding.queued, encoding.cache.arrays
            counters = counters | encoding.counters
        if self.cache_reporter is not None:
            counters = counters | self.cache_reporter.counters
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
            segments=max(0, counts.segments - cached),
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
            event_plane="" if self.cache_reporter is None else self._config.event_plane,
            device=self.device,
        )

    def record(
        self, model: str, transports: tuple[str, ...], events: str, gpu: str
    ) -> WorkerRecord:
        """The worker's entry in discovery."""
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
            folder=self._transfers.folder,
        )
