"""The engine without a model, for tests and benchmarks.

Tokens are a hash of prompt, media keys, seed and position, so that every pattern gives the same
ones. It schedules steps, allocates blocks, caches prefixes and hands over like a real engine, and
verifies every byte that another worker encoded or prefilled. It does not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triptych.checkpoint import Model, open_model, packaged_folder
from triptych.config import Config, FakeSettings
from triptych.engines.base import (
    Allocate,
    EngineReport,
    LoadedEngine,
    Media,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.fake import content
from triptych.engines.fake.engine import FakeEngine
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.recipe import FrameSampling, GridImage, GridVideo, MelAudio, Normalization, Recipes
from triptych.topology import Role

EncodeCall = tuple[Sequence[PreparedMedia], asyncio.Future[None]]  # items, and their end

_TONE = Normalization(
    1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
_FRAMES = FrameSampling("qwen2", fps=2.0, count=0, least=4, most=768, patch=2)


def load(config: Config, role: Role, allocate: Allocate, progress: ReportProgress) -> LoadedEngine:
    model = open_model(config.model or packaged_folder("qwen"), config.max_model_len)
    encoder = FakeEncoder(model, config.fake, allocate) if role.encodes else None
    engine = FakeEngine(model, config.fake, allocate) if role.phases else None
    progress("fake engine", 1.0)

    def report() -> EngineReport:
        return with_encoder_stats(engine.report() if engine else EngineReport(), encoder)

    def close() -> None:
        if encoder:
            encoder.close()
        if engine:
            engine.close()

    cache = engine.cache if engine else None
    return LoadedEngine(encoder, engine, report, close, cache=cache, resumes=engine is not None)


class FakeEncoder:
    """Encodes one batch at a time; an embedding repeats its media key.

    Without the setting ``decode`` it takes any file as it is and refuses none; with it, the decode
    pool prepares files as for Qwen2.5-VL.
    """

    def __init__(self, model: Model, settings: FakeSettings, allocate: Allocate) -> None:
        self._revision = model.revision
        self._seconds = settings.encode_ms / 1e3
        self._decode = settings.decode
        self._allocate = allocate
        self._waiting: list[EncodeCall] = []
        self._batch: list[EncodeCall] = []  # being encoded now
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
        rows = self._allocate("float32", (meta.tokens, content.ROW))
        rows.buffer[:] = content.embedding_bytes(meta)
        self._items += 1
        return Media(meta, (rows,))

    def close(self) -> None:
        for _, done in (*self._waiting, *self._batch):
            done.cancel()
        if self._task is not None:
            self._task.cancel()


def _count(calls: Sequence[EncodeCall]) -> int:
    """The items of calls that still wait."""
    return sum(len(items) for items, done in calls if not done.done())
