"""Encode: media items to embeddings, which the prefill worker reads by ticket.

An item is found in the embedding cache, or prepared in the decode pool and encoded. Each of these
steps runs once however many requests need the same item at once. Salts keep tenants apart.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from triptych.engines.base import Encoder, Media, copy_arrays
from triptych.errors import EngineFailed, InvalidMedia, MediaError, TicketLost
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

log = logging.getLogger(__name__)


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
        """The embeddings of the job's items, and the seconds by stage."""
        if not job.items:
            return (), {}
        start = time.monotonic()
        timings: dict[str, float] = {}
        tasks = [asyncio.ensure_future(self._encode_item(job, i, timings)) for i in job.items]
        try:
            media = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one failure cancels all
                task.cancel()
            tasks.clear()  # breaks a reference cycle between the tasks and an error
        total = time.monotonic() - start
        timings["encode"] = max(0.0, total - timings.get("prepare", 0.0))
        return tuple(media), timings

    async def encode_alone(self, item: MediaItem, salt: str) -> Media:
        """The embedding of one item that belongs to no job."""
        return await self._find_or_encode(item, salt, {})

    async def _encode_item(self, job: Job, index: int, timings: dict[str, float]) -> Media:
        try:
            return await self._find_or_encode(job.work.media[index], job.work.salt, timings)
        except MediaError as error:
            error.param = f"media[{index}]"  # counted as in the request
            raise
        except EngineFailed:
            extra = {"request_id": job.work.id}
            log.exception("the encoder failed on media item %d", index, extra=extra)
            raise

    async def _find_or_encode(self, item: MediaItem, salt: str, timings: dict[str, float]) -> Media:
        """The item's embedding: cached, being computed for another request, or computed now."""
        if item.prepared is not None:
            return await self._encode_prepared(item.prepared, salt)
        digest = await digest_of(item)
        if (found := self.cache.find_file(salt, digest)) is not None:
            return found

        async def make() -> Media:
            start = time.monotonic()
            prepared = await self._prepare(item, digest, salt)
            timings["prepare"] = max(timings.get("prepare", 0.0), time.monotonic() - start)
            encode = functools.partial(self._encode, prepared)
            media = await self._encode_once(prepared.meta.key, salt, encode)
            self.cache.link(salt, digest, media.meta.key)
            return media

        return await self._flights.join((salt, "file", digest), make)

    async def _prepare(self, item: MediaItem, digest: bytes, salt: str) -> PreparedMedia:
        if self._pool is not None:
            return await self._pool.prepare(item, salt, digest)
        if not len(item.data):
            raise InvalidMedia("The file is empty.")
        return PreparedMedia(MediaMeta(digest, 0, kind=item.kind), (), cost=1)

    async def _encode_prepared(self, item: PreparedItem, salt: str) -> Media:
        """The embedding of an item that the frontend decoded; it may release the memory meanwhile.

        A request that waited for another's ticket tries its own when that one is lost.
        """
        used_own_ticket = False

        async def make() -> Media:
            nonlocal used_own_ticket
            used_own_ticket = True
            async with self._transfers.borrow(item.ticket) as fetched:
                prepared = PreparedMedia(item.meta, fetched.arrays, item.cost, item.encoded)
                media = await self._encode(prepared)
                fetched.check()
                return media

        while True:
            try:
                return await self._encode_once(item.meta.key, salt, make)
            except TicketLost:
                if used_own_ticket:
                    raise

    async def _encode_once(
        self, key: bytes, salt: str, make: Callable[[], Awaitable[Media]]
    ) -> Media:
        """Encode content once for all requests that need it now, and cache it."""
        if (found := self.cache.find(salt, key)) is not None:
            return found

        async def make_and_cache() -> Media:
            self.cache.misses += 1
            media = await make()
            self.cache.keep(salt, media)
            return media

        return await self._flights.join((salt, "content", key), make_and_cache)

    async def _encode(self, prepared: PreparedMedia) -> Media:
        if prepared.encoded:  # an embedding that the client sent
            copy = functools.partial(copy_arrays, prepared.arrays, self._transfers.empty)
            small = prepared.size <= LOOP_COPY_BYTES
            return Media(prepared.meta, copy() if small else await asyncio.to_thread(copy))
        [media] = await self._encoder.encode([prepared])
        return media


async def offer_embeddings(
    media: Sequence[Media],
    timings: dict[str, float],
    transfers: TransferClient,
    reply: Reply,
    transport: str = "",
) -> None:
    """Offer the embeddings by ticket while the caller keeps the call open.

    ``transport``: one that their readers can use.
    """
    async with AsyncExitStack() as offers:
        tickets = [
            await offers.enter_async_context(transfers.offer(m.arrays, by=transport)) for m in media
        ]
        embeddings = tuple(Embedding(m.meta, t) for m, t in zip(media, tickets, strict=True))
        reply.send(EncodeResult(embeddings, timings))
        await reply.wait_until_closed()
