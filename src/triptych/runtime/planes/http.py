"""The request plane http: WebSocket (RFC 6455) over HTTP/1.1, for workers behind an ingress.

Binary messages carry the bytes of a connection; message boundaries mean nothing. With
``--worker-tls`` addresses begin with wss, and TLS ends in the worker. Where an address begins with
https, TLS ends in an ingress before the worker, whose certificate is verified as a browser does.
Other requests to the port get 404, or 426 at the right path.
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

from triptych.observe.log import RateLimitedLog
from triptych.runtime.link import FLUSH_SECONDS, HELLO_SECONDS
from triptych.runtime.planes.base import (
    MESSAGE_BYTES,
    ListenAddress,
    P,
    PumpedTransport,
    feed,
)
from triptych.runtime.planes.tls import Certificate, WorkerTls, caller_context, create_server

log = logging.getLogger(__name__)
PATH = "/triptych"
_LARGEST_MESSAGE = 2 * MESSAGE_BYTES  # bounds the memory that an unauthenticated peer can take

_Make = Callable[[], asyncio.BufferedProtocol]


class _Transport(PumpedTransport):
    """Sends the bytes of a connection in WebSocket messages."""

    def __init__(
        self,
        protocol: asyncio.BufferedProtocol,
        websocket: web.WebSocketResponse | ClientWebSocketResponse,
        abort: Callable[[], None],
        *,
        worker_tls: bool = False,
    ) -> None:
        super().__init__(protocol)
        self._websocket = websocket
        self._abort = abort
        self._worker_tls = worker_tls
        self._leaving: asyncio.Task[bool] | None = None
        protocol.connection_made(self)

    async def read(self) -> None:
        """Pass received bytes to the protocol until the WebSocket closes."""
        async for message in self._websocket:
            if message.type is not WSMsgType.BINARY:
                break
            feed(self._protocol, message.data, lambda: not self._lost)

    async def _pump(self) -> None:
        while self._unsent:
            await self._websocket.send_bytes(bytes(self._take()))
            self._resume_protocol()

    def _finish(self) -> None:
        self._leaving = self._loop.create_task(self._websocket.close())

    def _cut(self) -> None:
        self._abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """About TLS, where it ends in the worker itself."""
        return self._websocket.get_extra_info(name, default) if self._worker_tls else default


class _BadRequests(logging.Logger):
    """Rate-limits what aiohttp logs, with a traceback each, about requests it cannot parse."""

    def __init__(self) -> None:
        super().__init__("aiohttp.server")
        self._limited = RateLimitedLog(log, "requests_broken")

    def handle(self, record: logging.LogRecord) -> None:
        why = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "no HTTP"
        if record.levelno >= logging.WARNING:
            self._limited.warning("requests_broken", f"{record.getMessage()} ({why})")


class _WebSocketListener:
    """The listening port of a worker."""

    def __init__(self, make: _Make, certificate: Certificate | None) -> None:
        self._make = make
        self._certificate = certificate
        self.binding = b"" if certificate is None else certificate.fingerprint
        self._web = web.Server(self._answer, access_log=None, logger=_BadRequests())
        self._websockets: set[asyncio.BaseProtocol] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        self._server, bound = await create_server(self._accept, host, port, self._certificate)
        scheme = "http" if self._certificate is None else "wss"
        self.address = f"{scheme}://{bound}{PATH}"

    def refuse(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        self.refuse()
        await self._web.shutdown(FLUSH_SECONDS)

    def _accept(self) -> asyncio.BaseProtocol:
        handler = self._web()

        def close_unless_websocket() -> None:
            if handler not in self._websockets:
                handler.force_close()

        # Close connections that stay silent or keep sending other requests.
        asyncio.get_running_loop().call_later(HELLO_SECONDS, close_unless_websocket)
        return handler

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404, text="Not found.\n")
        websocket = web.WebSocketResponse(
            timeout=FLUSH_SECONDS, max_msg_size=_LARGEST_MESSAGE, compress=False
        )
        if not websocket.can_prepare(request):
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
            return web.Response(status=426, headers=upgrade, text="Connect with WebSocket.\n")
        await websocket.prepare(request)
        wire = request.transport
        if wire is None:
            return websocket
        self._websockets.add(request.protocol)
        transport = _Transport(self._make(), websocket, wire.abort)
        try:
            await transport.read()
        finally:
            self._websockets.discard(request.protocol)
            transport.abort()
        return websocket


class HttpPlane:
    """Addresses are ``http://host:port/triptych``, or what an ingress maps to that; with TLS of the
    worker's own, ``wss://host:port/triptych``."""

    def __init__(self, tls: WorkerTls | None = None) -> None:
        self._tls = tls
        self._reading: set[asyncio.Task[None]] = set()

    async def listen(self, make: _Make, address: ListenAddress) -> _WebSocketListener:
        certificate = None if self._tls is None else await self._tls.certificate()
        listener = _WebSocketListener(make, certificate)
        await listener.start(address.host, address.port)
        return listener

    async def connect(self, address: str, make: Callable[[], P]) -> P:
        sockets: list[socket.socket] = []

        def make_socket(info: aiohttp.AddrInfoType) -> socket.socket:
            sockets.append(socket.socket(*info[:3]))
            return sockets[-1]

        def abort() -> None:
            for one in sockets:
                with contextlib.suppress(OSError):  # it is closed
                    one.shutdown(socket.SHUT_RDWR)

        ends_in_worker = address.startswith("wss:")
        async with contextlib.AsyncExitStack() as scope:
            connector = aiohttp.TCPConnector(socket_factory=make_socket)
            session = await scope.enter_async_context(aiohttp.ClientSession(connector=connector))
            try:
                websocket = await session.ws_connect(
                    address,
                    timeout=aiohttp.ClientWSTimeout(ws_close=FLUSH_SECONDS),
                    max_msg_size=_LARGEST_MESSAGE,
                    ssl=caller_context() if ends_in_worker else True,
                )
            except aiohttp.ClientError as error:
                raise ConnectionError(str(error)) from error
            scope.pop_all()  # connected: ``_read`` closes the session
        protocol = make()
        self._read(_Transport(protocol, websocket, abort, worker_tls=ends_in_worker), session)
        return protocol

    def _read(self, transport: _Transport, session: aiohttp.ClientSession) -> None:
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
