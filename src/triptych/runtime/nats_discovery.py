"""Discovery on NATS: a JetStream key-value bucket for each namespace, a key for each worker.

A worker writes its entry only over the revision that it knows, so two that race get two epochs, and
an older incarnation never replaces a newer one. It rewrites the entry every second; readers judge
by their own clocks when they last saw a new revision, so hosts need not agree on the time. Entries
of dead workers expire with the bucket's age limit. If the bucket is lost, because NATS kept it in
memory, the first process to need it creates it again, and workers reappear with their next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import (
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)
from nats.js.kv import KV_OP, KeyValue

from triptych.config import Config
from triptych.errors import StartError
from triptych.host import boot_time
from triptych.messages import WorkerRecord
from triptych.runtime.authentication import EntrySigner
from triptych.runtime.concurrency import cancel_and_wait, wait_at_most
from triptych.runtime.discovery import DiscoveryStatus, check_name, register
from triptych.runtime.lease import (
    FORGET_SECONDS,
    LEASE_SECONDS,
    Clock,
    DiscoveryEntry,
    LivenessView,
    WorkerLease,
)
from triptych.runtime.nats import NatsConnection, connect

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
AWAY_SECONDS = 3.0  # out of touch for so long: the view is only the last known one
ANSWER_TIMEOUT = 0.4  # of a lease: leaves time for a second try
RENEWED = 0.6  # of a lease, in which every live worker has renewed
PROBE = 0.2  # of a lease without news, after which NATS is asked whether it is there
FIRST_PROBE_SECONDS = 0.1  # the bucket may be empty
IDLE_CONSUMER_SECONDS = 30.0  # after which NATS drops the consumer of a reader that left
KEY_PREFIX = "workers."
BUCKET_PREFIX = "triptych_"


@contextlib.asynccontextmanager
async def open_nats(
    config: Config,
    namespace: str,
    name: str,
    secret: str = "",
    *,
    lease: float = LEASE_SECONDS,
    clock: Clock = boot_time,
) -> AsyncIterator[NatsDiscovery]:
    connection = NatsConnection(config, name, await connect(config, name))
    try:
        bucket = EntryBucket(connection, namespace, lease, secret)
        await bucket.check()
        yield NatsDiscovery(bucket, ", ".join(config.servers), namespace, lease, clock)
    finally:
        await connection.close()


class NatsDiscovery:
    """The bucket where the workers of one namespace register: see ``Discovery``."""

    def __init__(
        self, bucket: EntryBucket, servers: str, namespace: str, lease: float, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._servers = servers
        self._namespace = namespace
        self._lease = lease
        self._clock = clock
        self._workers = LivenessView(lease, clock)
        self._unsigned = LivenessView(lease, clock)  # of entries that this cluster did not sign
        self._watching = False

    async def claim(self, worker_id: str) -> int:
        check_name("worker", worker_id)
        try:
            while True:
                entry, revision = await self._bucket.get(worker_id)
                # The clock keeps epochs growing even if the bucket was lost with its entries.
                claimed = DiscoveryEntry(max(entry.epoch + 1, int(time.time() * 1000)))
                if await self._bucket.swap(worker_id, claimed, revision) is not None:
                    return claimed.epoch
        except OSError as error:
            raise StartError(f"worker {worker_id} cannot register: {error}") from None

    async def register(self, record: WorkerRecord) -> WorkerLease:
        return await register(_BucketRegistration(self._bucket), record, self._lease, self._clock)

    async def view(self) -> dict[str, WorkerRecord]:
        """See ``Discovery.view``. A worker that this reader did not know before counts as live for
        one lease: nobody can tell when it renewed."""
        with contextlib.suppress(OSError):
            await self._follow(None)
        return self._workers.view()

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        self._watching, changed, last, pause = True, asyncio.Event(), None, None
        reading = asyncio.create_task(self._read(changed))
        reading.add_done_callback(lambda _: changed.set())
        try:
            while not reading.done():
                await wait_at_most(changed, pause)
                changed.clear()
                pause = self._bucket.probe  # a lease may expire without any news
                view, rejected = self._workers.view(), self._unsigned.view()
                if (view, rejected) != last:
                    last = view, rejected
                    yield dict(view)
            reading.result()  # it ends only by a bug of ours
        finally:
            await cancel_and_wait(reading)

    async def others(self) -> tuple[str, ...]:
        """See ``Discovery.others``. Empty while NATS is away, or if we may not list them."""
        try:
            return await self._bucket.others()
        except OSError as error:
            log.debug("cannot list other namespaces: %s", error)
            return ()

    async def watched(self) -> bool:
        """See ``Discovery.watched``. False while NATS is away."""
        try:
            return await self._bucket.watched()
        except OSError as error:
            log.debug("cannot list readers: %s", error)
            return False

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        return self._unsigned.view()

    @property
    def status(self) -> DiscoveryStatus:
        away = not self._bucket.connected
        away |= self._watching and self._workers.silent(AWAY_SECONDS)
        return DiscoveryStatus(self._servers, away, self._namespace)

    async def _read(self, changed: asyncio.Event) -> None:
        """Follow the bucket for ever, through all outages."""
        while True:
            try:
                await self._follow(changed)
            except OSError as error:
                log.debug("discovery is away: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, changed: asyncio.Event | None) -> None:
        """Read all entries and then every update; without ``changed``, the entries alone.

        The reader is in touch whenever NATS has nothing more for it.
        """
        async with self._bucket.updates() as updates:
            news = True
            while True:
                message, more = await updates.next()
                if message is not None:
                    news |= self._apply(message)
                if more:
                    continue
                self._workers.touch()
                self._unsigned.touch()
                if changed is None:
                    return
                if news:
                    news = False
                    changed.set()

    def _apply(self, message: Msg) -> bool:
        """Record an update. True: it is more than a renewed lease."""
        worker_id, entry, signed, revision = self._bucket.read_message(message)
        if entry is None:
            removed = self._workers.remove(worker_id)
            return self._unsigned.remove(worker_id) or removed
        if not signed:  # says nothing about the worker that it names, which will renew its own
            return self._unsigned.update(worker_id, entry, revision)
        self._unsigned.forget(worker_id)
        return self._workers.update(worker_id, entry, revision)


class _BucketRegistration:
    """One worker's entry, written only over the revision that we know."""

    def __init__(self, bucket: EntryBucket) -> None:
        self._bucket = bucket
        self._revision = 0

    async def put(self, record: WorkerRecord) -> bool:
        async with asyncio.timeout(self._bucket.timeout):
            return await self._write(record.id, DiscoveryEntry(record.epoch, record))

    async def remove(self, record: WorkerRecord) -> None:
        async with asyncio.timeout(self._bucket.timeout):
            await self._write(record.id, DiscoveryEntry(record.epoch))

    async def _write(self, worker_id: str, entry: DiscoveryEntry) -> bool:
        """False: a newer incarnation has registered."""
        while True:
            revision = await self._bucket.swap(worker_id, entry, self._revision)
            if revision is not None:
                self._revision = revision
                return True
            current, revision = await self._bucket.get(worker_id)
            if current.epoch > entry.epoch:
                return False  # and never write over its revision
            self._revision = revision


class EntryBucket:
    """The entries of one namespace by worker. Raises OSError for every failure that may pass.

    ``timeout``: seconds that an answer may take; ``probe``: seconds between checks of NATS.
    """

    def __init__(
        self, connection: NatsConnection, namespace: str, lease: float, secret: str
    ) -> None:
        self._signer = EntrySigner(DiscoveryEntry, secret, namespace)
        self.timeout = ANSWER_TIMEOUT * lease
        self.probe = PROBE * lease
        self._renewed = RENEWED * lease
        self._connection = connection
        self._name = f"{BUCKET_PREFIX}{namespace}"
        self._opened: tuple[Client, JetStreamContext, KeyValue] | None = None

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def check(self) -> None:
        """Raise StartError if the server cannot store a bucket for us."""
        try:
            await self._connection.client.jetstream(timeout=self.timeout).account_info()
        except (ServiceUnavailableError, Error) as error:
            raise StartError(
                f"NATS stores no data for us ({error or type(error).__name__}): discovery needs "
                "JetStream. Start the server with `nats-server -js`, and let this user use it."
            ) from None

    async def get(self, worker_id: str) -> tuple[DiscoveryEntry, int]:
        """A worker's entry and its revision; without a signed one, an entry of epoch 0."""
        with self._translated_errors():
            _, bucket = await self._open()
            try:
                found = await bucket.get(KEY_PREFIX + worker_id)
            except KeyNotFoundError as error:
                return DiscoveryEntry(0), (error.entry.revision or 0) if error.entry else 0
        entry, signed = self._signer.decode(worker_id, found.value or b"")
        return entry if entry is not None and signed else DiscoveryEntry(0), found.revision or 0

    async def swap(self, worker_id: str, entry: DiscoveryEntry, revision: int) -> int | None:
        """Replace this revision (0: no entry) and return the new one. None: it has changed."""
        with self._translated_errors():
            _, bucket = await self._open()
            try:
                value = self._signer.encode(worker_id, entry)
                return await bucket.update(KEY_PREFIX + worker_id, value, last=revision)
            except KeyWrongLastSequenceError:
                return None

    @contextlib.asynccontextmanager
    async def updates(self) -> AsyncIterator[BucketUpdates]:
        """All entries of the bucket, and then every change."""
        with self._translated_errors():
            stream, _ = await self._open()
            subscription = await stream.subscribe(
                f"$KV.{self._name}.{KEY_PREFIX}>",
                stream=f"KV_{self._name}",
                config=ConsumerConfig(
                    ack_policy=AckPolicy.NONE,
                    deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                    inactive_threshold=IDLE_CONSUMER_SECONDS,
                    mem_storage=True,
                ),
            )
            try:
                yield BucketUpdates(subscription, self.probe)
            finally:
                with contextlib.suppress(Error, OSError):
                    await subscription.unsubscribe()

    async def others(self) -> tuple[str, ...]:
        """Other namespaces with renewed entries or with readers. Entries of workers that left stay
        for a while, so finding out takes some seconds."""
        with self._translated_errors():
            stream, _ = await self._open()
            before = await _last_writes(stream)
            await asyncio.sleep(self._renewed)
            names = [
                name
                for name, written in (await _last_writes(stream)).items()
                if name != self._name
                and (written != before.get(name, 0) or await _has_readers(stream, name))
            ]
        return tuple(sorted(name.removeprefix(BUCKET_PREFIX) for name in names))

    async def watched(self) -> bool:
        """Whether the bucket has readers."""
        with self._translated_errors():
            stream, _ = await self._open()
            return await _has_readers(stream, self._name)

    def read_message(self, message: Msg) -> tuple[str, DiscoveryEntry | None, bool, int]:
        """The worker's id, its entry (None: removed or undecodable), whether this cluster signed
        it, and the revision."""
        worker_id = message.subject.partition(f".{KEY_PREFIX}")[2]
        if KV_OP in (message.headers or {}):
            entry, signed = None, True
        else:
            entry, signed = self._signer.decode(worker_id, message.data)
        if entry is not None and entry.record is not None and entry.record.id != worker_id:
            entry = None
        return worker_id, entry, signed, message.metadata.sequence.stream

    async def _open(self) -> tuple[JetStreamContext, KeyValue]:
        """The bucket, created if it does not exist. One that the operator created is used as is."""
        client = self._connection.client
        if self._opened is None or self._opened[0] is not client:
            stream = client.jetstream(timeout=self.timeout)
            try:
                bucket = await stream.key_value(self._name)
            except BucketNotFoundError:
                about = "workers of a Triptych cluster"
                bucket = await stream.create_key_value(
                    bucket=self._name, description=about, history=1, ttl=FORGET_SECONDS
                )
            self._opened = client, stream, bucket
        return self._opened[1:]

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn errors of nats-py into ConnectionError."""
        try:
            yield
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ConnectionError("NATS closed the connection") from None  # cancelled by nats-py
        except Error as error:
            if isinstance(error, NotFoundError | NoStreamResponseError):
                self._opened = None  # the bucket is lost: the next call creates it again
            raise ConnectionError(f"NATS: {error or type(error).__name__}") from None


class BucketUpdates:
    """The entries of a bucket, and its changes as they arrive."""

    def __init__(self, subscription: JetStreamContext.PushSubscription, probe: float) -> None:
        self._subscription = subscription
        self._probe = probe
        self._received = 0
        self._behind = 0  # timeouts in a row although NATS had more for us
        self._timeout = FIRST_PROBE_SECONDS

    async def next(self) -> tuple[Msg | None, bool]:
        """The next message, or None after a silence in which NATS was there; and whether more
        messages are on their way."""
        try:
            message = await self._subscription.next_msg(self._timeout)
        except NatsTimeout:
            return None, await self._is_behind()
        self._received += 1
        self._behind = 0
        return message, message.metadata.num_pending > 0

    async def _is_behind(self) -> bool:
        """Whether NATS has more for us. Raises if it is away or has lost our consumer."""
        consumer = await self._subscription.consumer_info()
        sent = consumer.delivered.consumer_seq if consumer.delivered else 0
        behind = bool(consumer.num_pending) or sent > self._received
        self._behind = self._behind + 1 if behind else 0
        if self._behind > 1:
            raise ConnectionError("NATS lost updates on the way")  # the reader starts over
        self._timeout = self._probe
        return behind


async def _last_writes(stream: JetStreamContext) -> dict[str, int]:
    """All our buckets on this NATS, each with the number of its last write."""
    found = {str(one.config.name): one.state.last_seq for one in await stream.streams_info()}
    prefix = f"KV_{BUCKET_PREFIX}"
    return {name[3:]: last for name, last in found.items() if name.startswith(prefix)}


async def _has_readers(stream: JetStreamContext, bucket: str) -> bool:
    """Whether the bucket has readers now; NATS lists those that left for a while."""
    return any(one.push_bound for one in await stream.consumers_info(f"KV_{bucket}"))
