"""``--encoder native``: an E worker whose tower is vLLM's own.

vLLM runs there as a producer of its encoder connector: it has no language model and no KV cache,
encodes what a prompt of placeholders brings along, and writes each embedding to a file
(``producer``). The file is read into memory that travels by ticket, and is gone before the answer
is. So vLLM's files have no readers but this process; whoever prefills gets embeddings as from any
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
from triptych.engines.adapter.stock import ProcessorInputEncoder
from triptych.engines.adapter.threads import in_thread
from triptych.engines.base import Allocate, Engine, Generation, Media
from triptych.errors import EngineFailed
from triptych.media.base import PreparedMedia
from triptych.messages import MediaItem, MediaMeta, Sampling, Work
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.recipe import Recipes
from triptych.runtime.concurrency import wait_until_done

# After which vLLM has written what it was writing when it was called off. Should that take longer,
# the file stays until the next sweep: every item that is encoded ends in one.
SWEEP_DELAY = 2.0
FILE_TENSOR = "rows"  # in its file


class NativeEncoder:
    """The Encoder protocol over vLLM's tower: ``stock`` prepares, ``engine`` runs it, and writes
    into ``folder``."""

    def __init__(
        self,
        engine: Engine,
        stock: ProcessorInputEncoder,
        model: Model,
        folder: Path,
        empty: Allocate,
    ) -> None:
        self.encoded_items = 0
        self._engine = engine
        self._stock = stock
        self._model = model
        self._folder = folder
        self._empty = empty
        self._open: set[str] = set()  # names of files that are awaited
        self._numbers = itertools.count()

    @property
    def recipes(self) -> Recipes | None:
        return self._stock.recipes

    @property
    def queued(self) -> int:
        return self._stock.queued

    @property
    def running(self) -> int:
        return self._stock.running

    @property
    def counters(self) -> dict[str, float]:
        return {"encoded_items": self.encoded_items}

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        ready = await self._stock.encode(items)
        tasks = [asyncio.ensure_future(self._encode(media)) for media in ready]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # one that failed takes the others along
                task.cancel()
            await wait_until_done(asyncio.ensure_future(asyncio.wait(tasks)))
            raise

    def close(self) -> None:
        self._stock.close()

    async def _encode(self, media: Media) -> Media:
        # vLLM writes nothing for an item that it still knows: so it never meets one again. Who
        # asks twice for the same is answered by the worker's own cache.
        name = os.urandom(32)
        names = _names(media.meta, name)
        self._open.update(names)
        try:
            await self._engine.generate(self._asked(media, name), lambda _: None)
            made = await in_thread(lambda: self._read(names, media.meta))
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(SWEEP_DELAY, self._sweep)
            raise
        finally:
            self._open.difference_update(names)
            self._sweep()
        self.encoded_items += 1
        return made

    def _asked(self, media: Media, name: bytes) -> Generation:
        meta = msgspec.structs.replace(media.meta, key=name)
        item = MediaItem(meta.kind, 0, b"")
        prompt = (self._model.media_ids[meta.kind],)
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
        work = Work(f"encode-{next(self._numbers)}", prompt, (item,), sampling)
        return Generation(work, "PD", (Media(meta, media.arrays, encoded=False),))

    def _read(self, names: Sequence[str], meta: MediaMeta) -> Media:
        rows = [_rows(self._folder / embedding_file_name(name)) for name in names]
        shape = (sum(len(part) for part in rows), rows[0].shape[-1])
        if shape[0] != meta.tokens:
            raise EngineFailed(f"vLLM encoded {shape[0]} rows where {meta.tokens} were expected")
        array = self._empty(DTYPE_NAMES[rows[0].dtype], shape)
        torch.cat(rows, out=tensor_view(array))
        return Media(meta, (array,))

    def _sweep(self) -> None:
        """Remove files that nobody awaits."""
        awaited = {embedding_file_name(name) for name in self._open}
        for file in self._folder.glob(embedding_file_name("*") + "*"):
            if file.name.removesuffix(".part") not in awaited:
                file.unlink(missing_ok=True)


def embedding_file_name(identifier: str) -> str:
    """Of what vLLM calls an item."""
    return f"{identifier}.safetensors"


def _names(meta: MediaMeta, name: bytes) -> list[str]:
    """What vLLM calls the parts of an item, in the order of its rows: see ``inputs``."""
    return [name.hex(), f"{name.hex()}:sound"] if meta.sound else [name.hex()]


def _rows(file: Path) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            rows: Tensor = opened.get_tensor(FILE_TENSOR)
    except (OSError, SafetensorError) as error:
        raise EngineFailed(f"vLLM encoded an item, but gave no embedding: {error}") from None
    return rows.reshape(-1, rows.shape[-1])
