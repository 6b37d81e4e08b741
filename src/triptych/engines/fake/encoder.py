"""The fake encoder: one batch at a time, each taking the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triptych.config import FakeSettings
from triptych.engines.base import Empty, Media
from triptych.engines.fake import content
from triptych.errors import InvalidMedia
from triptych.messages import MediaItem, MediaMeta
from triptych.model import Model

Asked = tuple[Sequence[MediaItem], asyncio.Future[list[bytes]]]  # items, and where their keys go


class FakeEncoder:
    """The media key hashes the file as it was sent: nothing is decoded, so nothing is refused
    but an empty file."""

    def __init__(self, model: Model, settings: FakeSettings, empty: Empty) -> None:
        self._revision = model.revision
        self._seconds = settings.encode_ms / 1e3
        self._empty = empty
        self._waiting: list[Asked] = []
        self._batch: list[Asked] = []  # being encoded now
        self._task: asyncio.Task[None] | None = None
        self._items = 0  # encoded so far
        self._batches = 0

    @property
    def queued(self) -> int:
        return _count(self._waiting)

    @property
    def running(self) -> int:
        return _count(self._batch)

    @property
    def counters(self) -> dict[str, float]:
        return {"encoded_items": self._items, "encoder_batches": self._batches}

    async def encode(self, items: Sequence[MediaItem]) -> list[Media]:
        if not all(len(item.data) for item in items):
            raise InvalidMedia("The image is an empty file.", param="messages")
        keys: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, keys))
        if self._task is None:
            self._task = asyncio.create_task(self._encode_batches())
        return [self._media(key) for key in await keys]

    async def _encode_batches(self) -> None:
        try:
            while self._waiting:
                self._batch, self._waiting = self._waiting, []
                self._batches += 1
                await asyncio.sleep(self._seconds)
                for items, keys in self._batch:
                    if keys.done():  # the request was cancelled
                        continue
                    found = await asyncio.to_thread(self._keys, items)
                    if not keys.done():
                        keys.set_result(found)
        finally:
            self._batch = []
            self._task = None

    def _keys(self, items: Sequence[MediaItem]) -> list[bytes]:
        return [content.media_key(item.data, self._revision) for item in items]

    def _media(self, key: bytes) -> Media:
        meta = MediaMeta(key, content.media_tokens(key))
        rows = self._empty("float32", (meta.tokens, content.ROW))
        rows.buffer[:] = content.embedding_bytes(meta)
        self._items += 1
        return Media(meta, (rows,))

    def close(self) -> None:
        for _, keys in (*self._waiting, *self._batch):
            keys.cancel()
        if self._task is not None:
            self._task.cancel()


def _count(asked: Sequence[Asked]) -> int:
    """The items of those who still wait."""
    return sum(len(items) for items, keys in asked if not keys.done())
