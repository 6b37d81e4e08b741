"""The request planes by name: tcp, http and nats, each imported when it is chosen.

The scheme of a worker's address says which plane leads there: ``127.0.0.1:4711`` (tcp),
``http://10.0.0.2:4711/triptych`` or ``nats://`` and a subject. ``tls://`` and ``wss://`` are tcp
and http with TLS that ends in the worker; ``https://`` is http with TLS that ends at an ingress
before the worker, which reads what it passes on.
What is said over a plane is the same on all of them: see requests.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.planes.base import ListenAddress, Plane, PlaneListener
from triptych.runtime.planes.tls import WorkerTls, worker_tls

if TYPE_CHECKING:
    from nats.aio.client import Client

__all__ = ["ListenAddress", "Plane", "PlaneListener", "Planes", "WorkerTls", "open_planes"]

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
_SCHEMES = {"https": "http", "wss": "http", "tls": "tcp"}
_ENCRYPTED = ("tls", "wss")  # up to the worker itself
_PLAIN = {
    "https": "TLS to it ends at an ingress, and there is none up to the worker",
    "nats": "its calls go through NATS, and have no TLS up to the worker",
}
_GIVE = "start it with --worker-tls too, and with --request-plane tcp or http"
_MODULES = {name: f"triptych.runtime.planes.{name}" for name in ("tcp", "http", "nats")}


class Planes:
    """The planes that this process can use. ``nats`` is its connection to a NATS server; without it
    that plane is refused. ``lost`` is set when that connection was closed for good, not by us. With
    ``tls`` only workers that have TLS of their own are called."""

    def __init__(
        self, nats: Client | None = None, namespace: str = "default", tls: WorkerTls | None = None
    ) -> None:
        self._tls = tls
        self.client = nats
        self.lost = asyncio.Event()
        self._namespace = namespace
        self._made: dict[str, Plane] = {}

    @property
    def away(self) -> bool:
        """Whether NATS is: nobody can be called through it now."""
        return self.client is not None and not self.client.is_connected

    async def prepare(self) -> None:
        """What a worker needs to listen: its certificate is made or read, or refused."""
        if self._tls is not None:
            await self._tls.certificate()

    def named(self, name: str) -> Plane:
        """The plane of this name."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def to(self, address: str) -> Plane:
        """The plane that leads to this address."""
        scheme, there, _ = address.partition("://")
        scheme = scheme if there else "tcp"
        if self._tls is not None and scheme not in _ENCRYPTED:
            why = _PLAIN.get(scheme, "it offers no TLS")
            raise InvalidConfig(f"{why}, which --worker-tls demands: {_GIVE}")
        return self.named(_SCHEMES.get(scheme, scheme))

    def _make(self, name: str) -> Plane:
        if name not in _MODULES:
            raise InvalidConfig(f"There is no request plane '{name}', only {', '.join(_MODULES)}.")
        if name == "nats" and self.client is None:
            raise InvalidConfig(
                "The request plane nats needs a NATS server: give its address with --join."
            )
        module = importlib.import_module(_MODULES[name])
        made: Plane = module.open_plane(self._tls, self.client, self._namespace)
        return made


@asynccontextmanager
async def open_planes(config: Config, name: str) -> AsyncIterator[Planes]:
    """With a connection to NATS where the cluster is there: not discovery's own, whose renewals
    must not wait behind what is said, and which tells when NATS is away."""
    tls = worker_tls(config)
    if not config.join:
        yield Planes(tls=tls)
        return
    from triptych.runtime.nats import close, connect, nats_options

    client = await connect(nats_options(config), name, aloud=False)
    planes = Planes(client, config.namespace, tls)
    looking = asyncio.create_task(_look(client, planes.lost))
    try:
        yield planes
    finally:
        await cancel_and_wait(looking)
        await close(client)


async def _look(client: Client, lost: asyncio.Event) -> None:
    """Until the connection is closed for good, as nats-py does on most errors of a server. Its
    callback for that is not called where the last bytes can't be written."""
    while not client.is_closed:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_SECONDS)
    log.error("NATS has closed the connection for good: %s", client.last_error)
    lost.set()
