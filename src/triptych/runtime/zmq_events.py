"""Events over ZMQ: each worker publishes at its own address, every frontend subscribes.

Both sides derive the CURVE key of the worker's socket from the cluster secret: without it nobody
can read the events or publish as a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from triptych.host import join_host_port
from triptych.messages import CacheChange
from triptych.observe.log import RateLimitedLog
from triptych.runtime.concurrency import cancel_and_wait, log_failure
from triptych.runtime.events import OnChange

log = logging.getLogger(__name__)
REPEAT_SECONDS = 1.0
QUEUE_LIMIT = 10_000  # events queued for a subscriber before it misses some

_decode = msgspec.msgpack.Decoder(CacheChange).decode


class ZmqPublisher:
    def __init__(self, host: str, secret: str, worker: str, epoch: int) -> None:
        self._flags = zmq.NOBLOCK
        self._topic = _topic(worker, epoch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        public, own = _keys(secret)
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = own, public
        where = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{where}")
        self.address = f"tcp://{join_host_port(host, port)}"
        self._last = 0  # number that was published
        self._repeating = asyncio.create_task(self._repeat())
        log_failure(
            self._repeating,
            log,
            "cache events are not repeated any more: frontends may miss the last one",
        )

    def publish(self, change: CacheChange) -> None:
        self._last = change.sequence
        # For a subscriber whose queue is full, a PUB socket drops events by itself.
        self._socket.send_multipart([self._topic, msgspec.msgpack.encode(change)], self._flags)

    async def close(self) -> None:
        await cancel_and_wait(self._repeating)
        self._context.destroy(linger=0)

    async def _repeat(self) -> None:
        """Repeat the last number: a subscriber that missed that change, for example because it was
        not connected yet, would otherwise notice only with the next one."""
        while True:
            await asyncio.sleep(REPEAT_SECONDS)
            if self._last:
                self.publish(CacheChange(self._last))


class ZmqSubscriber:
    def __init__(self, secret: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
        self._socket.setsockopt(zmq.IPV6, 1)
        public, _ = _keys(secret)
        self._socket.curve_serverkey = public
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._handlers: dict[bytes, OnChange] = {}
        self._limited = RateLimitedLog(log, "events_unreadable")
        self._task = asyncio.create_task(self._receive())
        log_failure(self._task, log, "the frontend receives no cache events any more")

    def subscribe(
        self, worker: str, epoch: int, address: str, on_change: OnChange
    ) -> Callable[[], None]:
        topic = _topic(worker, epoch)
        self._handlers[topic] = on_change
        self._socket.subscribe(topic)
        self._socket.connect(address)

        def unsubscribe() -> None:
            if self._handlers.pop(topic, None) is not None and not self._socket.closed:
                self._socket.unsubscribe(topic)
                self._socket.disconnect(address)

        return unsubscribe

    async def close(self) -> None:
        await cancel_and_wait(self._task)
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        while True:
            topic, *rest = await self._socket.recv_multipart()
            on_change = self._handlers.get(topic)
            if on_change is None or len(rest) != 1:
                continue
            try:
                change = _decode(rest[0])
            except msgspec.MsgspecError:  # the next number shows the gap
                self._limited.warning(
                    "events_unreadable", "cannot decode an event of a worker: dropped"
                )
                continue
            on_change(change)


def _topic(worker: str, epoch: int) -> bytes:
    return f"{worker}/{epoch}/".encode()  # the last slash: no topic is a prefix of another


def _keys(secret: str) -> tuple[bytes, bytes]:
    """The public and secret key of the workers' sockets, in Z85."""
    seed = hashlib.blake2b(secret.encode(), person=b"triptych events", digest_size=32).digest()
    own = zmq.utils.z85.encode(seed)
    return zmq.curve_public(own), own
