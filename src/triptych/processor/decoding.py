"""Media decoded beside the frontend (``--decode-at frontend``), to the encoder by ticket.

The recipes are the encoder's, asked for once. What an encoder takes as it is, stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from triptych.config import Config
from triptych.errors import MediaError
from triptych.media.pool import DecodePool
from triptych.messages import MediaItem, PreparedItem
from triptych.recipe import Recipes
from triptych.transfer.exchange import Exchange


class Decoding:
    def __init__(
        self, config: Config, recipes: Callable[[], Awaitable[Recipes]], exchange: Exchange
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._exchange = exchange
        self._pool: DecodePool | None = None

    @property
    def counters(self) -> dict[str, float]:
        return {} if self._pool is None else self._pool.counters

    @property
    def tickets(self) -> int:
        """Decoded items that encoders may still read."""
        return self._exchange.counts().tickets

    @asynccontextmanager
    async def prepared(
        self, items: Sequence[MediaItem], salt: str
    ) -> AsyncIterator[tuple[MediaItem, ...]]:
        """The items with tickets instead of files, for as long as the scope is open."""
        recipes = await self._recipes()
        if not recipes.revision:
            yield tuple(items)
            return
        if self._pool is None:
            self._pool = DecodePool(recipes, self._config)
        async with AsyncExitStack() as offers:
            tasks = [
                asyncio.ensure_future(self._prepare(self._pool, item, index, salt, offers))
                for index, item in enumerate(items)
            ]
            try:
                ready = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one that failed takes the others along
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # none may still enter offers
            yield tuple(ready)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._exchange.close()

    async def _prepare(
        self, pool: DecodePool, item: MediaItem, index: int, salt: str, offers: AsyncExitStack
    ) -> MediaItem:
        try:
            prepared = await pool.prepare(item, salt)
        except MediaError as error:
            error.param = f"media[{index}]"
            raise
        ticket = await offers.enter_async_context(self._exchange.offer(prepared.arrays))
        there = PreparedItem(prepared.meta, ticket, prepared.cost, prepared.encoded)
        return msgspec.structs.replace(item, data=b"", prepared=there)
