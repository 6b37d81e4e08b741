"""The request plane tcp: a connection is a TCP connection. For processes that reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.runtime.planes.base import P, Place
from triptych.runtime.ports import authority


class _Listening:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.address = authority(*server.sockets[0].getsockname()[:2])

    def refuse(self) -> None:
        self._server.close()

    async def close(self) -> None:
        self._server.close()


class TcpPlane:
    """Addresses are ``host:port``."""

    async def listen(
        self, make: Callable[[], asyncio.BufferedProtocol], place: Place
    ) -> _Listening:
        loop = asyncio.get_running_loop()
        return _Listening(await loop.create_server(make, place.host, place.port))

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(make, host.strip("[]"), int(port))
        return protocol


PLANE = TcpPlane()
