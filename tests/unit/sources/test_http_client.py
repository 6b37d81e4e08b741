"""The client's connections: which are used again, and which address is used."""

import asyncio

import pytest

from support.fetching import Fetching
from support.origin import OPEN, NamedGate, Origin, reply
from triptych.errors import ServiceError
from triptych.sources import http_client


async def test_a_connection_that_the_server_gave_up_is_replaced_once():
    async def once(writer, asked):
        if len(origin.asked) % 2:
            writer.write(reply(200, b"a"))
        else:
            writer.close()

    async with Origin({"/a": once}) as origin, Fetching() as f:
        assert await f.get(origin.url("/a")) == b"a"
        assert await f.get(origin.url("/a")) == b"a"  # on the first connection it was closed
        assert (len(origin.asked), origin.accepts) == (3, 2)


async def test_unexpected_bytes_close_an_idle_connection():
    async def chatty(writer, asked):
        writer.write(reply(200, b"a"))
        await writer.drain()
        await went_idle.wait()
        writer.write(reply(200, b"hidden"))

    went_idle = asyncio.Event()
    async with Origin({"/a": chatty}) as origin, Fetching() as f:
        assert await f.get(origin.url("/a")) == b"a"
        went_idle.set()
        await origin.until_left()
        assert await f.get(origin.url("/a")) == b"a"
        assert origin.accepts == 2


async def test_idle_connections_close_after_a_while(monkeypatch):
    monkeypatch.setattr(http_client, "ORIGIN_IDLE_SECONDS", 0.01)
    async with Origin({"/a": reply(200, b"a")}) as origin, Fetching() as f:
        assert await f.get(origin.url("/a")) == b"a"
        await origin.until_left()
        assert await f.get(origin.url("/a")) == b"a"
        assert origin.accepts == 2


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
async def test_an_address_that_leads_nowhere_does_not_hide_the_next(monkeypatch, hangs):
    real = http_client._connected

    async def connected(gate, info):
        if hangs and info[4][0] == "127.0.0.1":
            await asyncio.sleep(60)
        return await real(gate, info)

    monkeypatch.setattr(http_client, "_connected", connected)
    names = {"two.test": [["127.0.0.1", OPEN]]}
    async with (
        Origin({"/a": reply(200, b"a")}) as origin,  # at OPEN alone
        Fetching(gate=NamedGate(names, private=True)) as f,
    ):
        assert await f.get(origin.url("/a", "two.test")) == b"a"


async def test_running_out_of_descriptors_is_a_server_error_worth_a_retry(monkeypatch):
    class Full(NamedGate):
        def open(self, info):
            raise OSError(24, "Too many open files")

    async with Fetching(gate=Full()) as f:
        with pytest.raises(ServiceError, match="Try again"):
            await f.get("http://ok.test/")
