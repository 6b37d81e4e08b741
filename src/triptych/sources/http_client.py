"""An HTTP/1.1 client for media that trusts no server and counts every byte that it receives.

It is our own because aiohttp's client does not bound what a server sends besides the body: interim
responses, header lines, chunk extensions, TLS records. One GET at a time on a connection;
connections are reused. It follows no redirects, keeps no cookies, reads no proxy settings and asks
for no compression. Sockets come from the AddressFilter only. The caller sets deadlines: cancelling
a ``get`` closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import ssl
import struct
import sys
import termios
from collections import deque
from itertools import chain, zip_longest
from typing import cast

import triptych
from triptych.errors import ServiceError
from triptych.sources.address import AddressBlocked, AddressFilter, AddrInfo
from triptych.sources.fetch_channel import (
    BodyFile,
    FetchRequest,
    Reserve,
    fetch_failed,
    fetched_file_too_large,
)
from triptych.sources.http_response import BadResponse, BodyDecompressor, ResponseReader
from triptych.sources.url import network_blocked

IDLE_CONNECTIONS = 64
ORIGIN_IDLE_SECONDS = 15.0
HEAD_START = 0.25  # seconds until the next address is tried as well
BUFFER_BYTES = 256 << 10  # that a connection receives ahead of its reader
_LOCAL_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EFBIG}
)
TLS_OVERHEAD_BYTES = 1 << 20  # of handshake, tickets and record headers,
TLS_OVERHEAD_SHARE = 8  # and one for so many bytes of content
TLS_CHECK_SECONDS = 0.02
_BYTES_RECEIVED = struct.Struct("@128xQ")  # in Linux's struct tcp_info

_Origin = tuple[bool, str, int]  # secure, name, port
_Received = tuple[int, dict[str, str], int, int | None]  # status, headers, body size and descriptor


class HttpClient:
    def __init__(self, gate: AddressFilter) -> None:
        self.gate = gate
        self.tls: ssl.SSLContext | None = None
        self._idle: deque[tuple[_Origin, OriginConnection]] = deque()

    async def get_file(self, request: FetchRequest, reserve: Reserve) -> _Received:
        """The caller closes the body's descriptor. Raises a MediaError, or a ServiceError if the
        same may succeed in a moment."""
        try:
            return await self._get(request, reserve)
        except AddressBlocked:
            raise network_blocked() from None
        except OSError as error:
            if error.errno in _LOCAL_ERRORS:
                raise ServiceError("Media cannot be fetched at the moment. Try again.") from error
            raise fetch_failed("its server could not be reached, or broke off") from None
        except ValueError:  # BadResponse, or a host that TLS does not take
            raise fetch_failed("its server broke off, or does not speak HTTP") from None

    async def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()
        await self.gate.close()

    async def _get(self, request: FetchRequest, reserve: Reserve) -> _Received:
        origin = (request.secure, request.name, request.port)
        connection = self._reusable(origin)
        while True:
            used = connection is not None
            if connection is None:
                connection = await self._connect(request)
            reader = ResponseReader()
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                try:
                    connection.write(_head(request))
                    received = await _receive(connection, reader, request.limit, reserve)
                except (OSError, BadResponse):
                    if not used or reader.received:
                        raise
                    connection = None  # the server closed the idle connection: retry on a new one
                    continue
                if reader.complete and reader.keep_alive:
                    stack.pop_all()
                    self._keep(origin, connection)
                return received

    def _reusable(self, origin: _Origin) -> OriginConnection | None:
        for entry in reversed(self._idle):
            if entry[0] == origin and not entry[1].ended:
                self._idle.remove(entry)
                entry[1].set_idle(False)
                return entry[1]
        return None

    def _keep(self, origin: _Origin, connection: OriginConnection) -> None:
        if len(self._idle) >= IDLE_CONNECTIONS:
            self._idle.popleft()[1].close()
        connection.set_idle(True)
        self._idle.append((origin, connection))

    async def _connect(self, request: FetchRequest) -> OriginConnection:
        loop = asyncio.get_running_loop()
        infos = await self.gate.resolve(request.name, request.port, request.tenant)
        sock = await _first_connected(self.gate, infos)
        tls = self._context() if request.secure else None
        name = request.name.rstrip(".") if tls else None
        connection = OriginConnection(TlsByteLimit(sock) if tls else None)
        with contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            stack.callback(connection.connection_lost, None)
            await loop.create_connection(
                lambda: connection, sock=sock, ssl=tls, server_hostname=name
            )
            stack.pop_all()
        return connection

    def _context(self) -> ssl.SSLContext:
        if self.tls is None:
            self.tls = ssl.create_default_context()
        return self.tls


class OriginConnection(asyncio.Protocol):
    """One connection. While it is idle, any byte from the server or a timeout closes it."""

    _transport: asyncio.Transport

    def __init__(self, tls_bytes: TlsByteLimit | None = None) -> None:
        self._tls_bytes = tls_bytes
        self.ended = False  # no more bytes arrive
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def set_idle(self, idle: bool) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if idle:
            self._idle = asyncio.get_running_loop().call_later(ORIGIN_IDLE_SECONDS, self.close)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def read(self) -> bytes:
        """The next bytes; b"" if the server has closed the connection."""
        while not self._pieces:
            if self._error is not None:
                raise OSError("the connection was lost") from self._error
            if self.ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._pieces.popleft()
        self._size -= len(piece)
        if self._paused and self._size < BUFFER_BYTES:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def close(self) -> None:
        """At once, without sending what is buffered."""
        self.set_idle(False)
        self._end(None)
        self._transport.abort()

    def _end(self, error: Exception | None) -> None:
        self.ended = True
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self.close()
            return
        if self._tls_bytes is not None:
            self._tls_bytes.content += len(data)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= BUFFER_BYTES and not self._paused and not self.ended:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._idle is not None:
            self.close()
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._tls_bytes is not None:
            self._tls_bytes.close()
        self.set_idle(False)
        self._end(exc)


def _head(request: FetchRequest) -> bytes:
    lines = [
        f"GET {request.path} HTTP/1.1",
        f"Host: {request.host}",
        f"User-Agent: Triptych/{triptych.__version__}",
        "Accept: */*",
        "Accept-Encoding: identity",  # media are compressed already
        *(f"{name}: {value}" for name, value in request.conditions.items()),
    ]
    assert not any({"\r", "\n"} & set(line) for line in lines), "request splitting"
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


async def _receive(
    connection: OriginConnection, reader: ResponseReader, limit: int, reserve: Reserve
) -> _Received:
    """The response, with its body if it is a 200. Of any other only the head is read."""
    with BodyFile(limit, reserve) as body:
        decompressor: BodyDecompressor | None = None
        while not reader.complete:
            data = await connection.read()
            if not data:
                reader.end()
            for piece in reader.feed(data):
                if reader.status != 200:
                    break
                # A compressed body may be endless and decompress to nothing.
                if reader.body_bytes > limit:
                    raise fetched_file_too_large(limit)
                if not body.size and decompressor is None:
                    decompressor = _decompressor_for(reader, body)
                await (decompressor or body).write(piece)
            if reader.status and reader.status != 200:
                break
            if (reader.length or 0) > limit:
                raise fetched_file_too_large(limit)
        if decompressor is not None:
            decompressor.end()
        return reader.status, reader.headers, body.size, body.seal()


def _decompressor_for(reader: ResponseReader, body: BodyFile) -> BodyDecompressor | None:
    coding = reader.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise fetch_failed("its server compressed it in a way that was not asked for")
    return BodyDecompressor(body)


async def _first_connected(gate: AddressFilter, infos: list[AddrInfo]) -> socket.socket:
    """A socket connected to one of the addresses; each has a head start over the next."""
    found: socket.socket | None = None
    error: OSError = OSError("no address")
    trying: set[asyncio.Task[socket.socket]] = set()
    waiting = deque(_alternating(infos))
    try:
        while found is None and (waiting or trying):
            if waiting:
                trying.add(asyncio.create_task(_connected(gate, waiting.popleft())))
            done, trying = await asyncio.wait(
                trying,
                timeout=HEAD_START if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                if isinstance(problem := task.exception(), OSError):
                    error = problem
                elif found is None:
                    found = task.result()
                else:
                    task.result().close()
    finally:
        for task in trying:
            task.cancel()
            task.add_done_callback(_close_late)
    if found is None:
        raise error
    return found


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _connected(gate: AddressFilter, info: AddrInfo) -> socket.socket:
    sock = gate.open(info)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, info[4])
        stack.pop_all()
    return sock


def _alternating(infos: list[AddrInfo]) -> list[AddrInfo]:
    """Alternately of the first address's family and of the other, in case one has no route."""
    first = [info for info in infos if info[0] == infos[0][0]]
    rest = [info for info in infos if info[0] != infos[0][0]]
    return [info for info in chain(*zip_longest(first, rest)) if info is not None]


class TlsByteLimit:
    """Cuts a TLS connection whose server sends too much besides content. Start it before the
    handshake.

    A handshake that never ends, key updates, tickets: the event loop's TLS handles them without
    reporting them. So this compares the kernel's count of received bytes with the content.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.content = 0  # bytes passed to the reader
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        try:
            received = _bytes_read(self._sock)
        except OSError:
            return  # the socket is closed
        if received - self.content > TLS_OVERHEAD_BYTES + self.content // TLS_OVERHEAD_SHARE:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            return
        self._timer = self._loop.call_later(TLS_CHECK_SECONDS, self._check)


def _bytes_read(sock: socket.socket) -> int:
    """Bytes read from the socket so far: those that arrived minus those still waiting."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    waiting = int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
    return (
        int(_BYTES_RECEIVED.unpack(info)[0]) - waiting if len(info) == _BYTES_RECEIVED.size else 0
    )
