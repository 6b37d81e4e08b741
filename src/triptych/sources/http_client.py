"""An HTTP/1.1 client for media, which trusts no server: every byte that it receives is counted.

One GET at a time on a connection, and connections are used again. It follows no redirect, keeps no
cookie, takes no proxy from the environment and asks for no compression. Sockets come from the gate
alone. Deadlines are the caller's: a ``get`` that is cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from itertools import chain, zip_longest
from typing import Protocol, cast

from msgspec import Struct

import triptych
from triptych.errors import MediaFetchFailed, ServiceError
from triptych.sources import fetch_body
from triptych.sources.address import AddressBlocked, AddressFilter, AddrInfo
from triptych.sources.fetch_body import BodyDecompressor, BodyFile, Reserve, fetched_file_too_large
from triptych.sources.http_response import BadResponse, ResponseReader
from triptych.sources.tls_bytes import TlsByteLimit
from triptych.sources.url import network_blocked

IDLE_CONNECTIONS = 64
ORIGIN_IDLE_SECONDS = 15.0
HEAD_START = 0.25  # seconds that an address is tried alone before the next one is tried as well
BUFFER_BYTES = 256 << 10  # bytes that a connection receives ahead of who reads them
_OURS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EFBIG}
)


_Origin = tuple[bool, str, int]  # secure, name, port
_Received = tuple[int, dict[str, str], int, int | None]  # as Answer, with size and descriptor


class FetchRequest(Struct, frozen=True, array_like=True):
    """One GET, of a URL that was read and judged."""

    tenant: str
    secure: bool
    name: str  # of the host, as it is looked up
    port: int
    host: str  # as it is written in the Host header, with its port if that is not the usual one
    path: str  # with the query
    conditions: dict[str, str]  # headers that ask for the file only if it has changed
    limit: int  # bytes of the body


class FetchResponse(Struct, frozen=True):
    """The final response to one GET. Only a 200 has a body."""

    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes | memoryview = b""


class FetchClient(Protocol):
    """What gets media from the web, here or in a process of its own."""

    losses: int  # processes that were lost

    def permits(self, address: str) -> bool:
        """Whether a numeric address may be connected to."""

    def start(self) -> None:
        """Prepare for the first ``get``, which does so otherwise."""

    async def get(self, ask: FetchRequest, grow: Reserve) -> FetchResponse:
        """Raises a MediaError, or a ServiceError: then the same may work in a moment."""

    async def close(self) -> None: ...


class HttpClient:
    def __init__(self, gate: AddressFilter) -> None:
        self.losses = 0
        self.gate = gate
        self.tls: ssl.SSLContext | None = None
        self._idle: deque[tuple[_Origin, OriginConnection]] = deque()

    def permits(self, address: str) -> bool:
        return self.gate.permits(address)

    def start(self) -> None: ...

    async def get(self, ask: FetchRequest, grow: Reserve) -> FetchResponse:
        status, headers, size, fd = await self.get_file(ask, grow)
        body = b"" if fd is None else await fetch_body.read_body(fd, size, ask.limit)
        return FetchResponse(status, headers, body)

    async def get_file(self, ask: FetchRequest, grow: Reserve) -> _Received:
        """Status, headers, and of a 200 the body's size and descriptor, which the caller closes."""
        try:
            return await self._get(ask, grow)
        except AddressBlocked:
            raise network_blocked() from None
        except OSError as error:
            if error.errno in _OURS:
                raise ServiceError("Media cannot be fetched at the moment. Try again.") from error
            raise fetch_failed("its server could not be reached, or broke off") from None
        except ValueError:  # BadResponse, or a host that TLS does not take
            raise fetch_failed("its server broke off, or does not speak HTTP") from None

    async def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()
        await self.gate.close()

    async def _get(self, ask: FetchRequest, grow: Reserve) -> _Received:
        place = (ask.secure, ask.name, ask.port)
        connection = self._reusable(place)
        while True:
            used = connection is not None
            if connection is None:
                connection = await self._connect(ask)
            try:
                reader = ResponseReader()
                connection.write(_head(ask))
                found = await _receive(connection, reader, ask.limit, grow)
            except (OSError, BadResponse):
                connection.close()
                if not used or reader.received:
                    raise
                connection = None  # the server had closed it meanwhile: once more, on a new one
                continue
            except BaseException:
                connection.close()
                raise
            if reader.complete and reader.keep_alive:
                self._keep(place, connection)
            else:
                connection.close()
            return found

    def _reusable(self, place: _Origin) -> OriginConnection | None:
        for entry in reversed(self._idle):
            if entry[0] == place and not entry[1].ended:
                self._idle.remove(entry)
                entry[1].set_idle(False)
                return entry[1]
        return None

    def _keep(self, place: _Origin, connection: OriginConnection) -> None:
        if len(self._idle) >= IDLE_CONNECTIONS:
            self._idle.popleft()[1].close()
        connection.set_idle(True)
        self._idle.append((place, connection))

    async def _connect(self, ask: FetchRequest) -> OriginConnection:
        loop = asyncio.get_running_loop()
        infos = await self.gate.resolve(ask.name, ask.port, ask.tenant)
        sock = await _first_connected(self.gate, infos)
        tls = self._context() if ask.secure else None
        name = ask.name.rstrip(".") if tls else None
        connection = OriginConnection(TlsByteLimit(sock) if tls else None)
        try:
            await loop.create_connection(
                lambda: connection, sock=sock, ssl=tls, server_hostname=name
            )
        except BaseException:
            connection.connection_lost(None)
            sock.close()
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        if self.tls is None:
            self.tls = ssl.create_default_context()
        return self.tls


class OriginConnection(asyncio.Protocol):
    """Bytes in both directions. While it is idle, whatever the server sends or time closes it."""

    _transport: asyncio.Transport

    def __init__(self, tls_bytes: TlsByteLimit | None = None) -> None:
        self._tls_bytes = tls_bytes
        self.ended = False  # nothing more arrives
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
        """What has arrived; nothing: the server has closed the connection."""
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
        """At once: what was not sent yet is of no interest."""
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

    # What the event loop calls.

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


def fetch_failed(why: str) -> MediaFetchFailed:
    return MediaFetchFailed(f"The media URL could not be fetched: {why}.")


def _head(ask: FetchRequest) -> bytes:
    lines = [
        f"GET {ask.path} HTTP/1.1",
        f"Host: {ask.host}",
        f"User-Agent: Triptych/{triptych.__version__}",
        "Accept: */*",
        "Accept-Encoding: identity",  # media are compressed already
        *(f"{name}: {value}" for name, value in ask.conditions.items()),
    ]
    assert not any({"\r", "\n"} & set(line) for line in lines), "it would be two requests"
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


async def _receive(
    connection: OriginConnection, reader: ResponseReader, limit: int, grow: Reserve
) -> _Received:
    """The response, with the body of a 200. Of any other only the head is read."""
    with BodyFile(limit, grow) as body:
        unpacker: BodyDecompressor | None = None
        while not reader.complete:
            data = await connection.read()
            if not data:
                reader.end()
            for piece in reader.feed(data):
                if reader.status != 200:
                    break
                if reader.body_bytes > limit:  # a packed body may unpack to nothing, without end
                    raise fetched_file_too_large(limit)
                if not body.size and unpacker is None:
                    unpacker = _unpacker(reader, body)
                await (unpacker or body).write(piece)
            if reader.status and reader.status != 200:
                break
            if (reader.length or 0) > limit:
                raise fetched_file_too_large(limit)
        if unpacker is not None:
            unpacker.end()
        return reader.status, reader.headers, body.size, body.sealed()


def _unpacker(reader: ResponseReader, body: BodyFile) -> BodyDecompressor | None:
    packing = reader.headers.get("content-encoding", "identity").strip().lower()
    if packing in ("", "identity"):
        return None
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise fetch_failed("its server packed it in a way that was not asked for")
    return BodyDecompressor(body)


async def _first_connected(gate: AddressFilter, infos: list[AddrInfo]) -> socket.socket:
    """A socket that is connected to one of the addresses: each has a head start over the next."""
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
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, info[4])
    except BaseException:
        sock.close()
        raise
    return sock


def _alternating(infos: list[AddrInfo]) -> list[AddrInfo]:
    """By turns of the first address's family and of the other: one of them may lead nowhere."""
    first = [info for info in infos if info[0] == infos[0][0]]
    rest = [info for info in infos if info[0] != infos[0][0]]
    return [info for info in chain(*zip_longest(first, rest)) if info is not None]
