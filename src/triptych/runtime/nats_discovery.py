"""Discovery on NATS: a JetStream key-value bucket for each namespace, a key for each worker.

An entry is written only over the revision that its writer knows, so two that race get two epochs
and no older incarnation ever stands over a newer one. It is written anew every second; whoever
reads judges by his own clock when he last saw that, so hosts need not agree on the time. Entries of
the dead vanish with the bucket's age limit. If the bucket is lost, because NATS kept it in memory,
whoever comes first makes it again, and workers stand in it again with their next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from nats.aio.msg import Msg

from triptych.errors import StartError
from triptych.messages import WorkerRecord
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.discovery import DiscoveryStatus, check_name
from triptych.runtime.lease import (
    LEASE_SECONDS,
    Clock,
    DiscoveryEntry,
    LivenessView,
    WorkerLease,
    boottime,
)
from triptych.runtime.nats import NatsOptions, connect
from triptych.runtime.nats_bucket import EntryBucket, NatsConnection

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
AWAY_SECONDS = 3.0  # out of touch for so long: what is told is the last known view


@contextlib.asynccontextmanager
async def open_nats(
    options: NatsOptions,
    namespace: str,
    name: str,
    secret: str = "",
    *,
    lease: float = LEASE_SECONDS,
    clock: Clock = boottime,
) -> AsyncIterator[NatsDiscovery]:
    line = NatsConnection(options, name, await connect(options, name))
    try:
        bucket = EntryBucket(line, namespace, lease, secret)
        await bucket.check()
        yield NatsDiscovery(bucket, ", ".join(options.servers), namespace, lease, clock)
    finally:
        await line.close()


class NatsDiscovery:
    """The bucket where the workers of one namespace find each other."""

    def __init__(
        self, bucket: EntryBucket, servers: str, namespace: str, lease: float, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._servers = servers
        self._namespace = namespace
        self._lease = lease
        self._clock = clock
        self._sightings = LivenessView(lease, clock)
        self._unsigned = LivenessView(lease, clock)  # and what this cluster has not signed
        self._watched = False

    async def claim(self, worker_id: str) -> int:
        """A new epoch for this worker, greater than any before: its older incarnations are fenced.

        Two that race get two epochs.
        """
        check_name("worker", worker_id)
        try:
            while True:
                entry, revision = await self._bucket.get(worker_id)
                # The clock keeps epochs growing even when the bucket was lost with its entries.
                claimed = DiscoveryEntry(max(entry.epoch + 1, int(time.time() * 1000)))
                if await self._bucket.swap(worker_id, claimed, revision) is not None:
                    return claimed.epoch
        except OSError as error:
            raise StartError(f"worker {worker_id} cannot be announced: {error}") from None

    async def register(self, record: WorkerRecord) -> WorkerLease:
        """Show this record to all readers until the lease is closed or lost."""
        check_name("worker", record.id)
        lease = WorkerLease(_Place(self._bucket), record, self._lease, self._clock)
        await lease.begin()
        return lease

    async def view(self) -> dict[str, WorkerRecord]:
        """The workers whose lease is live, by id. While NATS is away: those of the last view.

        Of one that was not seen before, nobody can tell when it renewed: it has a lease.
        """
        with contextlib.suppress(OSError):
            await self._follow(None)
        return self._sightings.view()

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        """The view now, and again whenever it has changed."""
        self._watched, changed, last, pause = True, asyncio.Event(), None, None
        reading = asyncio.create_task(self._read(changed))
        reading.add_done_callback(lambda _: changed.set())
        try:
            while not reading.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await changed.wait()
                changed.clear()
                pause = self._bucket.probe  # a lease may run out with nothing said
                view, rejected = self._sightings.view(), self._unsigned.view()
                if (view, rejected) != last:
                    last = view, rejected
                    yield dict(view)
            reading.result()  # it ends by a bug of ours alone
        finally:
            await cancel_and_wait(reading)

    async def others(self) -> tuple[str, ...]:
        """Namespaces of this NATS where somebody is, besides ours. None while it is away, or where
        we may not list them."""
        try:
            return await self._bucket.others()
        except OSError as error:
            log.debug("other namespaces cannot be listed: %s", error)
            return ()

    async def watched(self) -> bool:
        """Whether a frontend reads here. Not, as far as we can tell, while NATS is away."""
        try:
            return await self._bucket.watched()
        except OSError as error:
            log.debug("readers cannot be listed: %s", error)
            return False

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        return self._unsigned.view()

    @property
    def standing(self) -> DiscoveryStatus:
        away = not self._bucket.connected
        away |= self._watched and self._sightings.silent(AWAY_SECONDS)
        return DiscoveryStatus(self._servers, away, self._namespace)

    async def _read(self, changed: asyncio.Event) -> None:
        """Follow the bucket for ever, whatever happens to it."""
        while True:
            try:
                await self._follow(changed)
            except OSError as error:
                log.debug("discovery is away: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, changed: asyncio.Event | None) -> None:
        """Take in what the bucket holds and then all that comes to it (None: no more than that).

        We are in touch whenever there is nothing that NATS knows and we do not.
        """
        async with self._bucket.news() as news:
            told = True
            while True:
                message, more = await news.next()
                if message is not None:
                    told |= self._take(message)
                if more:
                    continue
                self._sightings.touch()
                self._unsigned.touch()
                if changed is None:
                    return
                if told:
                    told = False
                    changed.set()

    def _take(self, message: Msg) -> bool:
        """Note what a message shows. True: it is more than a lease renewed."""
        worker_id, entry, signed, revision = self._bucket.read_message(message)
        if entry is None:
            lost = self._sightings.lose(worker_id)
            return self._unsigned.lose(worker_id) or lost
        if not signed:  # says nothing of the worker that it names, which writes its own again
            return self._unsigned.see(worker_id, entry, revision)
        self._unsigned.forget(worker_id)
        return self._sightings.see(worker_id, entry, revision)


class _Place:
    """One worker's entry, written over what we know to stand there."""

    def __init__(self, bucket: EntryBucket) -> None:
        self._bucket = bucket
        self._revision = 0

    async def put(self, record: WorkerRecord) -> bool:
        async with asyncio.timeout(self._bucket.patience):
            return await self._write(record.id, DiscoveryEntry(record.epoch, record))

    async def leave(self, record: WorkerRecord) -> None:
        async with asyncio.timeout(self._bucket.patience):
            await self._write(record.id, DiscoveryEntry(record.epoch))

    async def _write(self, worker_id: str, entry: DiscoveryEntry) -> bool:
        """False: a newer incarnation stands there."""
        while True:
            revision = await self._bucket.swap(worker_id, entry, self._revision)
            if revision is not None:
                self._revision = revision
                return True
            there, revision = await self._bucket.get(worker_id)
            if there.epoch > entry.epoch:
                return False  # and what we know stays what it was: never to be written over
            self._revision = revision
