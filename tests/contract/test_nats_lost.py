"""A server's error makes nats-py close its connection for good: its users are informed."""

from __future__ import annotations

import asyncio

from support.nats_server import nats_server
from triptych.config import Config
from triptych.runtime.planes import open_planes


async def test_a_connection_that_closed_for_good_is_reported() -> None:
    """Also after a restart, which costs nothing. Proved by looking at it never."""
    with nats_server() as server:
        config = Config(join=server.url, request_plane="nats")
        async with open_planes(config, "test") as planes, asyncio.timeout(30):
            client = planes.client
            assert client is not None
            await asyncio.to_thread(server.restart)
            while not client.stats["reconnects"]:
                await asyncio.sleep(0.02)
            assert not planes.lost.is_set()
            await client._process_err("'Account Authentication Expired'")  # as if it was read
            await planes.lost.wait()
        async with open_planes(config, "test") as planes:
            pass
        assert not planes.lost.is_set()
