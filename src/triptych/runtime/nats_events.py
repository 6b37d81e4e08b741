"""Events over NATS: workers publish into a stream of the namespace, which stores them.

Each incarnation of a worker has a subject. From time to time it publishes a snapshot that replaces
its earlier events (a roll-up), so the stream stays small and a new subscriber catches up in a few
messages. Publishing waits for no acknowledgement: subscribers notice an event that was lost while
the server was away by its number, and ask the worker for a snapshot. Each message carries a MAC
from the cluster secret: subscribers drop those of anyone else who may write to the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from triptych.messages import CacheChange
from triptych.observe.log import RateLimitedLog
from triptych.runtime.authentication import MessageMac
from triptych.runtime.concurrency import cancel_and_wait, log_failure, wait_at_most
from triptych.runtime.events import OnChange, Snapshot

log = logging.getLogger(__name__)
SNAPSHOT_EVERY = 500  # changes
RETRY_SECONDS = 1.0
STREAM_BYTES = 256 << 20
STREAM_SECONDS = 24 * 3600.0  # older events are of workers that are gone
ROLL_UP = {"Nats-Rollup": "sub"}
UNAVAILABLE = (Error, OSError, TimeoutError)  # the server is away, or has no leader yet

_decode = msgspec.msgpack.Decoder(CacheChange).decode


class NatsPublisher:
    address = "nats"  # stream and subject follow from namespace, worker and epoch

    def __init__(
        self,
        client: Client,
        namespace: str,
        secret: str,
        worker: str,
        epoch: int,
        snapshot: Snapshot,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._subject = _subject(namespace, worker, epoch)
        self._mac = _mac(secret, self._subject)
        self._snapshot = snapshot
        self._since_snapshot = 0  # changes
        self._lost = True  # an event was not sent: a snapshot is due
        self._ready = False
        self._waiting: list[CacheChange] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._send())
        log_failure(self._task, log, "this worker publishes no cache events any more")

    def publish(self, change: CacheChange) -> None:
        if not self._ready or len(self._waiting) > SNAPSHOT_EVERY:
            self._lost = True  # the next snapshot includes it
        else:
            self._waiting.append(change)
        self._wake.set()

    async def close(self) -> None:
        await cancel_and_wait(self._task)
        stream = self._client.jetstream()
        with contextlib.suppress(*UNAVAILABLE):  # the stream expires it
            async with asyncio.timeout(RETRY_SECONDS):
                await stream.purge_stream(_stream(self._namespace), subject=self._subject)

    async def _send(self) -> None:
        await _ensure_stream(self._client, self._namespace)
        self._ready = True
        reconnects = self._client.stats["reconnects"]
        while True:
            if self._client.stats["reconnects"] != reconnects:
                reconnects = self._client.stats["reconnects"]
                await _ensure_stream(
                    self._client, self._namespace
                )  # a restarted server may have lost it
                self._lost = True
            changes, self._waiting = self._waiting, []
            try:
                await self._publish(changes)
            except UNAVAILABLE as error:
                log.debug("lost a cache event: %r", error)
                self._lost = True
            await wait_at_most(self._wake, RETRY_SECONDS)
            self._wake.clear()

    async def _publish(self, changes: list[CacheChange]) -> None:
        self._since_snapshot += len(changes)
        if self._lost or self._since_snapshot > SNAPSHOT_EVERY:
            snapshot = self._mac.seal(msgspec.msgpack.encode(self._snapshot()))
            self._since_snapshot, self._lost = 0, False
            if len(snapshot) <= self._client.max_payload // 2:
                await self._client.publish(self._subject, snapshot, headers=ROLL_UP)
                return
            # Too large for a message: a subscriber that misses an event asks the worker.
        for change in changes:
            sealed = self._mac.seal(msgspec.msgpack.encode(change))
            await self._client.publish(self._subject, sealed)


class NatsSubscriber:
    def __init__(self, client: Client, namespace: str, secret: str) -> None:
        self._client = client
        self._namespace = namespace
        self._secret = secret
        self._limited = RateLimitedLog(log, "events_unreadable")
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(
        self, worker: str, epoch: int, address: str, on_change: OnChange
    ) -> Callable[[], None]:
        task = asyncio.create_task(
            self._receive(_subject(self._namespace, worker, epoch), on_change)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        log_failure(task, log, f"the frontend receives no cache events of worker {worker} any more")

        def unsubscribe() -> None:
            task.cancel()

        return unsubscribe

    async def close(self) -> None:
        await asyncio.gather(*map(cancel_and_wait, list(self._tasks)))

    async def _receive(self, subject: str, on_change: OnChange) -> None:
        mac = _mac(self._secret, subject)

        async def take(message: Msg) -> None:
            event = mac.open(message.data)
            try:
                if event is not None:
                    on_change(_decode(event))
                    return
            except msgspec.MsgspecError:
                pass
            # The next number shows the gap.
            self._limited.warning(
                "events_unreadable", "dropped an event that is forged or cannot be decoded"
            )

        while True:
            before = self._client.stats["reconnects"]
            await _ensure_stream(self._client, self._namespace)
            try:
                # From the stream's start: the receiver skips events that it knows, by number.
                subscription = await self._client.jetstream().subscribe(
                    subject, cb=take, ordered_consumer=True
                )
            except UNAVAILABLE as error:
                log.debug("cannot subscribe to cache events yet: %r", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                # A restarted server may have lost the subscription.
                while self._client.stats["reconnects"] == before:  # noqa: ASYNC110
                    await asyncio.sleep(RETRY_SECONDS)
            finally:
                with contextlib.suppress(*UNAVAILABLE):
                    await subscription.unsubscribe()


async def _ensure_stream(client: Client, namespace: str) -> None:
    """Create the namespace's stream, however long it takes; another process may be first."""
    config = StreamConfig(
        name=_stream(namespace),
        subjects=[f"triptych.{namespace}.cache.>"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=STREAM_BYTES,
        max_age=STREAM_SECONDS,
        allow_rollup_hdrs=True,
    )
    while True:
        try:
            await client.jetstream().add_stream(config)
            return
        except BadRequestError:  # it exists with the operator's own limits
            return
        except UNAVAILABLE as error:
            log.debug("cannot create the stream of cache events yet: %r", error)
        await asyncio.sleep(RETRY_SECONDS)


def _mac(secret: str, subject: str) -> MessageMac:
    return MessageMac(secret, "cache events", subject)


def _stream(namespace: str) -> str:
    return f"triptych_{namespace}_cache"


def _subject(namespace: str, worker: str, epoch: int) -> str:
    return f"triptych.{namespace}.cache.{worker.replace('.', '_')}.{epoch}"
