"""The request planes by name: tcp, http and nats, each imported when it is used.

The scheme of a worker's address names the plane: ``127.0.0.1:4711`` (tcp),
``http://10.0.0.2:4711/triptych``, or ``nats://`` and a subject. ``tls://`` and ``wss://`` are tcp
and http with TLS that ends in the worker; ``https://`` is http with TLS that ends at an ingress
before the worker, which can read what it forwards. Every plane carries the same frames (``link``).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.planes.base import ListenAddress, Plane, PlaneListener
from triptych.runtime.planes.tls import WorkerTls, worker_tls

if TYPE_CHECKING:
    from nats.aio.client import Client

__all__ = ["ListenAddress", "Plane", "PlaneListener", "Planes", "WorkerTls", "open_planes"]

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
ENCRYPTED = ""  # up to the worker itself
NO_TLS = "it offers no TLS"


class PlaneEntry(Struct, frozen=True):
    """A plane in the module of its name: which workers it reaches, and the schemes of its
    addresses, each with the reason why it is not encrypted up to the worker."""

    reaches: str
    schemes: Mapping[str, str]
    needs_nats: bool = False


PLANES = {
    "tcp": PlaneEntry("workers to which callers can connect", {"tcp": NO_TLS, "tls": ENCRYPTED}),
    "http": PlaneEntry(
        "workers behind an ingress or a load balancer",
        {
            "http": NO_TLS,
            "https": "TLS to it ends at an ingress, and there is none up to the worker",
            "wss": ENCRYPTED,
        },
    ),
    "nats": PlaneEntry(
        "workers that callers reach only through NATS",
        {"nats": "its calls go through NATS, and have no TLS up to the worker"},
        needs_nats=True,
    ),
}


class Planes:
    """The planes that this process can use. ``nats`` is its connection to a NATS server, which the
    plane nats needs. ``lost`` is set when the server has closed that connection for good. With
    ``tls`` it refuses to call workers without TLS of their own."""

    def __init__(
        self, nats: Client | None = None, namespace: str = "default", tls: WorkerTls | None = None
    ) -> None:
        self._tls = tls
        self.client = nats
        self.lost = asyncio.Event()
        self._namespace = namespace
        self._opened: dict[str, Plane] = {}

    @property
    def away(self) -> bool:
        """Whether NATS is away: nobody can be called through it now."""
        return self.client is not None and not self.client.is_connected

    async def prepare(self) -> None:
        """Create or read the certificate that a worker listens with."""
        if self._tls is not None:
            await self._tls.certificate()

    def named(self, name: str) -> Plane:
        """The plane of this name."""
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    def to(self, address: str) -> Plane:
        """The plane that leads to this address."""
        before, separator, _ = address.partition("://")
        scheme = before if separator else "tcp"
        name = next((name for name, plane in PLANES.items() if scheme in plane.schemes), scheme)
        reason = PLANES[name].schemes[scheme] if name in PLANES else NO_TLS
        if self._tls is not None and reason != ENCRYPTED:
            raise InvalidConfig(
                f"{reason}, which --worker-tls demands: start it with --worker-tls too, and with "
                "--request-plane tcp or http"
            )
        return self.named(name)

    def _open(self, name: str) -> Plane:
        if name not in PLANES:
            known = ", ".join(f"{name} ({plane.reaches})" for name, plane in PLANES.items())
            raise InvalidConfig(f"There is no request plane '{name}'. Use one of {known}.")
        if PLANES[name].needs_nats and self.client is None:
            raise InvalidConfig(
                f"The request plane {name} needs a NATS server: give its address with --join."
            )
        module = importlib.import_module(f"{__name__}.{name}")
        plane: Plane = module.open_plane(self._tls, self.client, self._namespace)
        return plane


@asynccontextmanager
async def open_planes(config: Config, name: str) -> AsyncIterator[Planes]:
    """The planes of this process, with a connection to NATS if the cluster uses it. That one is
    separate from discovery's: renewals must not wait behind calls. Discovery's logs outages."""
    tls = worker_tls(config)
    if not config.join:
        yield Planes(tls=tls)
        return
    from triptych.runtime.nats import close, connect

    client = await connect(config, name, log_outages=False)
    planes = Planes(client, config.namespace, tls)
    watching = asyncio.create_task(_watch(client, planes.lost))
    try:
        yield planes
    finally:
        await cancel_and_wait(watching)
        await close(client)


async def _watch(client: Client, lost: asyncio.Event) -> None:
    """Set ``lost`` when the connection is closed for good, as nats-py does on most errors of a
    server. Polls, since nats-py skips its callback if it cannot write the last bytes."""
    while not client.is_closed:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    log.error("NATS has closed the connection for good: %s", client.last_error)
    lost.set()
