"""Two encoders for TensorRT-LLM: one passes images on to the engine's tower, one is the tower.

Both take images only. Triptych's own encoder encodes other media.
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
from triptych.engines.adapter.base import engine_boundary, in_thread
from triptych.engines.base import Allocate, Media, copy_arrays
from triptych.engines.checks import check_item_length
from triptych.engines.trtllm.api import TrtApi
from triptych.engines.trtllm.monitor import ExecutorMonitor
from triptych.engines.trtllm.requests import to_pil_image
from triptych.errors import EngineFailed, TriptychError, WorkerLost
from triptych.media.base import PreparedMedia
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.recipe import Recipes
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import Array

EXAMPLE_SIDE = 56  # pixels of an image's side: whole merged patches in every family


def images_only(recipes: Recipes) -> Recipes:
    """Recipes of image files alone; embeddings of all media stay."""
    return replace(recipes, video=None, audio=None)


class ImagePassthrough:
    """The Encoder protocol in a worker whose engine encodes: copies images for its tower."""

    def __init__(self, recipes: Recipes, context: int, allocate: Allocate) -> None:
        self.recipes = images_only(recipes)
        self._context = context
        self._allocate = allocate
        self.queued = 0
        self.running = 0
        self.counters = {"images_passed": 0.0}

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        check_item_length(items, self._context)
        self.running += len(items)
        try:
            copies = await in_thread(lambda: self._copy_all(items))
        finally:
            self.running -= len(items)
        self.counters["images_passed"] += len(copies)
        return copies

    def _copy_all(self, items: Sequence[PreparedMedia]) -> list[Media]:
        return [
            Media(item.meta, copy_arrays(item.arrays, self._allocate), encoded=False)
            for item in items
        ]


class TrtVisionEncoder:
    """The Encoder protocol over ``MultimodalEncoder``; ``close`` shuts it down.

    Copies its embeddings from handles of device memory into ordinary arrays, so that prefill may
    run on another host and the embedding cache can hold them.
    """

    def __init__(
        self,
        api: TrtApi,
        encoder: Any,
        model: Model,
        recipes: Recipes,
        width: int,
        monitor: ExecutorMonitor,
        allocate: Allocate,
    ) -> None:
        self._api = api
        self._encoder = encoder
        self._context = model.context
        self.recipes = images_only(recipes)
        self._width = width
        self._monitor = monitor
        self._allocate = allocate
        self._thread = ThreadPoolExecutor(1, "triptych-trtllm")
        self._prompt = _image_prompt(api, encoder, model)
        self.queued = 0
        self.running = 0
        self.counters = {"encoded_items": 0.0}

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        check_item_length(items, self._context)
        self._monitor.start()
        if self._monitor.dead:
            raise WorkerLost("TensorRT-LLM's encoder has died")
        self.running += len(items)
        encoding = [asyncio.ensure_future(self._encode(item)) for item in items]
        try:
            return [await asyncio.shield(one) for one in encoding]
        finally:
            try:
                for one in encoding:  # memory is freed only when its handle is opened
                    await wait_until_done(one)
            finally:
                self.running -= len(items)

    def close(self) -> None:
        self._monitor.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._encoder.shutdown()

    async def _encode(self, item: PreparedMedia) -> Media:
        loop = asyncio.get_running_loop()
        with engine_boundary("", self._translate):
            inputs = await loop.run_in_executor(self._thread, self._prepare, item)
            result = await self._encoder.generate_async(inputs)
            rows = await loop.run_in_executor(self._thread, self._read, item, result)
        self.counters["encoded_items"] += 1
        return Media(item.meta, (rows,))

    def _translate(self, error: Exception) -> TriptychError:
        if isinstance(error, self._api.request_error) or self._monitor.healthy:
            return EngineFailed(f"TensorRT-LLM failed on an image: {error}")
        self._monitor.die(repr(error))
        return WorkerLost("TensorRT-LLM's encoder has died")

    def _prepare(self, item: PreparedMedia) -> Any:
        image = to_pil_image(Media(item.meta, item.arrays, encoded=False))
        return self._encoder.preprocess(
            {"prompt": self._prompt, "multi_modal_data": {"image": [image]}}
        )

    def _read(self, item: PreparedMedia, result: Any) -> Array:
        handles = result.disaggregated_params.multimodal_embedding_handles
        rows: list[Tensor] = [self._api.shared.from_dict(h).get_local_view() for h in handles]
        shapes = [tuple(one.shape) for one in rows]
        if shapes != [(item.meta.tokens, self._width)]:
            raise EngineFailed(
                f"TensorRT-LLM gave embeddings of shapes {shapes}, not one of "
                f"{item.meta.tokens} tokens and width {self._width}"
            )
        embedding = self._allocate(DTYPE_NAMES[rows[0].dtype], shapes[0])
        tensor_view(embedding).copy_(rows[0])
        return embedding


def _image_prompt(api: TrtApi, encoder: Any, model: Model) -> str:
    """A prompt with one image, as TensorRT-LLM's own loader writes it. Slow: called once."""
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
