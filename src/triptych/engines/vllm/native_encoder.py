"""``--encoder native``: an E worker that encodes with vLLM's own towers.

vLLM runs as a producer of its encoder connector: without language model and KV cache it encodes the
items of a prompt of placeholders and writes each embedding to a file
(``connector.EmbeddingFileConnector``). This encoder reads the file into memory that travels by
ticket and removes it. Only this process reads the files; prefill workers get embeddings as from any
other encoder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.checkpoint import Model
from triptych.engines.adapter.base import in_thread
from triptych.engines.adapter.processor_inputs import ProcessorInputEncoder
from triptych.engines.base import Allocate, Engine, Generation, Media
from triptych.engines.vllm.extension import FILE_TENSOR, embedding_file_name
from triptych.errors import EngineFailed
from triptych.media.base import PreparedMedia
from triptych.messages import MediaItem, MediaMeta, Sampling, Work
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.runtime.concurrency import wait_until_done

# Seconds after a cancel until the sweep for the file that vLLM may still be writing. A file that
# comes later stays until the next sweep: one follows every item.
SWEEP_DELAY = 2.0


class NativeEncoder:
    """The Encoder protocol over vLLM's towers.

    ``inputs`` makes the towers' inputs; ``engine`` encodes and writes into ``folder``.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: ProcessorInputEncoder,
        model: Model,
        folder: Path,
        allocate: Allocate,
    ) -> None:
        self.recipes = inputs.recipes
        self.queued = 0
        self.counters = {"encoded_items": 0.0}
        self._engine = engine
        self._inputs = inputs
        self._model = model
        self._folder = folder
        self._allocate = allocate
        self._awaited: set[str] = set()  # vLLM's identifiers of the items in work
        self._request_numbers = itertools.count()

    @property
    def running(self) -> int:
        return self._inputs.running

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        ready = await self._inputs.encode(items)
        tasks = [asyncio.ensure_future(self._encode(media)) for media in ready]
        try:
            return await asyncio.gather(*tasks)
        finally:
            if not all(task.done() for task in tasks):  # one failed, or this call was cancelled
                for task in tasks:
                    task.cancel()
                await wait_until_done(asyncio.ensure_future(asyncio.wait(tasks)))

    def close(self) -> None:
        self._inputs.close()

    async def _encode(self, media: Media) -> Media:
        # vLLM writes no file for an item that is in its cache, so every item gets a new key. The
        # worker's own embedding cache answers repeated requests for an item.
        key = os.urandom(32)
        identifiers = _identifiers(media.meta, key)
        self._awaited.update(identifiers)
        try:
            await self._engine.generate(self._generation(media, key), lambda _: None)
            encoded = await in_thread(lambda: self._read(identifiers, media.meta))
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(SWEEP_DELAY, self._sweep)
            raise
        finally:
            self._awaited.difference_update(identifiers)
            self._sweep()
        self.counters["encoded_items"] += 1
        return encoded

    def _generation(self, media: Media, key: bytes) -> Generation:
        meta = msgspec.structs.replace(media.meta, key=key)
        item = MediaItem(meta.kind, 0, b"")
        prompt = (self._model.media_ids[meta.kind],)
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
        work = Work(f"encode-{next(self._request_numbers)}", prompt, (item,), sampling)
        return Generation(work, "PD", (Media(meta, media.arrays, encoded=False),))

    def _read(self, identifiers: Sequence[str], meta: MediaMeta) -> Media:
        rows = [_rows(self._folder / embedding_file_name(one)) for one in identifiers]
        shape = (sum(len(part) for part in rows), rows[0].shape[-1])
        if shape[0] != meta.tokens:
            raise EngineFailed(f"vLLM encoded {shape[0]} rows, not the expected {meta.tokens}")
        array = self._allocate(DTYPE_NAMES[rows[0].dtype], shape)
        torch.cat(rows, out=tensor_view(array))
        return Media(meta, (array,))

    def _sweep(self) -> None:
        """Remove the files that no call awaits."""
        awaited = {embedding_file_name(one) for one in self._awaited}
        for file in self._folder.glob(embedding_file_name("*") + "*"):
            if file.name.removesuffix(".part") not in awaited:
                file.unlink(missing_ok=True)


def _identifiers(meta: MediaMeta, key: bytes) -> list[str]:
    """vLLM's identifiers of an item's parts, in the order of its rows: see ``inputs``."""
    return [key.hex(), f"{key.hex()}:sound"] if meta.audio_tokens else [key.hex()]


def _rows(file: Path) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            rows: Tensor = opened.get_tensor(FILE_TENSOR)
    except (OSError, SafetensorError) as error:
        raise EngineFailed(f"vLLM encoded an item, but wrote no embedding: {error}") from None
    return rows.reshape(-1, rows.shape[-1])
