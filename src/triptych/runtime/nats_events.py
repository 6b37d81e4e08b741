"""Events over NATS: told into a stream of the namespace, which keeps them for who comes later.

Each incarnation of a worker has a subject. From time to time it tells the whole, which sweeps what
stood there before (a roll-up), so that the stream stays small and a listener that begins at its
start has everything in a few messages. Nothing waits for an acknowledgement: what is lost while the
server is away is missed by number, and the worker is asked for the whole. Each message has a tag
from the cluster secret: who can write to the stream, and does not know it, is not heard.
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
from triptych.runtime.concurrency import log_failure
from triptych.runtime.events import OnChange, Snapshot

log = logging.getLogger(__name__)
SWEEP_EVERY = 500  # changes after which the whole is told
AGAIN_SECONDS = 1.0  # before a stream that can't be had is asked for once more
MOST_BYTES = 256 << 20  # of a namespace's stream
KEPT_SECONDS = 24 * 3600.0  # what nobody has swept for so long is of a worker long gone
SWEEPING = {"Nats-Rollup": "sub"}
AWAY = (Error, OSError, TimeoutError)  # the server is, or has no leader yet

_decode = msgspec.msgpack.Decoder(CacheChange).decode


class NatsPublisher:
    address = "nats"  # the stream and the subject follow from who tells

    def __init__(
        self, client: Client, namespace: str, secret: str, worker: str, epoch: int, whole: Snapshot
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._subject = _subject(namespace, worker, epoch)
        self._mac = _mac(secret, self._subject)
        self._whole = whole
        self._since = 0  # changes since the whole was told
        self._lost = True  # something was not sent: the whole is due
        self._ready = False
        self._waiting: list[CacheChange] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._send())
        log_failure(self._task, log, "what is cached here is not told any more")

    def tell(self, change: CacheChange) -> None:
        if not self._ready or len(self._waiting) > SWEEP_EVERY:
            self._lost = True  # the whole will have it
        else:
            self._waiting.append(change)
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        stream = self._client.jetstream()
        with contextlib.suppress(*AWAY):  # the stream forgets it by itself, in time
            async with asyncio.timeout(AGAIN_SECONDS):
                await stream.purge_stream(_stream(self._namespace), subject=self._subject)

    async def _send(self) -> None:
        await _make_stream(self._client, self._namespace)
        self._ready = True
        reconnects = self._client.stats["reconnects"]
        while True:
            if self._client.stats["reconnects"] != reconnects:
                reconnects = self._client.stats["reconnects"]
                await _make_stream(self._client, self._namespace)  # it may have come back empty
                self._lost = True
            changes, self._waiting = self._waiting, []
            try:
                await self._publish(changes)
            except AWAY as error:
                log.debug("an event is lost: %r", error)
                self._lost = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    async def _publish(self, changes: list[CacheChange]) -> None:
        self._since += len(changes)
        if self._lost or self._since > SWEEP_EVERY:
            whole = self._mac.seal(msgspec.msgpack.encode(self._whole()))
            self._since, self._lost = 0, False
            if len(whole) <= self._client.max_payload // 2:
                await self._client.publish(self._subject, whole, headers=SWEEPING)
                return
            # Too large to be told: who misses something by its number asks us.
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

    def follow(self, worker: str, epoch: int, address: str, hear: OnChange) -> Callable[[], None]:
        task = asyncio.create_task(self._follow(_subject(self._namespace, worker, epoch), hear))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        log_failure(task, log, f"what worker {worker} has cached is not heard any more")

        def leave() -> None:
            task.cancel()

        return leave

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, subject: str, hear: OnChange) -> None:
        mac = _mac(self._secret, subject)

        async def take(message: Msg) -> None:
            event = mac.open(message.data)
            try:
                if event is not None:
                    hear(_decode(event))
                    return
            except msgspec.MsgspecError:
                pass
            # The number of the next one shows that it is missing.
            self._limited.warning("events_unreadable", "an event is forged or can't be read")

        while True:
            before = self._client.stats["reconnects"]
            await _make_stream(self._client, self._namespace)
            try:
                # From the stream's start; what was heard before is known by its number.
                heard = await self._client.jetstream().subscribe(
                    subject, cb=take, ordered_consumer=True
                )
            except AWAY as error:
                log.debug("events can't be followed yet: %r", error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            try:
                # A server that comes back may have forgotten who listens.
                while self._client.stats["reconnects"] == before:  # noqa: ASYNC110
                    await asyncio.sleep(AGAIN_SECONDS)
            finally:
                with contextlib.suppress(*AWAY):
                    await heard.unsubscribe()


async def _make_stream(client: Client, namespace: str) -> None:
    """Have the namespace's stream, however long it takes: others may be there first."""
    config = StreamConfig(
        name=_stream(namespace),
        subjects=[f"triptych.{namespace}.cache.>"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=MOST_BYTES,
        max_age=KEPT_SECONDS,
        allow_rollup_hdrs=True,
    )
    while True:
        try:
            await client.jetstream().add_stream(config)
            return
        except BadRequestError:  # it is there with another limit: the operator's
            return
        except AWAY as error:
            log.debug("the stream of events can't be had yet: %r", error)
        await asyncio.sleep(AGAIN_SECONDS)


def _mac(secret: str, subject: str) -> MessageMac:
    return MessageMac(secret, "cache events", subject)


def _stream(namespace: str) -> str:
    return f"triptych_{namespace}_cache"


def _subject(namespace: str, worker: str, epoch: int) -> str:
    return f"triptych.{namespace}.cache.{worker.replace('.', '_')}.{epoch}"
