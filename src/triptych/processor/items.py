"""The one place where what a request names becomes MediaItems: bytes, and where they stand.

Knows neither HTTP nor how a source is read: that is ``sources``'. Nothing here looks at the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from triptych.errors import RequestError, TriptychError, first_error
from triptych.messages import Form, Kind, MediaItem
from triptych.processor.prompt import Placed, Source

AT_ONCE = 8  # sources of one request that are read together


class Sources(Protocol):
    """What reads them, as far as it is seen from here."""

    @property
    def counters(self) -> dict[str, float]: ...

    async def load(
        self, source: Source, kind: Kind, form: Form, scope: str
    ) -> bytes | memoryview: ...


async def items(media: Sequence[Placed], sources: Sources, scope: str) -> tuple[MediaItem, ...]:
    """The media of a prompt, in its order; one that can't be had fails them all.

    ``scope``: the tenant and its salt, whose uploads and cached files may be used.
    """
    if len(media) == 1:
        return (await _item(media[0], sources, scope),)
    turnstile = asyncio.Semaphore(AT_ONCE)

    async def item(placed: Placed) -> MediaItem:
        async with turnstile:
            return await _item(placed, sources, scope)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item(placed)) for placed in media]
    except* TriptychError as errors:
        raise first_error(errors) from None
    return tuple(task.result() for task in tasks)


async def _item(placed: Placed, sources: Sources, scope: str) -> MediaItem:
    part = placed.part
    try:
        data = await sources.load(part.source, part.kind, part.form, scope)
    except RequestError as error:
        error.param = placed.place
        raise
    return MediaItem(part.kind, placed.at, data, part.form)
