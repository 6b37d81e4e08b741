"""A connection to NATS with our defaults: it comes back by itself, for ever and fast.

User and password, or a token, come from the environment, or all of it from a credentials file.
What is said over the connection is not known here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, StartError, install_hint
from triptych.runtime.concurrency import cancel_and_wait

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

START_SECONDS = 10.0  # it may be started at the same time as we are
PACE: dict[str, Any] = {
    "connect_timeout": 2.0,
    "reconnect_time_wait": 0.25,
    "max_reconnect_attempts": -1,
    "ping_interval": 1.0,
    "max_outstanding_pings": 2,  # unanswered: the connection is dead, whatever TCP says
}
CLOSE_SECONDS = 2.0
REFUSED = ("authorization", "authentication")  # words of a server that we need not ask again


class NatsOptions(Struct, frozen=True):
    """Where NATS is, and the files by which both sides know each other."""

    servers: tuple[str, ...]
    credentials: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def secured(self) -> bool:
        """Whether TLS is demanded: a server that does not offer it is not talked to."""
        return bool(self.ca or self.cert) or any(s.startswith("tls:") for s in self.servers)


def nats_options(config: Config) -> NatsOptions:
    return NatsOptions(
        config.servers,
        config.nats_credentials,
        config.nats_ca,
        config.nats_cert,
        config.nats_key,
    )


async def connect(options: NatsOptions, name: str, *, aloud: bool = True) -> Client:
    """Connect, or say what to mend. ``name`` is shown in what NATS tells of its clients. Of several
    connections of a process, one says ``aloud`` when NATS is away."""
    client = _client(options)
    told, proofs = _Told(client, ", ".join(options.servers), aloud), _proofs(options)
    try:
        async with asyncio.timeout(START_SECONDS):
            await client.connect(
                list(options.servers),
                name=f"triptych {name}",
                error_cb=told.error,
                disconnected_cb=told.disconnected,
                reconnected_cb=told.reconnected,
                **PACE,
                **proofs,
            )
    except TimeoutError:
        await close(client)
        raise StartError(
            f"NATS at {told.servers} cannot be reached within {START_SECONDS:.0f} s: {told.last}. "
            "Is it running (`nats-server -js`), and is --join right?"
        ) from None
    except BaseException:
        await close(client)
        raise
    told.starting = False
    return client


async def close(client: Client) -> None:
    """Close the connection; one that does not answer is left."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            if (returning := client._reconnection_task) is not None:
                await cancel_and_wait(
                    returning
                )  # which nats-py tells but once, and goes on for ever if lost
            await client.close()
    except (OSError, TimeoutError) as error:
        log.info("NATS was left without a farewell: %s", error)


def _client(options: NatsOptions) -> Client:
    try:
        from nats.aio.client import Client
        from nats.errors import Error
    except ModuleNotFoundError:
        raise InvalidConfig(
            f"nats-py is missing, which --join needs. {install_hint('cluster')}"
        ) from None
    if not options.secured:
        return Client()

    class Secured(Client):
        """Sends nothing, least of all a password, to a server that does not offer TLS."""

        def _connect_command(self) -> bytes:
            if not self._server_info.get("tls_required"):
                raise Error("the server does not offer TLS, which --join or --nats-ca demands")
            return super()._connect_command()

    return Secured()


def _proofs(options: NatsOptions) -> dict[str, Any]:
    """What shows who we are, and who the server must be."""
    proofs: dict[str, Any] = {}
    if options.credentials:
        _readable(options.credentials, "--nats-credentials")
        if importlib.util.find_spec("nkeys") is None:  # which nats-py loads while it connects
            raise InvalidConfig(
                f"nkeys is missing, which --nats-credentials needs. {install_hint('cluster')}"
            )
        proofs["user_credentials"] = options.credentials
    elif token := os.environ.get("TRIPTYCH_NATS_TOKEN"):
        proofs["token"] = token
    elif user := os.environ.get("TRIPTYCH_NATS_USER"):
        proofs |= {"user": user, "password": os.environ.get("TRIPTYCH_NATS_PASSWORD", "")}
    if options.secured:
        proofs["tls"] = _tls(options)
    return proofs


def _tls(options: NatsOptions) -> ssl.SSLContext:
    for path, flag in (
        (options.ca, "--nats-ca"),
        (options.cert, "--nats-cert"),
        (options.key, "--nats-key"),
    ):
        if path:
            _readable(path, flag)
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.cert:
            context.load_cert_chain(options.cert, options.key or None)
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"--nats-ca, --nats-cert or --nats-key cannot be used: {error.reason or error}"
        ) from None
    return context


def _readable(path: str, flag: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidConfig(f"{flag} {path} cannot be read: {error.strerror}") from None


class _Told:
    """What nats-py tells of a connection, in our words and not over and over."""

    def __init__(self, client: Client, servers: str, aloud: bool) -> None:
        self.servers = servers
        self._client = client
        self._level = logging.WARNING if aloud else logging.INFO
        self.starting = True
        self.last = "no answer"

    async def error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        again, self.last = text == self.last, text
        if self.starting:
            self._refuse(error)
            return
        refused = any(word in text.lower() for word in REFUSED)
        away = not self._client.is_connected or _breaks(error)  # which is told once, below
        known = again or (away and not refused)
        log.log(logging.DEBUG if known else self._level, "NATS: %s", text)

    def _refuse(self, error: Exception) -> None:
        """Some errors no patience mends. Raised here, they end the attempt to connect."""
        if isinstance(error, ssl.SSLCertVerificationError):
            raise StartError(
                f"the certificate of NATS at {self.servers} is not trusted: "
                f"{error.verify_message}. Name its CA with --nats-ca."
            )
        if any(word in str(error).lower() for word in REFUSED):
            raise StartError(
                f"NATS at {self.servers} refused us ({error}). Set TRIPTYCH_NATS_USER and "
                "TRIPTYCH_NATS_PASSWORD, or TRIPTYCH_NATS_TOKEN, or name a file with "
                "--nats-credentials."
            )

    async def disconnected(self) -> None:
        if not self._client.is_closed:  # by us
            log.log(self._level, "NATS at %s is away", self.servers)

    async def reconnected(self) -> None:
        self.last = ""
        log.log(self._level, "NATS is back")


def _breaks(error: Exception) -> bool:
    """Whether an error ends the connection that it came over."""
    from nats.errors import StaleConnectionError, UnexpectedEOF

    return isinstance(error, OSError | UnexpectedEOF | StaleConnectionError)
