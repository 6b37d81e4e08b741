"""TLS between frontend and workers (``--worker-tls``), without certificate authorities.

A worker's certificate is its own: created when it starts, or given by files. Callers do not check
who signed it. Instead both sides put its fingerprint, as each has seen it, into the proofs of the
handshake: a proxy that terminates TLS between them has another certificate, and is refused. So only
the cluster secret has to be distributed. NATS has TLS of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, StartError
from triptych.host import join_host_port

TLS_HANDSHAKE_SECONDS = 5.0
OPENSSL = "openssl"  # the program
OPENSSL_SECONDS = 30.0
_REQUEST = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = triptych worker\n"


class Certificate(Struct, frozen=True):
    """The certificate that a worker listens with."""

    context: ssl.SSLContext
    fingerprint: bytes


class WorkerTls:
    """The TLS settings, and the certificate of this process once it listens."""

    def __init__(self, cert: str = "", key: str = "") -> None:
        self._files = cert, key
        self._certificate: Certificate | None = None

    async def certificate(self) -> Certificate:
        if self._certificate is None:
            self._certificate = await asyncio.to_thread(self._load)
        return self._certificate

    def check(self) -> None:
        """Raise the errors that listening would raise; creates no certificate."""
        cert, key = self._files
        if cert:
            _read(cert, key or cert)
        elif shutil.which(OPENSSL) is None:
            raise _no_openssl("it is not in PATH")

    def _load(self) -> Certificate:
        cert, key = self._files
        if cert:
            return _read(cert, key or cert)
        with tempfile.TemporaryDirectory(prefix="triptych-tls-") as folder:
            return _read(*_make(Path(folder)))


def worker_tls(config: Config) -> WorkerTls | None:
    """The TLS settings of the config; None: calls are authenticated, but not encrypted."""
    if not config.worker_tls:
        if config.worker_tls_cert or config.worker_tls_key:
            raise InvalidConfig("--worker-tls-cert and --worker-tls-key need --worker-tls")
        return None
    if config.request_plane == "nats":
        raise InvalidConfig(
            "--worker-tls is for the request planes tcp and http. NATS has TLS of its own: use "
            "--join tls://.. and omit --worker-tls."
        )
    return WorkerTls(config.worker_tls_cert, config.worker_tls_key)


async def create_server(
    make: Callable[[], asyncio.BaseProtocol], host: str, port: int, certificate: Certificate | None
) -> tuple[asyncio.Server, str]:
    """Listen, with TLS if there is a certificate. Returns the server and its ``host:port``."""
    server = await asyncio.get_running_loop().create_server(
        make,
        host,
        port,
        ssl=None if certificate is None else certificate.context,
        ssl_handshake_timeout=None if certificate is None else TLS_HANDSHAKE_SECONDS,
    )
    return server, join_host_port(*server.sockets[0].getsockname()[:2])


def caller_context() -> ssl.SSLContext:
    """For connections to workers: the handshake checks the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_fingerprint(transport: asyncio.BaseTransport) -> bytes:
    """The fingerprint of the worker's certificate; empty where the plane is not encrypted."""
    connection = transport.get_extra_info("ssl_object")
    shown = None if connection is None else connection.getpeercert(True)
    return b"" if shown is None else hashlib.sha256(shown).digest()


def _read(cert: str | Path, key: str | Path) -> Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
        first = _first_certificate(Path(cert).read_text())
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidConfig(
            f"--worker-tls-cert or --worker-tls-key cannot be used: {error}"
        ) from None
    return Certificate(context, hashlib.sha256(first).digest())


def _refuse_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise InvalidConfig(
        "--worker-tls-key is encrypted: give a key without a password, as `openssl pkey -in KEY "
        "-out NEW` writes one"
    )


def _first_certificate(text: str) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = text.partition(begin)
    body, ended, _ = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the certificate does not begin with {begin}")
    return ssl.PEM_cert_to_DER_cert(begin + body + end)


def _make(folder: Path) -> tuple[Path, Path]:
    """A new self-signed certificate and its key."""
    cert, key, request = folder / "cert.pem", folder / "key.pem", folder / "request"
    request.write_text(_REQUEST)
    words = [OPENSSL, "req", "-x509", "-config", str(request), "-newkey", "ec", "-nodes"]
    words += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "3650"]
    try:
        done = subprocess.run(
            [*words, "-keyout", str(key), "-out", str(cert)],
            capture_output=True,
            text=True,
            timeout=OPENSSL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        if not done.returncode:
            return cert, key
        why = done.stderr.strip().rpartition("\n")[2]
    raise _no_openssl(why)


def _no_openssl(why: str) -> StartError:
    return StartError(
        f"--worker-tls needs the program openssl to make a certificate ({why}). Install it, or "
        "give a certificate with --worker-tls-cert and --worker-tls-key."
    )
