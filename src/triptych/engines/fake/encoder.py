"""The fake encoder: one batch at a time, each taking the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triptych.checkpoint import Model
from triptych.config import FakeSettings
from triptych.engines.base import Allocate, Media
from triptych.engines.fake import content
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.recipe import FrameSampling, GridImage, GridVideo, MelAudio, Normalization, Recipes

Asked = tuple[Sequence[PreparedMedia], asyncio.Future[None]]  # items, and who waits for them

_TONE = Normalization(
    1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
_FRAMES = FrameSampling("qwen2", fps=2.0, count=0, least=4, most=768, patch=2)


class FakeEncoder:
    """An embedding repeats its media key. Without ``decode`` in the settings it takes any file as
    it is, so that nothing is refused; with it, files are prepared as for Qwen2.5-VL."""

    def __init__(self, model: Model, settings: FakeSettings, empty: Allocate) -> None:
        self._revision = model.revision
        self._seconds = settings.encode_ms / 1e3
        self._decode = settings.decode
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

    @property
    def recipes(self) -> Recipes | None:
        if not self._decode:
            return None
        return Recipes(
            self._revision,
            image=GridImage(14, 2, 56 * 56, 28 * 28 * 16384, 3, _TONE),
            video=GridVideo(_FRAMES, 14, 2, 128 * 28 * 28, 768 * 28 * 28, True, 3, _TONE),
            audio=MelAudio(rate=16000, fft=400, hop=160, mels=128, max_frames=3000),
        )

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, done))
        if self._task is None:
            self._task = asyncio.create_task(self._encode_batches())
        await done
        return [self._media(item) for item in items]

    async def _encode_batches(self) -> None:
        try:
            while self._waiting:
                self._batch, self._waiting = self._waiting, []
                self._batches += 1
                await asyncio.sleep(self._seconds)
                for _, done in self._batch:
                    if not done.done():  # else the request was cancelled
                        done.set_result(None)
        finally:
            self._batch = []
            self._task = None

    def _media(self, item: PreparedMedia) -> Media:
        key = item.meta.key
        meta = MediaMeta(key, content.media_tokens(key), kind=item.meta.kind)
        rows = self._empty("float32", (meta.tokens, content.ROW))
        rows.buffer[:] = content.embedding_bytes(meta)
        self._items += 1
        return Media(meta, (rows,))

    def close(self) -> None:
        for _, done in (*self._waiting, *self._batch):
            done.cancel()
        if self._task is not None:
            self._task.cancel()


def _count(asked: Sequence[Asked]) -> int:
    """The items of those who still wait."""
    return sum(len(items) for items, done in asked if not done.done())
