"""The request plane http: WebSocket (RFC 6455) over HTTP/1.1, which passes what HTTP passes.

For workers behind an ingress or a load balancer. Binary messages carry the bytes of a connection;
where one message ends and the next begins means nothing. With ``--worker-tls`` addresses begin with
wss, and TLS ends in the worker. Where an address says https, TLS ends in an ingress before it,
whose certificate is verified as a browser does. Whatever else comes to the port gets 404, or 426 at
the right path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from triptych.host import join_host_port
from triptych.observe.log import RateLimitedLog
from triptych.runtime.link import CLOSE_SECONDS, HELLO_SECONDS
from triptych.runtime.planes.base import (
    HANDSHAKE_SECONDS,
    PIECE,
    ListenAddress,
    P,
    PumpedTransport,
    feed,
)
from triptych.runtime.planes.tls import Certificate, WorkerTls, caller_context

log = logging.getLogger(__name__)
PATH = "/triptych"
_LARGEST = 2 * PIECE  # message that is taken: no stranger gets more of our memory

_Make = Callable[[], asyncio.BufferedProtocol]


class _Transport(PumpedTransport):
    """The bytes of a connection in the messages of a WebSocket."""

    def __init__(
        self,
        protocol: asyncio.BufferedProtocol,
        ends: web.WebSocketResponse | ClientWebSocketResponse,
        cut: Callable[[], None],
        *,
        bound: bool = False,
    ) -> None:
        super().__init__(protocol)
        self._ends = ends
        self._cut_wire = cut
        self._bound = bound
        self._leaving: asyncio.Task[bool] | None = None
        protocol.connection_made(self)

    async def read(self) -> None:
        """Give what comes to the protocol, until no more will."""
        async for message in self._ends:
            if message.type is not WSMsgType.BINARY:
                break
            feed(self._protocol, message.data, lambda: not self._lost)

    async def _pump(self) -> None:
        while self._unsent:
            await self._ends.send_bytes(bytes(self._take()))
            self._relax()

    def _finish(self) -> None:
        self._leaving = self._loop.create_task(self._ends.close())

    def _cut(self) -> None:
        self._cut_wire()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of TLS, where it ends in the worker itself."""
        return self._ends.get_extra_info(name, default) if self._bound else default


class _BadRequests(logging.Logger):
    """What aiohttp tells of requests that it can't read, a traceback each: in few lines."""

    def __init__(self) -> None:
        super().__init__("aiohttp.server")
        self._limited = RateLimitedLog(log, "requests_broken")

    def handle(self, record: logging.LogRecord) -> None:
        why = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "no HTTP"
        if record.levelno >= logging.WARNING:
            self._limited.warning("requests_broken", f"{record.getMessage()} ({why})")


class _Listening:
    """The port of a worker."""

    def __init__(self, make: _Make, certificate: Certificate | None) -> None:
        self._make = make
        self._certificate = certificate
        self.binding = b"" if certificate is None else certificate.fingerprint
        self._web = web.Server(self._answer, access_log=None, logger=_BadRequests())
        self._known: set[asyncio.BaseProtocol] = set()  # connections that are WebSockets
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        tls = self._certificate
        self._server = await asyncio.get_running_loop().create_server(
            self._accept,
            host,
            port,
            ssl=None if tls is None else tls.context,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
        )
        bound = join_host_port(*self._server.sockets[0].getsockname()[:2])
        self.address = f"{'http' if tls is None else 'wss'}://{bound}{PATH}"

    def refuse(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        self.refuse()
        await self._web.shutdown(CLOSE_SECONDS)

    def _accept(self) -> asyncio.BaseProtocol:
        handler = self._web()

        def leave() -> None:
            if handler not in self._known:
                handler.force_close()

        # Whoever says nothing, or asks for something else again and again, does not stay.
        asyncio.get_running_loop().call_later(HELLO_SECONDS, leave)
        return handler

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404, text="Nothing is here.\n")
        ends = web.WebSocketResponse(timeout=CLOSE_SECONDS, max_msg_size=_LARGEST, compress=False)
        if not ends.can_prepare(request):
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
            return web.Response(status=426, headers=upgrade, text="This is a WebSocket.\n")
        await ends.prepare(request)
        wire = request.transport
        if wire is None:
            return ends
        self._known.add(request.protocol)
        transport = _Transport(self._make(), ends, wire.abort)
        try:
            await transport.read()
        finally:
            self._known.discard(request.protocol)
            transport.abort()
        return ends


class HttpPlane:
    """Addresses are ``http://host:port/triptych``, or what an ingress maps to that; with TLS of the
    worker's own, ``wss://host:port/triptych``."""

    def __init__(self, tls: WorkerTls | None = None) -> None:
        self._tls = tls
        self._reading: set[asyncio.Task[None]] = set()

    async def listen(self, make: _Make, place: ListenAddress) -> _Listening:
        certificate = None if self._tls is None else await self._tls.certificate()
        listening = _Listening(make, certificate)
        await listening.start(place.host, place.port)
        return listening

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        wires: list[socket.socket] = []

        def wire(info: aiohttp.AddrInfoType) -> socket.socket:
            wires.append(socket.socket(*info[:3]))
            return wires[-1]

        def cut() -> None:
            for one in wires:
                with contextlib.suppress(OSError):  # it is closed
                    one.shutdown(socket.SHUT_RDWR)

        own = address.startswith("wss:")
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=wire))
        try:
            ends = await session.ws_connect(
                address,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                max_msg_size=_LARGEST,
                ssl=caller_context() if own else True,
            )
        except aiohttp.ClientError as error:
            await session.close()
            raise ConnectionError(str(error)) from error
        except BaseException:
            await session.close()
            raise
        protocol = make()
        self._keep(_Transport(protocol, ends, cut, bound=own), session)
        return protocol

    def _keep(self, transport: _Transport, session: aiohttp.ClientSession) -> None:
        async def read() -> None:
            try:
                await transport.read()
            finally:
                await session.close()
                transport.abort()

        reading = asyncio.get_running_loop().create_task(read())
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)


def open_plane(tls: WorkerTls | None, *_: object) -> HttpPlane:
    return HttpPlane(tls)
