"""Fetches in a separate process, so that the frontend parses no server's response.

The process starts with a clean environment, and is replaced when it dies, hangs or sends an invalid
message. Fetches under way then fail with a ServiceError; the next one uses the new process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable

import msgspec

from triptych.errors import Draining, MediaError, MediaFetchFailed, ServiceError, rebuild_error
from triptych.media.lockdown import spawn_clean
from triptych.messages import Failure
from triptych.sources.address import AddressFilter
from triptych.sources.fetch_channel import (
    BytesGranted,
    BytesRequested,
    FetchAlive,
    FetchCancel,
    FetchChannel,
    FetchDone,
    FetchFailed,
    FetchPing,
    FetchRequest,
    FetchResponse,
    FetchSetup,
    FetchStart,
    FromFetchProcess,
    Reserve,
    close_file,
    read_body,
)

PING_SECONDS = 1.0
SILENT_PINGS = 5  # unanswered ones after which the process counts as hanging
START_PINGS = 60  # the same while it starts, on a busy machine
FETCH_SANDBOX = "triptych.sources.fetch_sandbox"
VARIABLES = (  # the environment variables that it gets; others hold secrets
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "RES_OPTIONS",
    "LOCALDOMAIN",
)

_log = logging.getLogger(__name__)

_Event = tuple[BytesRequested | FetchDone | FetchFailed, int | None] | ServiceError


class FetchProcess:
    """Gets files over HTTP, in one process at a time."""

    def __init__(self, *, private: bool, media_bytes: int) -> None:
        self.losses = 0  # processes that ended unexpectedly
        self._setup = FetchSetup(private, media_bytes)
        self._addresses = AddressFilter(private=private)  # for ``permits`` only
        self._process: _Process | None = None
        self._closed = False

    def permits(self, address: str) -> bool:
        """Whether a numeric address may be connected to."""
        return self._addresses.permits(address)

    def start(self) -> None:
        """Start the process for the first ``get``, which otherwise does so itself. Raises
        ServiceError."""
        if self._closed:
            raise Draining("This process is stopping.")
        if self._process is None:
            self._process = _Process(self._setup, self._lost)

    async def get(self, request: FetchRequest, reserve: Reserve) -> FetchResponse:
        """Raises a MediaError, or a ServiceError if the same may succeed in a moment."""
        self.start()
        assert self._process is not None
        return await self._process.get(request, reserve)

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.close()
        await self._addresses.close()

    def _lost(self, process: _Process, reason: str) -> None:
        self.losses += 1
        self._process = None
        _log.warning("lost the fetching process: %s", reason)
        if process.started:  # else it may be lost again at once: the next request tries
            try:
                self.start()
            except ServiceError as error:
                _log.error("%s", error.message)


class _Process:
    """One spawned process, until it is lost or closed."""

    def __init__(self, setup: FetchSetup, lost: Callable[[_Process, str], None]) -> None:
        self.started = False
        self._ended = False
        self._lost = lost
        self._events: dict[int, asyncio.Queue[_Event]] = {}
        self._numbers = itertools.count()
        self._silent = 0  # pings since its last message
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
                self._process = spawn_clean(FETCH_SANDBOX, theirs, environment)
            except OSError as error:
                ours.close()
                raise ServiceError(
                    "The process that fetches media cannot be started at the moment. Try again."
                ) from error
        decoder = msgspec.msgpack.Decoder(FromFetchProcess)
        self._channel: FetchChannel[FromFetchProcess] = FetchChannel(
            ours, decoder, self._receive, self._lose
        )
        self._channel.send(setup)
        self._timer = self._wait()

    async def get(self, request: FetchRequest, reserve: Reserve) -> FetchResponse:
        number = next(self._numbers)
        events = self._events[number] = asyncio.Queue()
        self._channel.send(FetchStart(number, request))
        ended = False
        try:
            while True:
                event = await events.get()
                if isinstance(event, ServiceError):
                    ended = True
                    raise event
                message, fd = event
                match message:
                    case BytesRequested():
                        self._channel.send(BytesGranted(number, await reserve(message.size)))
                    case FetchFailed():
                        ended = True
                        raise _checked_error(message.failure)
                    case FetchDone():
                        ended = True
                        return await self._response(message, fd, request.limit)
        finally:
            del self._events[number]
            while not events.empty():
                _discard(events.get_nowait())
            if not ended:
                self._channel.send(FetchCancel(number))

    async def _response(self, done: FetchDone, fd: int | None, limit: int) -> FetchResponse:
        try:
            if fd is None and not done.size:
                return FetchResponse(done.status, done.headers)
            if fd is None:
                raise ValueError("a body is missing")
            body = await read_body(fd, done.size, limit)
        except ValueError as error:
            self._lose(str(error))
            raise _lost_error() from error
        return FetchResponse(done.status, done.headers, body)

    def close(self, error: ServiceError | None = None) -> None:
        """Kill and reap it, and fail what is under way."""
        self._ended = True
        self._timer.cancel()
        self._channel.close()
        self._process.kill()
        self._process.wait()
        for events in self._events.values():
            events.put_nowait(error or Draining("This process is stopping."))

    def _receive(self, message: FromFetchProcess, fd: int | None) -> None:
        self._silent = 0
        self.started = True
        events = None if isinstance(message, FetchAlive) else self._events.get(message.id)
        if isinstance(message, FetchAlive) or events is None:  # a fetch that was cancelled
            close_file(fd)
        else:
            events.put_nowait((message, fd))

    def _lose(self, reason: str) -> None:
        if self._ended:
            return
        self.close(_lost_error())
        self._lost(self, f"{reason} (exit code {self._process.returncode})")

    def _wait(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        if self._silent >= (SILENT_PINGS if self.started else START_PINGS):
            self._lose("it hangs")
            return
        if self._events or not self.started:
            self._silent += 1
            self._channel.send(FetchPing())
        self._timer = self._wait()


def _lost_error() -> ServiceError:
    return ServiceError("The process that fetches media was lost. Try again.")


def _checked_error(failure: Failure) -> MediaError | ServiceError:
    """The process may refuse a file or be unable to work; it may not raise any other error."""
    error = rebuild_error(failure)
    if isinstance(error, MediaError | ServiceError):
        return error
    return MediaFetchFailed("The media URL could not be fetched.")


def _discard(event: _Event) -> None:
    if not isinstance(event, ServiceError):
        close_file(event[1])
