"""The request plane nats: connections over the subjects of a NATS server.

For workers that callers cannot connect to. The caller chooses a name for the connection: its
messages go to ``<worker's subject>.<name>`` and the worker's to ``<worker's subject>.<name>.back``.
One subscription of a worker covers all its connections. Anyone who may use these subjects can read
the messages: restrict them with the permissions of NATS.

NATS reports messages that nobody receives, so a dead worker is noticed soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, OutboundBufferLimitError

from triptych.runtime.discovery import GENERATE, Endpoint
from triptych.runtime.planes import stream
from triptych.runtime.planes.base import ListenAddress, P
from triptych.runtime.planes.stream import ReliableStream

NATS_SCHEME = "nats://"
_BACK = ".back"

_Make = Callable[[], asyncio.BufferedProtocol]


class _Publisher:
    """Sends the messages of this process to NATS."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reconnects(self) -> int | None:
        return self._client.stats["reconnects"] if self._client.is_connected else None

    async def send(self, subject: str, message: bytes, reply: str = "") -> None:
        try:
            await self._client.publish(subject, message, reply)
        except OutboundBufferLimitError:
            pass  # disconnected: the stream sends it again
        except Error as error:
            raise ConnectionError(f"NATS: {error}") from error

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the background and ignore its failure."""

        async def run() -> None:
            with contextlib.suppress(OSError, Error):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _StreamSender:
    """Sends the messages of one stream."""

    def __init__(
        self, publisher: _Publisher, to: str, here: str, forget: Callable[[], None]
    ) -> None:
        self._publisher = publisher
        self._to = to
        self._here = here  # where NATS reports that nobody receives
        self._forget = forget

    @property
    def reconnects(self) -> int | None:
        return self._publisher.reconnects

    async def send(self, message: bytes) -> None:
        await self._publisher.send(self._to, message, self._here)

    def close(self, message: bytes) -> None:
        self._publisher.in_background(self._publisher.send(self._to, message))
        self._forget()


class _SubjectListener:
    """The subject of a worker, and its connections."""

    def __init__(self, publisher: _Publisher, subject: str, make: _Make) -> None:
        self.address = NATS_SCHEME + subject
        self.binding = b""
        self._publisher = publisher
        self._make = make
        self._streams: dict[str, ReliableStream] = {}
        self._refusing = False
        self._subscription: Subscription | None = None

    async def start(self, client: Client, subject: str) -> None:
        self._subscription = await client.subscribe(f"{subject}.*", cb=self._receive)
        # The server must know the subscription before the address is announced. The client's ping
        # overtakes what it has not written yet, but not what it wrote before the previous pong.
        await client.flush()
        await client.flush()

    def refuse(self) -> None:
        self._refusing = True

    async def close(self) -> None:
        self._refusing = True
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            with contextlib.suppress(Error):  # the connection is closed already
                await subscription.unsubscribe()

    async def _receive(self, message: Msg) -> None:
        here, data = message.subject, message.data
        found = self._streams.get(here)
        if found is None and stream.opens(data) and not self._refusing:
            sender = _StreamSender(self._publisher, here + _BACK, here, lambda: self._forget(here))
            found = self._streams[here] = ReliableStream(self._make(), sender, opens=False)
        if found is not None:
            found.receive(data)
        elif (answer := stream.gone_message(data)) is not None:
            self._publisher.in_background(self._publisher.send(here + _BACK, answer))

    def _forget(self, here: str) -> None:
        self._streams.pop(here, None)


class NatsPlane:
    """Addresses are ``nats://`` and the subject of an incarnation of a worker."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._publisher = _Publisher(client)

    async def listen(self, make: _Make, address: ListenAddress) -> _SubjectListener:
        subject = Endpoint(self._namespace, address.worker, GENERATE).subject(address.epoch)
        listener = _SubjectListener(self._publisher, subject, make)
        await listener.start(self._client, subject)
        return listener

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        if not self._client.is_connected:
            raise ConnectionError("NATS is away")
        to = f"{address.removeprefix(NATS_SCHEME)}.{secrets.token_hex(16)}"
        here = to + _BACK
        streams: list[ReliableStream] = []

        async def receive(message: Msg) -> None:
            for one in streams:
                one.receive(message.data)

        try:
            subscription = await self._client.subscribe(here, cb=receive)
        except Error as error:
            raise ConnectionError(f"NATS: {error}") from error

        def forget() -> None:
            self._publisher.in_background(subscription.unsubscribe())

        protocol = make()
        streams.append(
            ReliableStream(protocol, _StreamSender(self._publisher, to, here, forget), opens=True)
        )
        return protocol


def open_plane(tls: object, client: Client, namespace: str) -> NatsPlane:
    """Ignores ``tls``: NATS has its own."""
    return NatsPlane(client, namespace)
