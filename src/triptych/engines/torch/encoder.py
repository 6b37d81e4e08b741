"""Pictures to embeddings: decoded in threads, encoded in one forward pass for all who wait.

All state lives on the event loop; two executors do the work. Decoding and preprocessing go in
parallel (Pillow and numpy release the GIL); the vision tower runs in a thread of its own, and
whatever has become ready meanwhile makes the next batch. Knows no tickets and no cache.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from triptych.config import Config
from triptych.engines.base import Empty, Media
from triptych.engines.torch import arrays, pictures
from triptych.engines.torch.family import Family, Pixels
from triptych.engines.torch.weights import count_parameters
from triptych.errors import EngineFailed, UnsupportedMediaType
from triptych.messages import MediaItem, MediaMeta
from triptych.model import Model
from triptych.transfer.base import Array


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A picture that is ready to be encoded, and where its embedding goes."""

    pixels: Pixels
    into: Array
    done: asyncio.Future[None]


class TorchEncoder:
    def __init__(
        self, family: Family, module: nn.Module, model: Model, config: Config, empty: Empty
    ) -> None:
        self.parameters = count_parameters(module)
        self.encoded_items = 0
        self.encoder_batches = 0
        self._family = family
        self._module = module
        self._model = model
        self._max_pixels = config.limits.image_pixels
        self._max_patches = config.torch.encode_patches
        self._empty = empty
        self._dtype = arrays.NAMES[next(module.parameters()).dtype]
        self._waiting: deque[Waiting] = deque()
        self._batch: list[Waiting] = []  # in the forward pass now
        self._preparing = 0
        self._prepare_threads = ThreadPoolExecutor(
            min(8, os.cpu_count() or 1), thread_name_prefix="pictures"
        )
        self._forward_thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    @property
    def queued(self) -> int:
        return self._preparing + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def counters(self) -> dict[str, float]:
        return {"encoded_items": self.encoded_items, "encoder_batches": self.encoder_batches}

    async def encode(self, items: Sequence[MediaItem]) -> list[Media]:
        """Embeddings of the items, in order. A bad one fails this call and no other."""
        tasks = [asyncio.ensure_future(self._encode(item)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        for waiting in self._waiting:
            waiting.done.cancel()
        self._waiting.clear()
        self._prepare_threads.shutdown(wait=False, cancel_futures=True)
        self._forward_thread.shutdown(wait=True, cancel_futures=True)

    async def _encode(self, item: MediaItem) -> Media:
        loop = asyncio.get_running_loop()
        self._preparing += 1
        try:
            pixels, key, into = await loop.run_in_executor(
                self._prepare_threads, self._prepare, item
            )
        finally:
            self._preparing -= 1
        waiting = Waiting(pixels, into, loop.create_future())
        self._waiting.append(waiting)
        self._start()
        try:
            await waiting.done
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return Media(MediaMeta(key, pixels.tokens, pixels.grid), (into,))

    def _prepare(self, item: MediaItem) -> tuple[Pixels, bytes, Array]:
        """Pixels, media key, and memory for the embedding: new memory takes the kernel its time."""
        if item.kind != "image" or self._model.image_id is None:
            raise UnsupportedMediaType(f"{self._model.name} takes no {item.kind}.")
        picture = pictures.decode(item.data, self._max_pixels)
        pixels = self._family.preprocess(picture)
        into = self._empty(self._dtype, (pixels.tokens, self._family.hidden))
        return pixels, pictures.media_key(picture, self._model.revision), into

    def _start(self) -> None:
        """Start the next forward pass, unless one is under way or nobody waits."""
        if self._batch or not self._waiting:
            return
        self._batch = self._take()
        future = asyncio.get_running_loop().run_in_executor(
            self._forward_thread, self._forward, self._batch
        )
        future.add_done_callback(partial(self._finish, self._batch))

    def _take(self) -> list[Waiting]:
        """The first who wait, up to the patch budget; one that exceeds it alone goes alone."""
        batch = [self._waiting.popleft()]
        patches = batch[0].pixels.patches
        while self._waiting:
            patches += self._waiting[0].pixels.patches
            if patches > self._max_patches:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _forward(self, batch: Sequence[Waiting]) -> None:
        with torch.inference_mode():
            embeddings = self._family.encode(self._module, [w.pixels for w in batch])
            for waiting, embedding in zip(batch, embeddings, strict=True):
                arrays.view(waiting.into).copy_(embedding)

    def _finish(self, batch: Sequence[Waiting], future: asyncio.Future[None]) -> None:
        self._batch = []
        error = None if future.cancelled() else future.exception()
        for waiting in batch:
            if waiting.done.done():  # cancelled meanwhile
                continue
            if future.cancelled():
                waiting.done.cancel()
            elif error is None:
                waiting.done.set_result(None)
            else:
                failure = EngineFailed(f"the encoder failed: {type(error).__name__}")
                failure.__cause__ = error
                waiting.done.set_exception(failure)
        if error is None and not future.cancelled():
            self.encoder_batches += 1
            self.encoded_items += len(batch)
        self._start()
