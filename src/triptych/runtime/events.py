"""The event plane: workers publish the changes of their prefix caches, frontends subscribe.

Without one (the default), a frontend keeps a call open to each worker (WatchCache). Over ZMQ a
worker publishes once for all frontends. Over NATS the events also stay in a stream, from which a
new frontend catches up without asking the worker. Either may lose an event: changes are numbered,
and a subscriber that misses one asks the worker for a snapshot. Events only guide routing: a late,
repeated or lost one changes no token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.config import Config
from triptych.errors import InvalidConfig, install_hint
from triptych.messages import CacheChange
from triptych.runtime.planes import Planes

OnChange = Callable[[CacheChange], None]
Snapshot = Callable[[], CacheChange]  # all blocks that the worker's cache holds now


class EventPublisher(Protocol):
    """The worker's side."""

    @property
    def address(self) -> str:
        """Where to subscribe, for the worker's record in discovery."""

    def publish(self, change: CacheChange) -> None:
        """Never blocks and never raises: an event that cannot be sent is lost."""

    async def close(self) -> None: ...


class EventSubscriber(Protocol):
    """The frontend's side, for all workers."""

    def subscribe(
        self, worker: str, epoch: int, address: str, on_change: OnChange
    ) -> Callable[[], None]:
        """Call ``on_change`` with each event of this incarnation; returns how to stop that."""

    async def close(self) -> None: ...


def open_publisher(
    config: Config, planes: Planes, secret: str, worker: str, epoch: int, snapshot: Snapshot
) -> EventPublisher | None:
    """The publisher of the configured plane; None: frontends keep a call open instead."""
    if config.event_plane == "zmq":
        _check_zmq()
        from triptych.runtime.zmq_events import ZmqPublisher

        return ZmqPublisher(config.worker_host, secret, worker, epoch)
    if config.event_plane == "nats" and planes.client is not None:
        from triptych.runtime.nats_events import NatsPublisher

        return NatsPublisher(planes.client, config.namespace, secret, worker, epoch, snapshot)
    return None


def open_subscriber(config: Config, planes: Planes, secret: str) -> EventSubscriber | None:
    """The subscriber of the configured plane; None: keep a call open to each worker instead."""
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
            f"--event-plane zmq needs pyzmq, which is not installed. {install_hint('cluster')}"
        ) from None
    if not zmq.has("curve"):
        raise InvalidConfig(
            "--event-plane zmq needs libzmq with CURVE, which this pyzmq lacks. "
            "Install pyzmq from its wheel: pip install --force-reinstall pyzmq"
        )
