"""Media decoding in the frontend (``--decode-at frontend``): encoders get tickets, not files.

The frontend asks an encoder for its recipes once. Encoders that take files as they are get files.
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
from triptych.transfer.registry import TRANSPORTS, TransferEndpoint
from triptych.transfer.segment import memory_domain

RECIPES_SECONDS = 2.0
TICKET_SECONDS = 600.0  # after which a ticket expires that was not released


class DecodedOffer:
    """Decoded items that encoders may read until ``close``."""

    def __init__(self, transfers: TransferClient, count: int, by: str) -> None:
        self._by = by
        self.items: list[MediaItem | None] = [None] * count
        self._transfers = transfers
        # Tickets with their items: an item counts in the pool's bound while it is referenced.
        self._published: list[tuple[Ticket, PreparedMedia]] = []

    async def add(self, index: int, item: MediaItem, prepared: PreparedMedia) -> None:
        ticket = await self._transfers.publish(
            prepared.arrays, lifetime=TICKET_SECONDS, by=self._by
        )
        self._published.append((ticket, prepared))
        there = PreparedItem(prepared.meta, ticket, prepared.cost, prepared.encoded)
        self.items[index] = msgspec.structs.replace(item, data=b"", prepared=there)

    def close(self) -> None:
        """Release all tickets. May be called again."""
        while self._published:
            self._transfers.release(self._published.pop()[0])


class FrontendDecoding:
    """``role``: of the workers that encode, and so have the recipes."""

    def __init__(
        self, config: Config, membership: Membership, role: Role, transfers: TransferClient
    ) -> None:
        self._config = config
        self._membership = membership
        self._role = role
        self._transfers = transfers
        self._pool: DecodePool | None = None
        self._recipes: Recipes | None = None
        self._checking = asyncio.Lock()
        self._transports: tuple[str, ...] = ()  # that work here; none: not checked yet

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
            self._recipes = await self._get_recipes()
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
            for task in tasks:  # one failure cancels all
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # so that none adds to it later
            offered.close()
            raise
        finally:
            tasks.clear()  # breaks a reference cycle between the tasks and an error
        return offered

    async def _transport(self) -> str:
        """A transport by which encoders can read from this process, for ``--transport auto``.

        Transports that may fail to open are tried when an encoder is first on another host: NIXL
        opens a port, and the id of a shared folder is known once it is open.
        """
        transports = self._transports or self._transfers.readable
        transport = self._membership.common_transport(
            TransferEndpoint(memory_domain(), "", transports, self._transfers.folder)
        )
        named = self._config.transport != "auto"
        if named or self._transports or not TRANSPORTS[transport].between_hosts:
            return transport
        async with self._checking:
            if not self._transports:
                self._transports = await self._transfers.check_transports(other_hosts=True)
        return await self._transport()

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
            error.param = f"media[{index}]"  # counted as in the request
            raise
        await offered.add(index, item, prepared)

    async def _get_recipes(self) -> Recipes:
        """The recipes of the encoders: the same for all of them, and they do not change."""
        answers: list[WorkerAnswer] = []
        call = self._membership.choose(self._role).call(GetRecipes(), answers.append)
        try:
            async with asyncio.timeout(RECIPES_SECONDS):
                await call.done()
        except TimeoutError:
            raise WorkerLost("An encoder did not send its media recipes. Try again.") from None
        finally:
            call.close()
        recipes = [answer for answer in answers if isinstance(answer, Recipes)]
        if not recipes:
            raise WorkerLost("An encoder did not send its media recipes. Try again.")
        return recipes[0]
