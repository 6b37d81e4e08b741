"""What stands before TensorRT-LLM's tower: pictures kept for it, or the tower itself, apart.

Both take pictures alone. What else a model sees or hears is encoded by Triptych's own encoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace
from PIL import Image
from torch import Tensor

from triptych.checkpoint import Model
from triptych.engines.adapter.threads import in_thread
from triptych.engines.base import Allocate, Media
from triptych.engines.trtllm.api import TrtApi
from triptych.engines.trtllm.prompts import to_pil_image
from triptych.engines.trtllm.watch import ExecutorMonitor
from triptych.errors import ContextLengthExceeded, EngineFailed, TriptychError, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.recipe import Recipes
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import Array

EXAMPLE_SIDE = 56  # pixels of a picture's side: whole merged patches of every family


def images_only(recipes: Recipes) -> Recipes:
    """Of files, that is: embeddings of other media are as good as those of pictures."""
    return replace(recipes, video=None, audio=None)


class ImagePassthrough:
    """The Encoder protocol where encoder and engine are one: the tower is the engine's."""

    def __init__(self, recipes: Recipes, context: int, empty: Allocate) -> None:
        self._recipes = images_only(recipes)
        self._context = context
        self._empty = empty
        self.queued = 0
        self.running = 0
        self.counters = {"pictures_kept": 0.0}

    @property
    def recipes(self) -> Recipes:
        return self._recipes

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        _fit(items, self._context)
        self.running += len(items)
        try:
            kept = await in_thread(lambda: self._keep(items))
        finally:
            self.running -= len(items)
        self.counters["pictures_kept"] += len(kept)
        return kept

    def _keep(self, items: Sequence[PreparedMedia]) -> list[Media]:
        return [
            Media(item.meta, tuple(self._copy(array) for array in item.arrays), encoded=False)
            for item in items
        ]

    def _copy(self, array: Array) -> Array:
        made = self._empty(array.dtype, array.shape)
        made.buffer[:] = array.buffer
        return made


class TrtVisionEncoder:
    """The Encoder protocol by ``MultimodalEncoder``, which ``close`` ends.

    Its embeddings come as handles to device memory and leave as ordinary arrays: whoever prefills
    need not be on this host, and the embedding cache serves them as any other's.
    """

    def __init__(
        self,
        api: TrtApi,
        encoder: Any,
        model: Model,
        recipes: Recipes,
        width: int,
        watch: ExecutorMonitor,
        empty: Allocate,
    ) -> None:
        self._api = api
        self._encoder = encoder
        self._context = model.context
        self._recipes = images_only(recipes)
        self._width = width
        self._watch = watch
        self._empty = empty
        self._thread = ThreadPoolExecutor(1, "triptych-trtllm")
        self._text = _text(api, encoder, model)
        self.queued = 0
        self.running = 0
        self.counters = {"encoded_items": 0.0}

    @property
    def recipes(self) -> Recipes:
        return self._recipes

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        _fit(items, self._context)
        self._watch.start()
        if self._watch.dead:
            raise WorkerLost("the encoder of this worker died")
        self.running += len(items)
        encoding = [asyncio.ensure_future(self._encode(item)) for item in items]
        try:
            return [await asyncio.shield(one) for one in encoding]
        finally:
            try:
                for one in encoding:  # a handle that nobody opens is memory that nobody frees
                    await wait_until_done(one)
            finally:
                self.running -= len(items)

    def close(self) -> None:
        self._watch.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._encoder.shutdown()

    async def _encode(self, item: PreparedMedia) -> Media:
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(self._thread, self._prepare, item)
            result = await self._encoder.generate_async(made)
            rows = await loop.run_in_executor(self._thread, self._read, item, result)
        except TriptychError:
            raise
        except self._api.request_error as error:
            raise EngineFailed(f"TensorRT-LLM failed on a picture: {error}") from error
        except Exception as error:  # the edge: the processor's, or the executor's end
            if self._watch.healthy:
                raise EngineFailed(f"TensorRT-LLM failed on a picture: {error}") from error
            self._watch.die(repr(error))
            raise WorkerLost("the encoder of this worker died") from error
        self.counters["encoded_items"] += 1
        return Media(item.meta, (rows,))

    def _prepare(self, item: PreparedMedia) -> Any:
        shown = to_pil_image(Media(item.meta, item.arrays, encoded=False))
        return self._encoder.preprocess(
            {"prompt": self._text, "multi_modal_data": {"image": [shown]}}
        )

    def _read(self, item: PreparedMedia, result: Any) -> Array:
        handles = result.disaggregated_params.multimodal_embedding_handles
        rows: list[Tensor] = [self._api.shared.from_dict(h).get_local_view() for h in handles]
        shapes = [tuple(one.shape) for one in rows]
        if shapes != [(item.meta.tokens, self._width)]:
            raise EngineFailed(
                f"an embedding of {item.meta.tokens} tokens and width {self._width} was awaited, "
                f"and TensorRT-LLM gave {shapes}"
            )
        made = self._empty(DTYPE_NAMES[rows[0].dtype], shapes[0])
        tensor_view(made).copy_(rows[0])
        return made


def _fit(items: Sequence[PreparedMedia], context: int) -> None:
    for item in items:
        if item.meta.tokens >= context:
            raise ContextLengthExceeded.of(item.meta.tokens, None, context)


def _text(api: TrtApi, encoder: Any, model: Model) -> str:
    """A prompt with one picture, as the engine's own loader writes it. It takes long: once."""
    [example] = api.loader(
        tokenizer=encoder.tokenizer,
        model_dir=str(model.folder),
        model_type=model.family,
        modality="image",
        prompts=[""],
        media=[[Image.new("RGB", (EXAMPLE_SIDE, EXAMPLE_SIDE))]],
        image_data_format="pil",
    )
    text: str = example["prompt"]
    return text
