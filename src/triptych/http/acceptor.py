"""Listens, and accepts connections as long as there are descriptors for them.

With every descriptor in use the system would close connections without a response, and no worker
could be called. So connections leave a reserve of descriptors. A connection beyond that is refused
with a 503, which takes a descriptor of the reserve for a moment: only some are refused at a time,
and the others wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from asyncio import BaseProtocol, Task
from collections.abc import Callable
from typing import Any

from triptych.config import Limits
from triptych.http.tls import ServerCertificate
from triptych.observe.log import RateLimitedLog

log = logging.getLogger(__name__)
BACKLOG = 4096
BURST = 64  # connections accepted before open ones are served again
RESERVE = 128  # descriptors, or an eighth: for workers, files and refusals
RETRY_SECONDS = 0.5  # after the system lacked a descriptor or memory for a connection
CONNECTIONS_REFUSED = "connections_refused"
HANDSHAKES_FAILED = "tls_handshakes_failed"
_HANDSHAKE_ERRORS = (  # the end of OpenSSL's reason; its prefix depends on the version
    ("HTTP_REQUEST", "a client spoke plain HTTP to this HTTPS port"),
    ("ALERT_UNKNOWN_CA", "a client does not trust the certificate of --tls-cert"),
    ("ALERT_CERTIFICATE_UNKNOWN", "a client does not trust the certificate of --tls-cert"),
)
REFUSED_HANDSHAKE_SECONDS = 2.0  # for a connection that is refused


class Acceptor:
    """The listening sockets. ``make_protocol`` gets whether the connection is refused.

    With a certificate, a connection begins when its handshake is complete, which takes
    ``header_seconds`` at most.
    """

    def __init__(
        self,
        make_protocol: Callable[[bool], BaseProtocol],
        limits: Limits,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._make_protocol = make_protocol
        self._limits = limits
        self._certificate = certificate
        self._loop = asyncio.get_running_loop()
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(RESERVE, self._limit // 8)
        self._refuse_from = self._limit - reserve  # the first descriptor that is refused
        self._max_refused = max(1, reserve // 2)  # at a time
        self._refused = 0  # open connections that get a 503
        self._accepting = False
        self._opening: set[Task[None]] = set()
        self._rate_limited_log = RateLimitedLog(log, CONNECTIONS_REFUSED, HANDSHAKES_FAILED)

    async def start(self, host: str, port: int) -> None:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        addresses = await self._loop.getaddrinfo(host or None, port, type=kind, flags=flags)
        try:
            for family, _, _, _, address in dict.fromkeys(addresses):
                self.sockets.append(_listen(family, address))
        except OSError:
            self.close()
            raise
        self._resume()

    def connection_closed(self, refused: bool) -> None:
        self._refused -= refused
        self._resume()

    def report_tls_client(self) -> None:
        """Log that a client speaks TLS, where there is no certificate."""
        self._rate_limited_log.warning(
            HANDSHAKES_FAILED, "a client speaks TLS to this plain HTTP port: set --tls-cert"
        )

    def close(self) -> None:
        self._pause()
        for listening in self.sockets:
            listening.close()
        self.sockets = []
        for task in self._opening:  # handshakes
            task.cancel()

    def _resume(self) -> None:
        if not self._accepting and self._refused < self._max_refused:
            self._accepting = True
            for listening in self.sockets:
                self._loop.add_reader(listening, self._accept, listening)

    def _pause(self) -> None:
        self._accepting = False
        for listening in self.sockets:
            self._loop.remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(BURST):
            if self._refused >= self._max_refused:
                self._pause()
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rate_limited_log.warning(
                    CONNECTIONS_REFUSED, f"cannot accept connections: {error.strerror}"
                )
                self._pause()
                self._loop.call_later(RETRY_SECONDS, self._resume)
                return
            self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        """New descriptors get the lowest free number, so the number says how many are in use."""
        accepted.setblocking(False)
        refused = accepted.fileno() >= self._refuse_from
        if refused:
            self._refused += 1
            free = self._limit - accepted.fileno()
            message = f"refused a connection with 503: {free} descriptors are left (ulimit -n)"
            self._rate_limited_log.warning(CONNECTIONS_REFUSED, message)
        task = self._loop.create_task(self._connect(accepted, refused))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket, refused: bool) -> None:
        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(
                    lambda: self._make_protocol(refused), accepted
                )
            else:
                await self._shake_hands(accepted, refused, self._certificate.context)
        except OSError as error:  # the client has gone, or speaks no TLS that suits
            if isinstance(error, ssl.SSLError):
                self._rate_limited_log.warning(HANDSHAKES_FAILED, _explain_handshake(error))
            accepted.close()
            self.connection_closed(refused)

    async def _shake_hands(
        self, accepted: socket.socket, refused: bool, context: ssl.SSLContext
    ) -> None:
        seconds = self._limits.header_seconds
        await self._loop.connect_accepted_socket(
            lambda: self._make_protocol(refused),
            accepted,
            ssl=context,
            ssl_handshake_timeout=min(seconds, REFUSED_HANDSHAKE_SECONDS) if refused else seconds,
            ssl_shutdown_timeout=self._limits.write_seconds,
        )


def _explain_handshake(error: ssl.SSLError) -> str:
    reason = str(error.reason or error)
    known = (words for end, words in _HANDSHAKE_ERRORS if reason.endswith(end))
    return next(known, f"a TLS handshake failed: {reason}")


def _listen(family: int, address: Any) -> socket.socket:
    listening = socket.create_server(address, family=family, backlog=BACKLOG)
    listening.setblocking(False)
    return listening
