"""The fetching process: ``python -m triptych.sources.fetch_sandbox``, started by a frontend.

It connects to media servers and parses what they send, so that no server can block or take over the
frontend. It holds no API keys and no cache. It ends with its frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
import sys

import msgspec
import uvloop

from triptych.errors import ServiceError, TriptychError
from triptych.media import lockdown
from triptych.runtime.parent_death import die_with_parent
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
    FetchSetup,
    FetchStart,
    ToFetchProcess,
)
from triptych.sources.http_client import HttpClient

DATA_BYTES = 2 << 30  # of its own memory; the frontend counts bodies
_SYSTEM = (  # what the interpreter and the resolver read
    "/usr",
    "/lib",
    "/lib64",
    "/etc",  # all of it: files of the resolver are replaced while this runs
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/nscd",
    "/dev/null",
    "/dev/urandom",
)


def main(words: list[str]) -> None:
    """``SOCKET PARENT``: serve the frontend at the other end of the socket until it is gone."""
    number, parent = (int(word) for word in words)
    die_with_parent(parent)
    logging.disable(logging.CRITICAL)  # servers could fill a log through the event loop
    uvloop.run(_serve(socket.socket(fileno=number)))


async def _serve(sock: socket.socket) -> None:
    await _FetchServer(sock).ended


class _FetchServer:
    def __init__(self, sock: socket.socket) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client: HttpClient | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reserving: dict[int, asyncio.Future[int]] = {}
        decoder = msgspec.msgpack.Decoder(ToFetchProcess)
        self._channel: FetchChannel[ToFetchProcess] = FetchChannel(
            sock, decoder, self._receive, self._leave
        )
        self._channel.send(FetchAlive())

    def _receive(self, message: ToFetchProcess, _: int | None) -> None:
        match message:
            case FetchStart():
                task = asyncio.create_task(self._get(message))
                self._tasks[message.id] = task
                task.add_done_callback(lambda _: self._tasks.pop(message.id, None))
            case BytesGranted():
                granted = self._reserving.pop(message.id, None)
                if granted is not None and not granted.done():
                    granted.set_result(message.size)
            case FetchCancel():
                if message.id in self._tasks:
                    self._tasks[message.id].cancel()
            case FetchPing():
                self._channel.send(FetchAlive())
            case FetchSetup():
                _limit(message.media_bytes)
                self._client = HttpClient(AddressFilter(private=message.private))

    def _leave(self, _: str) -> None:
        self.ended.set_result(None)

    async def _get(self, message: FetchStart) -> None:
        assert self._client is not None, "the setup comes first"
        try:
            status, headers, size, fd = await self._client.get_file(
                message.request, lambda size: self._reserve(message.id, size)
            )
        except TriptychError as error:
            self._channel.send(FetchFailed(message.id, error.failure()))
        except Exception:  # the edge of this process: the frontend must learn of every end
            failure = ServiceError("The media URL could not be fetched. Try again.").failure()
            self._channel.send(FetchFailed(message.id, failure))
            raise
        else:
            self._channel.send(FetchDone(message.id, status, headers, size), fd)

    async def _reserve(self, number: int, size: int) -> int:
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reserving[number] = granted
        self._channel.send(BytesRequested(number, size))
        try:
            return await granted
        finally:
            self._reserving.pop(number, None)


def _limit(media_bytes: int) -> None:
    """Bound what this process can use up and do to others, should a server take it over."""
    os.nice(lockdown.NICENESS)  # hostile servers keep it busy: tokens come first
    lockdown.lower_limit(resource.RLIMIT_DATA, DATA_BYTES)
    lockdown.lower_limit(resource.RLIMIT_FSIZE, media_bytes)
    lockdown.lower_limit(resource.RLIMIT_CORE, 0)
    lockdown.drop_privileges()
    with contextlib.suppress(OSError):  # `triptych doctor` names the locks that a kernel lacks
        lockdown.install_landlock(
            [*_SYSTEM, *lockdown.code_folders(), *_certificates()], keep_tcp=True
        )


def _certificates() -> list[str]:
    return [path for path in ssl.get_default_verify_paths() if path and os.path.isabs(path)]


if __name__ == "__main__":
    main(sys.argv[1:])
