"""The request plane nats: connections over the subjects of a NATS server.

For workers that callers cannot reach, or that are reached through NATS alone. The caller chooses a
name for the connection: its messages go to ``<worker's subject>.<name>`` and the worker's to
``<worker's subject>.<name>.back``. A worker takes all of its own with one subscription. Whoever may
use these subjects can read what is said: the rights of NATS are what keeps others out of them.

NATS itself tells when nobody takes a message: so a worker that dies is noticed soon.
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

SCHEME = "nats://"
_BACK = ".back"

_Make = Callable[[], asyncio.BufferedProtocol]


class _Post:
    """What a process sends to NATS."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def breaks(self) -> int | None:
        return self._client.stats["reconnects"] if self._client.is_connected else None

    async def send(self, subject: str, message: bytes, reply: str = "") -> None:
        try:
            await self._client.publish(subject, message, reply)
        except OutboundBufferLimitError:
            pass  # the way is broken: the stream sends it again
        except Error as error:
            raise ConnectionError(f"NATS: {error}") from error

    def soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this without anyone waiting for it; if it cannot be done, it is not."""

        async def try_it() -> None:
            with contextlib.suppress(OSError, Error):
                await work

        task = asyncio.get_running_loop().create_task(try_it())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Poster:
    """How one stream sends."""

    def __init__(self, post: _Post, there: str, here: str, forget: Callable[[], None]) -> None:
        self._post = post
        self._there = there
        self._here = here  # where NATS tells us that nobody is there
        self._forget = forget

    @property
    def breaks(self) -> int | None:
        return self._post.breaks

    async def post(self, message: bytes) -> None:
        await self._post.send(self._there, message, self._here)

    def leave(self, message: bytes) -> None:
        self._post.soon(self._post.send(self._there, message))
        self._forget()


class _Listening:
    """The subject of a worker, and the connections that came there."""

    def __init__(self, post: _Post, subject: str, make: _Make) -> None:
        self.address = SCHEME + subject
        self.binding = b""
        self._post = post
        self._make = make
        self._streams: dict[str, ReliableStream] = {}
        self._refusing = False
        self._subscription: Subscription | None = None

    async def start(self, client: Client, subject: str) -> None:
        self._subscription = await client.subscribe(f"{subject}.*", cb=self._take)
        # The server must know of it before anyone hears of the address. The client's ping overtakes
        # what it has not written yet, but not what it had written when the last one came back.
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

    async def _take(self, message: Msg) -> None:
        here, data = message.subject, message.data
        found = self._streams.get(here)
        if found is None and stream.opens(data) and not self._refusing:
            poster = _Poster(self._post, here + _BACK, here, lambda: self._forget(here))
            found = self._streams[here] = ReliableStream(self._make(), poster, opens=False)
        if found is not None:
            found.take(data)
        elif (answer := stream.gone(data)) is not None:
            self._post.soon(self._post.send(here + _BACK, answer))

    def _forget(self, here: str) -> None:
        self._streams.pop(here, None)


class NatsPlane:
    """Addresses are ``nats://`` and the subject of an incarnation of a worker."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._post = _Post(client)

    async def listen(self, make: _Make, place: ListenAddress) -> _Listening:
        subject = Endpoint(self._namespace, place.worker, GENERATE).subject(place.epoch)
        listening = _Listening(self._post, subject, make)
        await listening.start(self._client, subject)
        return listening

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        if not self._client.is_connected:
            raise ConnectionError("NATS is away")
        there = f"{address.removeprefix(SCHEME)}.{secrets.token_hex(16)}"
        here = there + _BACK
        streams: list[ReliableStream] = []

        async def take(message: Msg) -> None:
            for one in streams:
                one.take(message.data)

        try:
            subscription = await self._client.subscribe(here, cb=take)
        except Error as error:
            raise ConnectionError(f"NATS: {error}") from error

        def forget() -> None:
            self._post.soon(subscription.unsubscribe())

        protocol = make()
        streams.append(
            ReliableStream(protocol, _Poster(self._post, there, here, forget), opens=True)
        )
        return protocol


def open_plane(tls: object, client: Client, namespace: str) -> NatsPlane:
    """NATS has its own TLS."""
    return NatsPlane(client, namespace)
