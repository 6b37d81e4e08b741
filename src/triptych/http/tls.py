"""TLS towards clients (``--tls-cert``, ``--tls-key``): the certificate, and its replacement.

Connections that exist keep the certificate that they began with. The TLS between frontend and
workers is another: see ``runtime.planes.tls``.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.runtime.file_watch import FileWatch

log = logging.getLogger(__name__)
# Forward secrecy and authenticated encryption only; TLS 1.3 has ciphers of its own.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class ServerCertificate:
    """The certificate that new connections get. Raises InvalidConfig if it cannot be used."""

    def __init__(self, cert: str, key: str = "") -> None:
        self._cert, self._key = cert, key or cert
        self.watch = FileWatch((cert, key or cert), self._reload)  # before the files are read
        self.context = load_certificate(self._cert, self._key)

    async def _reload(self) -> None:
        """A new context for new connections; a broken one would serve nobody."""
        try:
            self.context = await asyncio.to_thread(load_certificate, self._cert, self._key)
        except InvalidConfig as error:
            log.error("the new certificate is not used, the old one stays: %s", error)
        else:
            log.info("new connections get the new certificate in %s", self._cert)


def server_certificate(config: Config) -> ServerCertificate | None:
    """The certificate of the config; None: the server speaks plain HTTP."""
    if config.tls_cert:
        return ServerCertificate(config.tls_cert, config.tls_key)
    if config.tls_key:
        raise InvalidConfig("--tls-key needs the certificate: set --tls-cert")
    return None


def load_certificate(cert: str, key: str) -> ssl.SSLContext:
    """The context of a server with this certificate chain and key, both PEM."""
    for flag, path, begin in (
        ("--tls-cert", cert, "-----BEGIN CERTIFICATE-----"),
        ("--tls-key", key, "PRIVATE KEY-----"),
    ):
        _check_pem(flag, path, begin)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION  # it would cost the server more than the client
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key in {key} is not that of the first certificate in {cert}"
        else:
            why = f"OpenSSL cannot read {cert} or {key}: {error.reason or error}"
        raise InvalidConfig(f"--tls-cert and --tls-key cannot be used: {why}") from None
    except OSError as error:
        raise InvalidConfig(f"--tls-cert and --tls-key cannot be read: {error}") from None
    return context


def _check_pem(flag: str, path: str, begin: str) -> None:
    try:
        text = Path(path).read_text("latin-1")
    except OSError as error:
        raise InvalidConfig(f"{flag} {path} cannot be read: {error.strerror}") from None
    if begin not in text and flag == "--tls-key" and "-----BEGIN CERTIFICATE-----" in text:
        raise InvalidConfig(
            f"{path} holds certificates but no private key: set --tls-key to the file with the key"
        )
    if begin not in text:
        raise InvalidConfig(f"{flag} {path} is not PEM: it has no line with '{begin}'")


def _refuse_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise InvalidConfig(
        "--tls-key is encrypted: give a key without a password, as `openssl pkey -in KEY -out NEW` "
        "writes one"
    )
