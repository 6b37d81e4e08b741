"""A web server for tests that answers as the test says, well or badly, and counts connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

from triptych.sources.address import AddressFilter, AddrInfo

OPEN = "127.0.0.9"  # stands for an address in the open network: see NamedGate


class Asked:
    """One request as it came."""

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode().rstrip().split("\r\n")
        self.path = first.split(" ")[1]
        self.headers = {n.lower(): v.strip() for n, _, v in (x.partition(":") for x in lines)}


Act = Callable[[asyncio.StreamWriter, Asked], Awaitable[None]]


class Origin:
    """``routes``: what to write for a path: bytes, or a coroutine function that writes."""

    def __init__(self, routes: dict[str, bytes | Act], host: str = OPEN) -> None:
        self.routes = routes
        self.host = host
        self.port = 0
        self.accepts = 0
        self.asked: list[Asked] = []
        self._readers: set[asyncio.StreamReader] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self.accepts += 1
        self._readers.add(reader)
        try:
            while True:
                asked = Asked(await reader.readuntil(b"\r\n\r\n"))
                self.asked.append(asked)
                act = self.routes.get(asked.path, reply(404))
                if isinstance(act, bytes):
                    writer.write(act)
                else:
                    await act(writer, asked)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # also when a test ends: nothing waits for what this task says
        finally:
            self._readers.discard(reader)
            self._tasks.discard(task)
            writer.close()

    def url(self, path: str, host: str = "ok.test") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def is_left(self) -> bool:
        """Whether all who came have closed their side, also of what is still being answered."""
        return all(reader.at_eof() or reader.exception() for reader in tuple(self._readers))

    async def until_left(self) -> None:
        """For at most ten seconds."""
        async with asyncio.timeout(10):
            while not self.is_left:
                await asyncio.sleep(0.005)


class NamedGate(AddressFilter):
    """A gate with a name server of its own: each lookup takes the next answer, the last stays.

    OPEN counts as public, so that a server of this machine can play one of the open network.
    """

    def __init__(self, names: dict[str, list[list[str]]] | None = None, *, private: bool = False):
        super().__init__(private=private)
        self.names = {"ok.test": [[OPEN]]} | (names or {})
        self.looked_up: list[str] = []
        self.opened: list[str] = []

    def permits(self, address: str) -> bool:
        return address == OPEN or super().permits(address)

    def look_up(self, host: str, port: int) -> list[AddrInfo]:
        self.looked_up.append(host)
        answers = self.names.get(host.rstrip("."))
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        now = answers.pop(0) if len(answers) > 1 else answers[0]
        return [_info(address, port) for address in now]

    def open(self, info: AddrInfo) -> socket.socket:
        made = super().open(info)
        self.opened.append(info[4][0])
        return made


def _info(address: str, port: int) -> AddrInfo:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    """An answer. ``ETag="x"`` is a header; an underscore stands for a hyphen."""
    lines = [f"HTTP/1.1 {status} Whatever"]
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in ({"Content-Length": str(len(body))} | given).items():
        lines.append(f"{name}: {value}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(location: str, status: int = 302) -> bytes:
    return reply(status, Location=location)
