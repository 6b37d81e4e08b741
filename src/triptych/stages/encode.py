"""ROOM 3: media to embeddings, and the embeddings to whoever prefills."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from triptych.engines.base import Encoder, Media
from triptych.messages import Embedding, Encoded, Job
from triptych.runtime.requests import Reply
from triptych.transfer.exchange import Exchange


async def encode(job: Job, encoder: Encoder) -> tuple[tuple[Media, ...], dict[str, float]]:
    """The items of this hop as embeddings, and the seconds that it took."""
    if not job.items:
        return (), {}
    start = time.monotonic()
    media = await encoder.encode([job.work.media[i] for i in job.items])
    return tuple(media), {"encode": time.monotonic() - start}


async def hand_over(
    media: Sequence[Media], spent: dict[str, float], exchange: Exchange, reply: Reply
) -> None:
    """Offer the embeddings for as long as the caller keeps the call open."""
    async with AsyncExitStack() as offers:
        tickets = [await offers.enter_async_context(exchange.offer(m.arrays)) for m in media]
        embeddings = tuple(Embedding(m.meta, t) for m, t in zip(media, tickets, strict=True))
        reply.send(Encoded(embeddings, spent))
        await reply.hold()
