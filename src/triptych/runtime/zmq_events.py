"""Events over ZMQ: a worker publishes at an address of its own, every frontend subscribes.

Both ends derive the key of the worker's socket from the cluster secret (CURVE), so that whoever
does not know it hears nothing and can't speak in a worker's name.
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
BEAT_SECONDS = 1.0
MOST_WAITING = 10_000  # events that wait for a listener before it misses some

_decode = msgspec.msgpack.Decoder(CacheChange).decode


class ZmqPublisher:
    def __init__(self, host: str, secret: str, worker: str, epoch: int) -> None:
        self._flags = zmq.NOBLOCK
        self._topic = _topic(worker, epoch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        public, own = _keys(secret)
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = own, public
        where = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{where}")
        self.address = f"tcp://{join_host_port(host, port)}"
        self._last = 0  # number that was told
        self._beating = asyncio.create_task(self._beat())
        log_failure(self._beating, log, "the last of what is cached here may not be heard")

    def tell(self, change: CacheChange) -> None:
        self._last = change.sequence
        # To a listener that can't follow, a PUB socket drops events by itself.
        self._socket.send_multipart([self._topic, msgspec.msgpack.encode(change)], self._flags)

    async def close(self) -> None:
        await cancel_and_wait(self._beating)
        self._context.destroy(linger=0)

    async def _beat(self) -> None:
        """Tell the last number again and again: whoever missed that change, as one does whose
        connection was not there yet, would else not know before the next."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._last:
                self.tell(CacheChange(self._last))


class ZmqSubscriber:
    def __init__(self, secret: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.IPV6, 1)
        public, _ = _keys(secret)
        self._socket.curve_serverkey = public
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._hear: dict[bytes, OnChange] = {}
        self._limited = RateLimitedLog(log, "events_unreadable")
        self._task = asyncio.create_task(self._listen())
        log_failure(self._task, log, "what workers have cached is not heard any more")

    def follow(self, worker: str, epoch: int, address: str, hear: OnChange) -> Callable[[], None]:
        topic = _topic(worker, epoch)
        self._hear[topic] = hear
        self._socket.subscribe(topic)
        self._socket.connect(address)

        def leave() -> None:
            if self._hear.pop(topic, None) is not None and not self._socket.closed:
                self._socket.unsubscribe(topic)
                self._socket.disconnect(address)

        return leave

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            topic, *rest = await self._socket.recv_multipart()
            hear = self._hear.get(topic)
            if hear is None or len(rest) != 1:
                continue
            try:
                change = _decode(rest[0])
            except msgspec.MsgspecError:  # the next one's number shows that it is missing
                self._limited.warning("events_unreadable", "an event can't be read")
                continue
            hear(change)


def _topic(worker: str, epoch: int) -> bytes:
    return f"{worker}/{epoch}/".encode()  # ends: no topic is the beginning of another


def _keys(secret: str) -> tuple[bytes, bytes]:
    """Public and secret key of every worker's socket, as ZMQ writes them."""
    seed = hashlib.blake2b(secret.encode(), person=b"triptych events", digest_size=32).digest()
    own = zmq.utils.z85.encode(seed)
    return zmq.curve_public(own), own
