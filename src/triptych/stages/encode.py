"""ROOM 3: media to embeddings, and the embeddings to whoever prefills.

An item goes one way: known already, or else decoded and prepared in the pool, or else encoded; and
however many ask for the same one at once, each step is taken once. Salts keep tenants apart.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from triptych.engines.base import Allocate, Encoder, Media
from triptych.errors import InvalidMedia, MediaError, TicketLost
from triptych.media.base import PreparedMedia, digest_of
from triptych.media.pool import DecodePool
from triptych.messages import (
    Embedding,
    EncodeResult,
    Job,
    MediaItem,
    MediaKind,
    MediaMeta,
    PreparedItem,
)
from triptych.runtime.caching import SingleFlight
from triptych.runtime.server import Reply
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.transfer.base import LOOP_COPY_BYTES
from triptych.transfer.client import TransferClient


class EncodeStage:
    """``pool`` is None where the encoder takes files as they are."""

    def __init__(
        self,
        encoder: Encoder,
        pool: DecodePool | None,
        cache: EmbeddingCache,
        transfers: TransferClient,
    ) -> None:
        self._encoder = encoder
        self._pool = pool
        self._transfers = transfers
        self._flights: SingleFlight[Media] = SingleFlight()
        self.cache = cache

    @property
    def counters(self) -> dict[str, float]:
        pool = {} if self._pool is None else self._pool.counters
        return {**pool, **self.cache.counters, "encodes_joined": self._flights.joined}

    @property
    def queued(self) -> int:
        return 0 if self._pool is None else self._pool.queued + self._pool.running

    def takes(self, kind: MediaKind) -> bool:
        recipes = self._encoder.recipes
        return recipes is None or getattr(recipes, kind) is not None

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def encode(self, job: Job) -> tuple[tuple[Media, ...], dict[str, float]]:
        """The items of this hop as embeddings, and the seconds that it took."""
        if not job.items:
            return (), {}
        start = time.monotonic()
        spent: dict[str, float] = {}
        tasks = [asyncio.ensure_future(self._named(job, i, spent)) for i in job.items]
        try:
            media = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one that failed takes the others along
                task.cancel()
            tasks.clear()  # else an error would hold them, and they it, until a collection
        whole = time.monotonic() - start
        spent["encode"] = max(0.0, whole - spent.get("prepare", 0.0))
        return tuple(media), spent

    async def encode_alone(self, item: MediaItem, salt: str) -> Media:
        """One item, outside of any request."""
        return await self._known(item, salt, {})

    async def _named(self, job: Job, index: int, spent: dict[str, float]) -> Media:
        try:
            return await self._known(job.work.media[index], job.work.salt, spent)
        except MediaError as error:
            error.param = f"media[{index}]"  # as the client counts
            raise

    async def _known(self, item: MediaItem, salt: str, spent: dict[str, float]) -> Media:
        """The item's embedding: kept, being made, or made now."""
        if item.prepared is not None:
            return await self._borrowed(item.prepared, salt)
        digest = await digest_of(item)
        if (found := self.cache.find_file(salt, digest)) is not None:
            return found

        async def make() -> Media:
            start = time.monotonic()
            prepared = await self._prepare(item, digest, salt)
            spent["prepare"] = max(spent.get("prepare", 0.0), time.monotonic() - start)
            encode = functools.partial(self._encode, prepared)
            media = await self._once(prepared.meta.key, salt, encode)
            self.cache.link(salt, digest, media.meta.key)
            return media

        return await self._flights.join((salt, "file", digest), make)

    async def _prepare(self, item: MediaItem, digest: bytes, salt: str) -> PreparedMedia:
        if self._pool is not None:
            return await self._pool.prepare(item, salt, digest)
        if not len(item.data):
            raise InvalidMedia("The file is empty.")
        return PreparedMedia(MediaMeta(digest, 0, kind=item.kind), (), cost=1)

    async def _borrowed(self, item: PreparedItem, salt: str) -> Media:
        """Of an item that was decoded elsewhere: its memory may be taken back while we read.

        Whoever only waited for another's turns to their own ticket when that one's is lost.
        """
        mine = False

        async def make() -> Media:
            nonlocal mine
            mine = True
            async with self._transfers.borrow(item.ticket) as fetched:
                prepared = PreparedMedia(item.meta, fetched.arrays, item.cost, item.encoded)
                media = await self._encode(prepared)
                fetched.check()
                return media

        while True:
            try:
                return await self._once(item.meta.key, salt, make)
            except TicketLost:
                if mine:
                    raise

    async def _once(self, key: bytes, salt: str, make: Callable[[], Awaitable[Media]]) -> Media:
        """Encoded once for all who ask now, whatever files they have it from, and kept."""
        if (found := self.cache.find(salt, key)) is not None:
            return found

        async def make_and_keep() -> Media:
            self.cache.misses += 1
            media = await make()
            self.cache.keep(salt, media)
            return media

        return await self._flights.join((salt, "content", key), make_and_keep)

    async def _encode(self, prepared: PreparedMedia) -> Media:
        if prepared.encoded:
            return await _own(prepared, self._transfers.empty)
        [media] = await self._encoder.encode([prepared])
        return media


async def _own(prepared: PreparedMedia, empty: Allocate) -> Media:
    """An embedding that the client brought, in memory that leaves without a copy."""

    def copy() -> Media:
        arrays = []
        for array in prepared.arrays:
            own = empty(array.dtype, array.shape)
            own.buffer[:] = array.buffer
            arrays.append(own)
        return Media(prepared.meta, tuple(arrays))

    return copy() if prepared.size <= LOOP_COPY_BYTES else await asyncio.to_thread(copy)


async def offer_embeddings(
    media: Sequence[Media],
    spent: dict[str, float],
    transfers: TransferClient,
    reply: Reply,
    by: str = "",
) -> None:
    """Offer the embeddings for as long as the caller keeps the call open.

    ``by``: the transport that their readers can take.
    """
    async with AsyncExitStack() as offers:
        tickets = [
            await offers.enter_async_context(transfers.offer(m.arrays, by=by)) for m in media
        ]
        embeddings = tuple(Embedding(m.meta, t) for m, t in zip(media, tickets, strict=True))
        reply.send(EncodeResult(embeddings, spent))
        await reply.hold()
