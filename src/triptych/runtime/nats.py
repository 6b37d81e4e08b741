"""A connection to NATS with our defaults: it reconnects by itself, for ever and fast.

User and password, or a token, come from the environment, or everything from a credentials file.
Knows nothing about what is sent over the connection.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from triptych.config import Config
from triptych.errors import InvalidConfig, StartError, install_hint
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.lease import KnownOutage

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

START_SECONDS = 10.0  # NATS may be starting too
CLIENT_OPTIONS: dict[str, Any] = {
    "connect_timeout": 2.0,
    "reconnect_time_wait": 0.25,
    "max_reconnect_attempts": -1,
    "ping_interval": 1.0,
    "max_outstanding_pings": 2,  # unanswered: the connection is dead
}
CLOSE_SECONDS = 2.0
AUTHENTICATION_ERRORS = (
    "authorization",
    "authentication",
)  # words of errors that retrying does not fix


def requires_tls(config: Config) -> bool:
    """Whether a server of NATS that does not offer TLS is refused."""
    given = config.nats_ca or config.nats_cert
    return bool(given) or any(server.startswith("tls:") for server in config.servers)


async def connect(config: Config, name: str, *, log_outages: bool = True) -> Client:
    """Connect; raises StartError or InvalidConfig that says what to do. NATS lists the client under
    ``name``. Only one of the connections of a process should warn of outages."""
    client = _client(config)
    servers = ", ".join(config.servers)
    events = _ConnectionEvents(client, servers, log_outages)
    credentials = _credentials(config)
    try:
        async with asyncio.timeout(START_SECONDS):
            await client.connect(
                list(config.servers),
                name=f"triptych {name}",
                error_cb=events.error,
                disconnected_cb=events.disconnected,
                reconnected_cb=events.reconnected,
                **CLIENT_OPTIONS,
                **credentials,
            )
        events.starting = False
    except TimeoutError:
        raise StartError(
            f"NATS at {servers} cannot be reached within {START_SECONDS:.0f} s: {events.last}. "
            "Is it running (`nats-server -js`), and is --join right?"
        ) from None
    finally:
        if events.starting:
            await close(client)
    return client


async def close(client: Client) -> None:
    """Close the connection; gives up on a server that does not answer."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            if (reconnecting := client._reconnection_task) is not None:
                await cancel_and_wait(
                    reconnecting
                )  # nats-py cancels it only once, which may be lost
            await client.close()
    except (OSError, TimeoutError) as error:
        log.info("could not close the connection to NATS cleanly: %s", error)


class NatsConnection:
    """A connection to NATS that reconnects by itself, and is opened anew if the server closed it
    for good (as it does when its accounts change)."""

    def __init__(self, config: Config, name: str, client: Client) -> None:
        self._config = config
        self._name = name
        self._client = client
        self._reopening: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def client(self) -> Client:
        """The connection, while it connected."""
        if self._client.is_closed and self._reopening is None and not self._closing:
            self._reopening = asyncio.create_task(self._reopen())
        if not self._client.is_connected:
            raise KnownOutage("NATS is away")
        return self._client

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def close(self) -> None:
        self._closing = True
        if self._reopening is not None:
            await cancel_and_wait(self._reopening)
        await close(self._client)

    async def _reopen(self) -> None:
        try:
            self._client = await connect(self._config, self._name)
        except StartError as error:
            log.warning("%s", error)
        finally:
            self._reopening = None


def _client(config: Config) -> Client:
    try:
        from nats.aio.client import Client
        from nats.errors import Error
    except ModuleNotFoundError:
        raise InvalidConfig(
            f"--join needs nats-py, which is not installed. {install_hint('cluster')}"
        ) from None
    if not requires_tls(config):
        return Client()

    class Secured(Client):
        """Sends nothing, above all no password, to a server that does not offer TLS."""

        def _connect_command(self) -> bytes:
            if not self._server_info.get("tls_required"):
                raise Error("the server does not offer TLS, which --join or --nats-ca requires")
            return super()._connect_command()

    return Secured()


def _credentials(config: Config) -> dict[str, Any]:
    """Arguments of nats-py that authenticate us, and the server to us."""
    arguments: dict[str, Any] = {}
    if config.nats_credentials:
        _check_readable(config.nats_credentials, "--nats-credentials")
        if importlib.util.find_spec("nkeys") is None:  # nats-py imports it while it connects
            raise InvalidConfig(
                f"--nats-credentials needs nkeys, which is not installed. {install_hint('cluster')}"
            )
        arguments["user_credentials"] = config.nats_credentials
    elif token := os.environ.get("TRIPTYCH_NATS_TOKEN"):
        arguments["token"] = token
    elif user := os.environ.get("TRIPTYCH_NATS_USER"):
        arguments |= {"user": user, "password": os.environ.get("TRIPTYCH_NATS_PASSWORD", "")}
    if requires_tls(config):
        arguments["tls"] = _tls(config)
    return arguments


def _tls(config: Config) -> ssl.SSLContext:
    for path, flag in (
        (config.nats_ca, "--nats-ca"),
        (config.nats_cert, "--nats-cert"),
        (config.nats_key, "--nats-key"),
    ):
        if path:
            _check_readable(path, flag)
    try:
        context = ssl.create_default_context(cafile=config.nats_ca or None)
        if config.nats_cert:
            context.load_cert_chain(config.nats_cert, config.nats_key or None)
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"--nats-ca, --nats-cert or --nats-key cannot be used: {error.reason or error}"
        ) from None
    return context


def _check_readable(path: str, flag: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidConfig(f"{flag} {path} cannot be read: {error.strerror}") from None


class _ConnectionEvents:
    """Logs what nats-py reports about a connection, without repetition."""

    def __init__(self, client: Client, servers: str, log_outages: bool) -> None:
        self.servers = servers
        self._client = client
        self._level = logging.WARNING if log_outages else logging.INFO
        self.starting = True
        self.last = "no answer"

    async def error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        repeated, self.last = text == self.last, text
        if self.starting:
            self._raise_fatal(error)
            return
        refused = any(word in text.lower() for word in AUTHENTICATION_ERRORS)
        away = not self._client.is_connected or _breaks(error)  # ``disconnected`` logs that
        known = repeated or (away and not refused)
        log.log(logging.DEBUG if known else self._level, "NATS: %s", text)

    def _raise_fatal(self, error: Exception) -> None:
        """Raise errors that retrying does not fix: they end the attempt to connect."""
        if isinstance(error, ssl.SSLCertVerificationError):
            raise StartError(
                f"the certificate of NATS at {self.servers} is not trusted: "
                f"{error.verify_message}. Name its CA with --nats-ca."
            )
        if any(word in str(error).lower() for word in AUTHENTICATION_ERRORS):
            raise StartError(
                f"NATS at {self.servers} refused us ({error}). Set TRIPTYCH_NATS_USER and "
                "TRIPTYCH_NATS_PASSWORD, or TRIPTYCH_NATS_TOKEN, or name a file with "
                "--nats-credentials."
            )

    async def disconnected(self) -> None:
        if not self._client.is_closed:
            log.log(self._level, "lost the connection to NATS at %s", self.servers)

    async def reconnected(self) -> None:
        self.last = ""
        log.log(self._level, "reconnected to NATS at %s", self.servers)


def _breaks(error: Exception) -> bool:
    """Whether an error ends the connection."""
    from nats.errors import StaleConnectionError, UnexpectedEOF

    return isinstance(error, OSError | UnexpectedEOF | StaleConnectionError)
