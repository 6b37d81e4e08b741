"""The request plane http: what other clients get at its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from triptych.runtime.connection import WorkerConnection
from triptych.runtime.planes import Planes, http
from triptych.runtime.server import CallServer

SECRET = "a cluster's secret"


@pytest.fixture
async def server() -> AsyncIterator[CallServer]:
    async def nothing(ask: object, reply: object) -> None: ...

    server = CallServer(nothing, SECRET, "PD-0", 7)
    await server.start("127.0.0.1", 0, Planes().named("http"))
    yield server
    await server.close()


@pytest.fixture
def address(server: CallServer) -> str:
    assert server._listening is not None
    return server._listening.address


async def test_a_request_without_websocket_upgrade_is_refused(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(address) as answer:
            assert (answer.status, answer.headers["Upgrade"]) == (426, "websocket")
        for url in (address + "/more", address.removesuffix("/triptych")):
            async with session.get(url) as answer:
                assert answer.status == 404


async def test_a_message_that_is_too_large_is_refused(address: str, server: CallServer) -> None:
    """With no ``max_msg_size`` it is read whole, and closed for what is in it."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as ends:
        await ends.send_bytes(b"x" * (http._LARGEST_MESSAGE + 1))
        async with asyncio.timeout(20):
            while (await ends.receive()).type is aiohttp.WSMsgType.BINARY:
                pass
        assert ends.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


@pytest.mark.parametrize("said", [b"", b"GET /triptych HTTP/1.1\r\nHost: x\r\n"])
async def test_a_request_that_never_completes_is_disconnected(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the timer in ``_Listening._accept`` it stays."""
    monkeypatch.setattr(http, "HELLO_SECONDS", 0.1)

    async def nothing(ask: object, reply: object) -> None: ...

    server = CallServer(nothing, SECRET, "PD-0", 7)
    address = await server.start("127.0.0.1", 0, Planes().named("http"))
    port = int(address.removesuffix("/triptych").rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7)
    await asyncio.sleep(0.3)
    assert not connection.closing  # an accepted connection stays
    await connection.close()
    await server.close()


async def test_an_address_that_answers_otherwise_is_a_lost_worker(address: str) -> None:
    from triptych.errors import WorkerLost

    with pytest.raises(WorkerLost):
        await WorkerConnection.open(address + "/wrong", SECRET, "PD-0", 7)


async def test_f28_a_flood_of_requests_that_cannot_be_read_is_a_line_and_a_count(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp logs a traceback for each. Proved without the logger that is given to it."""
    port = int(address.split("/")[2].rpartition(":")[2])
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /triptych HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
    assert 1 <= len(caplog.messages) <= 2
    assert not any(record.exc_info for record in caplog.records)
