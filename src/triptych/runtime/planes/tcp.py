"""The request plane tcp: a connection is a TCP connection, for processes that reach each other.

With TLS addresses are ``tls://host:port``, otherwise ``host:port``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.runtime.planes.base import ListenAddress, P
from triptych.runtime.planes.tls import Certificate, WorkerTls, caller_context, create_server

TLS = "tls://"


class _TcpListener:
    def __init__(self, server: asyncio.Server, bound: str, certificate: Certificate | None) -> None:
        self._server = server
        self.address = bound if certificate is None else TLS + bound
        self.binding = b"" if certificate is None else certificate.fingerprint

    def refuse(self) -> None:
        self._server.close()

    async def close(self) -> None:
        self._server.close()


class TcpPlane:
    def __init__(self, tls: WorkerTls | None = None) -> None:
        self._tls = tls

    async def listen(
        self, make: Callable[[], asyncio.BufferedProtocol], address: ListenAddress
    ) -> _TcpListener:
        certificate = None if self._tls is None else await self._tls.certificate()
        server, bound = await create_server(make, address.host, address.port, certificate)
        return _TcpListener(server, bound, certificate)

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        host, _, port = address.removeprefix(TLS).rpartition(":")
        _, protocol = await asyncio.get_running_loop().create_connection(
            make,
            host.strip("[]"),
            int(port),
            ssl=caller_context() if address.startswith(TLS) else None,
        )
        return protocol


def open_plane(tls: WorkerTls | None, *_: object) -> TcpPlane:
    return TcpPlane(tls)
