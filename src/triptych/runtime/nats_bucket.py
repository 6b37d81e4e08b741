"""The bucket of a namespace on NATS: what stands in it, and the news of it.

Whatever keeps us from it is told as an OSError: it may pass. What entries mean, others know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.errors import TimeoutError as Silence
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

from triptych.errors import StartError
from triptych.runtime.authentication import Signer
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.lease import FORGET_SECONDS, DiscoveryEntry, KnownOutage
from triptych.runtime.nats import NatsOptions, close, connect

log = logging.getLogger(__name__)

PATIENCE = 0.4  # of a lease may an answer take: there is time for another try
RENEWED = 0.6  # of a lease, in which whoever lives has written his entry
PROBE = 0.2  # of a lease in silence, and NATS is asked whether it is there
FIRST_PROBE_SECONDS = 0.1  # there may be nothing to tell at all
IDLE_SECONDS = 30.0  # after which NATS drops what a reader left behind
KEYS = "workers."
BUCKETS = "triptych_"

_decode = msgspec.json.Decoder(DiscoveryEntry).decode


class NatsConnection:
    """One connection to NATS. It comes back by itself, and is made anew if it was closed for good
    (as a server does whose accounts have changed)."""

    def __init__(self, options: NatsOptions, name: str, client: Client) -> None:
        self._options = options
        self._name = name
        self._client = client
        self._dialling: asyncio.Task[None] | None = None
        self._left = False

    @property
    def client(self) -> Client:
        """The connection, while it stands."""
        if self._client.is_closed and self._dialling is None and not self._left:
            self._dialling = asyncio.create_task(self._dial())
        if not self._client.is_connected:
            raise KnownOutage("NATS is away")
        return self._client

    @property
    def stands(self) -> bool:
        return self._client.is_connected

    async def close(self) -> None:
        self._left = True
        if self._dialling is not None:
            await cancel_and_wait(self._dialling)
        await close(self._client)

    async def _dial(self) -> None:
        try:
            self._client = await connect(self._options, self._name)
        except StartError as error:
            log.warning("%s", error)
        finally:
            self._dialling = None


class EntryBucket:
    """The entries of one namespace, by worker.

    ``patience``: seconds that an answer may take; ``probe``: how often NATS is asked at least.
    """

    def __init__(self, line: NatsConnection, namespace: str, lease: float, secret: str) -> None:
        self._signer = Signer(secret, namespace)
        self.patience = PATIENCE * lease
        self.probe = PROBE * lease
        self._renewed = RENEWED * lease
        self._line = line
        self._name = f"{BUCKETS}{namespace}"
        self._known: tuple[Client, JetStreamContext, KeyValue] | None = None

    @property
    def connected(self) -> bool:
        return self._line.stands

    async def check(self) -> None:
        """Refuse a server that cannot keep a bucket for us."""
        try:
            await self._line.client.jetstream(timeout=self.patience).account_info()
        except (ServiceUnavailableError, Error) as error:
            raise StartError(
                f"NATS keeps no data for us ({error or type(error).__name__}): discovery needs "
                "JetStream. Start the server with `nats-server -js`, and let this user use it."
            ) from None

    async def get(self, worker_id: str) -> tuple[DiscoveryEntry, int]:
        """A worker's entry and its revision; where there is none of ours, one of epoch 0."""
        with self._reaching():
            _, bucket = await self._open()
            try:
                found = await bucket.get(KEYS + worker_id)
            except KeyNotFoundError as error:
                return DiscoveryEntry(0), (error.entry.revision or 0) if error.entry else 0
        entry, signed = self._read(worker_id, found.value or b"")
        return entry if entry is not None and signed else DiscoveryEntry(0), found.revision or 0

    async def swap(self, worker_id: str, entry: DiscoveryEntry, revision: int) -> int | None:
        """Write over this revision (0: nothing) and give the new one. None: another is there."""
        with self._reaching():
            _, bucket = await self._open()
            try:
                value = self._signer.sign(worker_id, msgspec.json.encode(entry))
                return await bucket.update(KEYS + worker_id, value, last=revision)
            except KeyWrongLastSequenceError:
                return None

    @contextlib.asynccontextmanager
    async def news(self) -> AsyncIterator[BucketUpdates]:
        """What stands in the bucket, entry by entry, and then what comes to it."""
        with self._reaching():
            stream, _ = await self._open()
            told = await stream.subscribe(
                f"$KV.{self._name}.{KEYS}>",
                stream=f"KV_{self._name}",
                config=ConsumerConfig(
                    ack_policy=AckPolicy.NONE,
                    deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                    inactive_threshold=IDLE_SECONDS,
                    mem_storage=True,
                ),
            )
            try:
                yield BucketUpdates(told, self.probe)
            finally:
                with contextlib.suppress(Error, OSError):
                    await told.unsubscribe()

    async def others(self) -> tuple[str, ...]:
        """Namespaces besides ours where entries are renewed, or that somebody reads. What those who
        left have written stays for a while: so it takes some seconds to tell."""
        with self._reaching():
            stream, _ = await self._open()
            before = await _buckets(stream)
            await asyncio.sleep(self._renewed)
            names = [
                name
                for name, written in (await _buckets(stream)).items()
                if name != self._name
                and (written != before.get(name, 0) or await _read(stream, name))
            ]
        return tuple(sorted(name.removeprefix(BUCKETS) for name in names))

    async def watched(self) -> bool:
        """Whether somebody reads it."""
        with self._reaching():
            stream, _ = await self._open()
            return await _read(stream, self._name)

    def read_message(self, message: Msg) -> tuple[str, DiscoveryEntry | None, bool, int]:
        """A worker's id, its entry (None: taken out, or unreadable), whether this cluster has
        signed that, and the revision."""
        worker_id = message.subject.partition(f".{KEYS}")[2]
        gone = KV_OP in (message.headers or {})
        entry, signed = (None, True) if gone else self._read(worker_id, message.data)
        if entry is not None and entry.record is not None and entry.record.id != worker_id:
            entry = None
        return worker_id, entry, signed, message.metadata.sequence.stream

    def _read(self, worker_id: str, value: bytes) -> tuple[DiscoveryEntry | None, bool]:
        body, signed = self._signer.open(worker_id, value)
        try:
            return _decode(body), signed
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, False

    async def _open(self) -> tuple[JetStreamContext, KeyValue]:
        """The bucket, made if there is none. One that the operator has made is taken as it is."""
        client = self._line.client
        if self._known is None or self._known[0] is not client:
            stream = client.jetstream(timeout=self.patience)
            try:
                bucket = await stream.key_value(self._name)
            except BucketNotFoundError:
                about = "workers of a Triptych cluster"
                bucket = await stream.create_key_value(
                    bucket=self._name, description=about, history=1, ttl=FORGET_SECONDS
                )
            self._known = client, stream, bucket
        return self._known[1:]

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ConnectionError("NATS closed the connection") from None  # under what waited
        except Error as error:
            if isinstance(error, NotFoundError | NoStreamResponseError):
                self._known = None  # it is lost: made anew when it is next asked for
            raise ConnectionError(f"NATS: {error or type(error).__name__}") from None


async def _buckets(stream: JetStreamContext) -> dict[str, int]:
    """All of ours on this NATS, each with the number of its last write."""
    found = {str(one.config.name): one.state.last_seq for one in await stream.streams_info()}
    prefix = f"KV_{BUCKETS}"
    return {name[3:]: last for name, last in found.items() if name.startswith(prefix)}


async def _read(stream: JetStreamContext, bucket: str) -> bool:
    """Whether anybody reads it now; NATS keeps the readers that left for a while."""
    return any(one.push_bound for one in await stream.consumers_info(f"KV_{bucket}"))


class BucketUpdates:
    """Entries as they come to a bucket."""

    def __init__(self, told: JetStreamContext.PushSubscription, probe: float) -> None:
        self._told = told
        self._probe = probe
        self._received = 0
        self._behind = 0  # silences in a row that should have been none
        self._patience = FIRST_PROBE_SECONDS

    async def next(self) -> tuple[Msg | None, bool]:
        """The next message, or None after a silence in which NATS was there; and whether more is
        on its way already."""
        try:
            message = await self._told.next_msg(self._patience)
        except Silence:
            return None, await self._asked()
        self._received += 1
        self._behind = 0
        return message, message.metadata.num_pending > 0

    async def _asked(self) -> bool:
        """Whether NATS has more for us. It fails if it is away, or does not know us any more."""
        about = await self._told.consumer_info()
        sent = about.delivered.consumer_seq if about.delivered else 0
        behind = bool(about.num_pending) or sent > self._received
        self._behind = self._behind + 1 if behind else 0
        if self._behind > 1:
            raise ConnectionError("news were lost on the way")  # and are all told again
        self._patience = self._probe
        return behind
