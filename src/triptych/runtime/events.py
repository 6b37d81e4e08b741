"""The event plane: what a worker tells everybody of its prefix cache, without being asked.

By default nothing stands here: whoever wants to know keeps a call open (WatchCache). Over ZMQ a
worker tells once, however many frontends listen; over NATS what it told stays in a stream besides,
so that a new frontend catches up without the worker. On either an event may be lost; changes are
numbered, and who misses one asks the worker for the whole. For routing alone: nothing that is told
here, late, twice or never, changes a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.config import Config
from triptych.errors import InvalidConfig, install_hint
from triptych.messages import CacheChange
from triptych.runtime.planes import Planes

OnChange = Callable[[CacheChange], None]
Snapshot = Callable[[], CacheChange]  # all that a worker's cache holds now


class EventPublisher(Protocol):
    """A worker's end."""

    @property
    def address(self) -> str:
        """For its record in discovery."""

    def tell(self, change: CacheChange) -> None:
        """Never blocks, and never fails: what can't be sent is lost."""

    async def close(self) -> None: ...


class EventSubscriber(Protocol):
    """A frontend's end, for all its workers."""

    def follow(self, worker: str, epoch: int, address: str, hear: OnChange) -> Callable[[], None]:
        """Hear what this incarnation tells, until the function that is given back is called."""

    async def close(self) -> None: ...


def open_publisher(
    config: Config, planes: Planes, secret: str, worker: str, epoch: int, whole: Snapshot
) -> EventPublisher | None:
    """As the config says; None: whoever wants to know keeps a call open."""
    if config.event_plane == "zmq":
        _check_zmq()
        from triptych.runtime.zmq_events import ZmqPublisher

        return ZmqPublisher(config.worker_host, secret, worker, epoch)
    if config.event_plane == "nats" and planes.client is not None:
        from triptych.runtime.nats_events import NatsPublisher

        return NatsPublisher(planes.client, config.namespace, secret, worker, epoch, whole)
    return None


def open_subscriber(config: Config, planes: Planes, secret: str) -> EventSubscriber | None:
    if config.event_plane == "zmq":
        _check_zmq()
        from triptych.runtime.zmq_events import ZmqSubscriber

        return ZmqSubscriber(secret)
    if config.event_plane == "nats" and planes.client is not None:
        from triptych.runtime.nats_events import NatsSubscriber

        return NatsSubscriber(planes.client, config.namespace, secret)
    return None


def _check_zmq() -> None:
    try:
        import zmq
    except ImportError:
        raise InvalidConfig(
            f"pyzmq is missing, which --event-plane zmq needs. {install_hint('cluster')}"
        ) from None
    if not zmq.has("curve"):
        raise InvalidConfig("--event-plane zmq needs a ZMQ that was built with CURVE")
