"""One connection to a NATS server, as every user of it in a process wants it.

It comes back by itself whenever the server does. What travels over it is the users' matter. User,
password and token come from the environment, never from flags.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from triptych.errors import InvalidConfig

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

START_SECONDS = 5.0  # time for the server to answer when we start
PACE: dict[str, Any] = {
    "connect_timeout": 2.0,
    "reconnect_time_wait": 0.25,
    "max_reconnect_attempts": -1,
    "ping_interval": 1.0,
    "max_outstanding_pings": 2,  # unanswered: the connection is dead, whatever TCP says
}


class NatsOptions(Struct, frozen=True):
    """Where the server is and how to be let in; files are paths."""

    servers: tuple[str, ...]
    credentials: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""


async def connect(options: NatsOptions, name: str) -> Client:
    """Connect; ``name`` is what the server's operator sees. Raises InvalidConfig when it fails."""
    try:
        from nats.aio.client import Client
        from nats.errors import Error
    except ImportError:
        raise InvalidConfig(
            "NATS needs the package nats-py. Install it: pip install 'triptych[cluster]'."
        ) from None
    client, last = Client(), "it does not answer"

    async def failed(error: Exception) -> None:
        nonlocal last
        last = str(error) or type(error).__name__
        log.warning("NATS: %s", last)

    async def broken() -> None:
        if not client.is_closed:
            log.warning("the connection to NATS is broken: it is tried again until it stands")

    async def back() -> None:
        log.warning("the connection to NATS is back")

    try:
        async with asyncio.timeout(START_SECONDS):
            await client.connect(
                list(options.servers),
                name=name,
                error_cb=failed,
                disconnected_cb=broken,
                reconnected_cb=back,
                user=os.environ.get("TRIPTYCH_NATS_USER"),
                password=os.environ.get("TRIPTYCH_NATS_PASSWORD"),
                token=os.environ.get("TRIPTYCH_NATS_TOKEN"),
                user_credentials=options.credentials or None,
                tls=_tls(options),
                **PACE,
            )
    except (TimeoutError, OSError, ValueError, Error) as error:
        await client.close()
        why = last if isinstance(error, TimeoutError) else str(error)
        where = ", ".join(server.rpartition("@")[2] for server in options.servers)
        raise InvalidConfig(
            f"NATS cannot be used at {where}: {why}. Is the address right, "
            "and are user and password, or the token, in TRIPTYCH_NATS_USER and "
            "TRIPTYCH_NATS_PASSWORD or TRIPTYCH_NATS_TOKEN?"
        ) from None
    return client


def _tls(options: NatsOptions) -> ssl.SSLContext | None:
    """None: as the server demands it, with the system's authorities."""
    if not (options.ca or options.cert):
        return None
    context = ssl.create_default_context(cafile=options.ca or None)
    if options.cert:
        context.load_cert_chain(options.cert, options.key or None)
    return context
