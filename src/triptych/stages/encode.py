"""ROOM 3: media to embeddings, and the embeddings to whoever prefills."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from triptych.engines.base import Encoder, Media
from triptych.errors import MediaError
from triptych.messages import Embedding, Encoded, Job
from triptych.runtime.requests import Reply
from triptych.transfer.exchange import Exchange


async def encode(job: Job, encoder: Encoder) -> tuple[tuple[Media, ...], dict[str, float]]:
    """The items of this hop as embeddings, and the seconds that it took."""
    if not job.items:
        return (), {}
    start = time.monotonic()
    tasks = [asyncio.ensure_future(_encode(job, i, encoder)) for i in job.items]
    try:
        media = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # one that failed takes the others along
            task.cancel()
    return tuple(media), {"encode": time.monotonic() - start}


async def _encode(job: Job, index: int, encoder: Encoder) -> Media:
    """One item; the encoder batches it with whatever else is waiting."""
    try:
        [media] = await encoder.encode([job.work.media[index]])
    except MediaError as error:
        error.param = f"media[{index}]"  # as the client counts
        raise
    return media


async def hand_over(
    media: Sequence[Media], spent: dict[str, float], exchange: Exchange, reply: Reply
) -> None:
    """Offer the embeddings for as long as the caller keeps the call open."""
    async with AsyncExitStack() as offers:
        tickets = [await offers.enter_async_context(exchange.offer(m.arrays)) for m in media]
        embeddings = tuple(Embedding(m.meta, t) for m, t in zip(media, tickets, strict=True))
        reply.send(Encoded(embeddings, spent))
        await reply.hold()
