"""The one place where what a request names becomes MediaItems: bytes, and where they stand.

Knows neither HTTP nor how a source is read: that is ``sources``'. Nothing here looks at the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from triptych.errors import RequestError
from triptych.messages import MediaForm, MediaItem, MediaKind
from triptych.prompt.processor import MediaSource, PlacedMedia
from triptych.sources.budget import MediaReservation, request_media_too_large

MAX_PARALLEL_LOADS = 8  # sources of one request that are read together


class Sources(Protocol):
    """What reads them, as far as it is seen from here."""

    @property
    def counters(self) -> dict[str, float]: ...

    def hold(self, scope: str) -> MediaReservation: ...

    async def load(
        self,
        source: MediaSource,
        kind: MediaKind,
        form: MediaForm,
        scope: str,
        hold: MediaReservation,
    ) -> bytes | memoryview: ...


@asynccontextmanager
async def load_items(
    media: Sequence[PlacedMedia], sources: Sources, scope: str
) -> AsyncIterator[tuple[MediaItem, ...]]:
    """The media of a prompt, in its order, held for as long as the scope is open.

    One that can't be had fails them all. ``scope``: the tenant and its salt, whose uploads and
    cached files may be used.
    """
    with sources.hold(scope) as hold:
        yield await _items(media, sources, scope, hold)


async def _items(
    media: Sequence[PlacedMedia], sources: Sources, scope: str, hold: MediaReservation
) -> tuple[MediaItem, ...]:
    """What is named several times is loaded once, but counted each time: so often it is sent."""
    once: dict[Hashable, PlacedMedia] = {}
    for placed in media:
        once.setdefault(_source(placed), placed)
    loaded = dict(zip(once, await _all(once.values(), sources, scope, hold), strict=True))
    made, total = [], 0
    for placed in media:
        data = loaded[_source(placed)]
        total += len(data)
        if total > hold.limit:
            raise request_media_too_large(hold.limit, placed.place)
        made.append(MediaItem(placed.part.kind, placed.at, data, placed.part.form))
    return tuple(made)


async def _all(
    media: Collection[PlacedMedia], sources: Sources, scope: str, hold: MediaReservation
) -> Sequence[bytes | memoryview]:
    """Of each the bytes, a few at a time. When one fails, the others are over before it is told."""
    turnstile = asyncio.Semaphore(MAX_PARALLEL_LOADS)

    async def load(placed: PlacedMedia) -> bytes | memoryview:
        part = placed.part
        async with turnstile:
            try:
                return await sources.load(part.source, part.kind, part.form, scope, hold)
            except RequestError as error:
                error.param = placed.place
                raise

    if len(media) == 1:
        return [await load(placed) for placed in media]
    tasks = [asyncio.ensure_future(load(placed)) for placed in media]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)
        tasks.clear()  # an error knows this frame, and its task it: all would stay, media too


async def _end(tasks: Sequence[asyncio.Task[bytes | memoryview]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _source(placed: PlacedMedia) -> Hashable:
    """The same for the same: a URL's words, or the very bytes."""
    part = placed.part
    source = part.source if isinstance(part.source, str) else id(part.source)
    return source, part.kind, part.form
