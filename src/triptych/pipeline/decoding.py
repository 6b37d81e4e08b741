"""Media decoded before the walk (``--decode-at frontend``): they go to the encoder by ticket.

The recipes are the encoder's, asked for once. What an encoder takes as it is, stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from triptych.config import Config
from triptych.errors import MediaError, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.media.pool import DecodePool
from triptych.messages import GetRecipes, MediaItem, PreparedItem, Ticket, WorkerAnswer
from triptych.pipeline.membership import Membership
from triptych.recipe import Recipes
from triptych.topology import Role
from triptych.transfer.client import TransferClient
from triptych.transfer.segment import memory_domain

ASK_SECONDS = 2.0
LIFETIME = 600.0  # of a ticket whose scope is not left before


class DecodedOffer:
    """Items that encoders may read until ``close``."""

    def __init__(self, transfers: TransferClient, count: int, by: str) -> None:
        self._by = by
        self.items: list[MediaItem | None] = [None] * count
        self._transfers = transfers
        # What was decoded stays known to its pool for as long as there is a copy of it: so the
        # pool's bound is one for both.
        self._held: list[tuple[Ticket, PreparedMedia]] = []

    async def add(self, index: int, item: MediaItem, prepared: PreparedMedia) -> None:
        ticket = await self._transfers.publish(prepared.arrays, lifetime=LIFETIME, by=self._by)
        self._held.append((ticket, prepared))
        there = PreparedItem(prepared.meta, ticket, prepared.cost, prepared.encoded)
        self.items[index] = msgspec.structs.replace(item, data=b"", prepared=there)

    def close(self) -> None:
        """Give everything back. May be called again."""
        while self._held:
            self._transfers.release(self._held.pop()[0])


class FrontendDecoding:
    """``role``: of those who know the recipes."""

    def __init__(
        self, config: Config, membership: Membership, role: Role, transfers: TransferClient
    ) -> None:
        self._config = config
        self._membership = membership
        self._role = role
        self._transfers = transfers
        self._pool: DecodePool | None = None
        self._recipes: Recipes | None = None
        self._proving = asyncio.Lock()
        self._nixl: bool | None = None  # whether it works here; None: nobody needed it yet

    @property
    def counters(self) -> dict[str, float]:
        return {} if self._pool is None else self._pool.counters

    @property
    def tickets(self) -> int:
        """Decoded items that encoders may still read."""
        return self._transfers.counts().tickets

    async def offer(self, items: Sequence[MediaItem], salt: str) -> DecodedOffer | None:
        """The items with tickets instead of files; None: encoders take files as they are."""
        if self._recipes is None:
            self._recipes = await self._ask()
        if not self._recipes.revision:
            return None
        if self._pool is None:
            self._pool = DecodePool(self._recipes, self._config)
        offered = DecodedOffer(self._transfers, len(items), await self._transport())
        tasks = [
            asyncio.ensure_future(self._prepare(self._pool, offered, index, item, salt))
            for index, item in enumerate(items)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # one that failed takes the others along
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # none may still add to it
            offered.close()
            raise
        finally:
            tasks.clear()  # else an error would hold them, and they it, until a collection
        return offered

    async def _transport(self) -> str:
        """By which encoders can read what lies here; heeded where the transport is auto."""
        transport = self._membership.common_transport(memory_domain())
        if transport == "nixl" and self._config.transport == "auto" and not await self._moves():
            return "inline"
        return transport

    async def _moves(self) -> bool:
        """Whether NIXL works here. Tried when it is first needed: it opens a port."""
        async with self._proving:
            if self._nixl is None:
                self._nixl = "nixl" in await self._transfers.prove()
        return self._nixl

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._transfers.close()

    async def _prepare(
        self, pool: DecodePool, offered: DecodedOffer, index: int, item: MediaItem, salt: str
    ) -> None:
        try:
            prepared = await pool.prepare(item, salt)
        except MediaError as error:
            error.param = f"media[{index}]"  # as the client counts
            raise
        await offered.add(index, item, prepared)

    async def _ask(self) -> Recipes:
        """How the encoders want their media prepared: the same for all, and for good."""
        answers: list[WorkerAnswer] = []
        call = self._membership.choose(self._role).call(GetRecipes(), answers.append)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await call.done()
        except TimeoutError:
            raise WorkerLost("An encoder did not say how it wants its media. Try again.") from None
        finally:
            call.close()
        recipes = [answer for answer in answers if isinstance(answer, Recipes)]
        if not recipes:
            raise WorkerLost("An encoder did not say how it wants its media. Try again.")
        return recipes[0]
