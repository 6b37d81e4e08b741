"""Prepared media to embeddings, batched: all items that wait go in one forward pass.

All state lives on the event loop. The towers run in a thread, and items that arrive meanwhile form
the next batch. A batch holds media of one kind. If it fails, its items run one by one, so that a
bad item fails alone. Knows no files, no tickets and no cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from msgspec.structs import replace
from torch import nn

from triptych.config import TorchSettings
from triptych.engines.base import Allocate, Media
from triptych.engines.checks import check_item_length
from triptych.errors import EngineFailed, TriptychError
from triptych.media.base import PreparedMedia
from triptych.models.family import Family
from triptych.models.tensors import DTYPE_NAMES, synchronize, tensor_view
from triptych.recipe import EmbedsFormat, Recipes
from triptych.runtime.concurrency import wait_until_done
from triptych.transfer.base import Array

log = logging.getLogger(__name__)

# Limit of a batch on a CPU: larger ones are no faster there, and prefill can start on its pictures
# while the next batch is encoded.
CPU_PATCHES = 2048


@dataclass(slots=True, eq=False)
class PendingItem:
    """An item to encode, and the future of its embedding."""

    item: PreparedMedia
    done: asyncio.Future[Array]
    alone: bool = False  # run it alone: its batch failed


class TorchEncoder:
    """The Encoder protocol. ``context``: an item with more rows than this fits in no prompt."""

    def __init__(
        self,
        family: Family,
        module: nn.Module,
        context: int,
        settings: TorchSettings,
        empty: Allocate,
    ) -> None:
        self.counters = {"encoded_items": 0.0, "encoder_batches": 0.0}
        self._family = family
        self._module = module
        self._context = context
        self._budget = settings.encode_patches
        if next(module.parameters()).device.type == "cpu":
            self._budget = min(self._budget, CPU_PATCHES)
        self._empty = empty
        self._dtype = DTYPE_NAMES[next(module.parameters()).dtype]
        self.recipes = with_embeds_recipes(family.recipes, family.width, self._dtype)
        self._waiting: deque[PendingItem] = deque()
        self._batch: list[PendingItem] = []  # in the forward pass now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._closed = False

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._batch)

    async def encode(self, items: Sequence[PreparedMedia]) -> list[Media]:
        """Embeddings of the items, in order, batched with others that wait."""
        check_item_length(items, self._context)
        loop = asyncio.get_running_loop()
        waiting = [PendingItem(item, loop.create_future()) for item in items]
        self._waiting.extend(waiting)
        self._start()
        try:
            found = [await asyncio.shield(one.done) for one in waiting]
        finally:
            await self._withdraw(waiting)
        return [Media(item.meta, (array,)) for item, array in zip(items, found, strict=True)]

    def close(self) -> None:
        self._closed = True
        for one in self._waiting:
            one.done.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _withdraw(self, waiting: Sequence[PendingItem]) -> None:
        """Remove the items; wait for those in the running batch. Nothing reads them after this."""
        for one in waiting:
            if one in self._waiting:
                self._waiting.remove(one)
                one.done.cancel()
        for one in waiting:
            await wait_until_done(one.done)

    def _start(self) -> None:
        """Start the next forward pass, unless one is running or nothing waits."""
        if self._batch or not self._waiting:
            return
        self._batch = self._take()
        future = asyncio.get_running_loop().run_in_executor(
            self._thread, self._forward, [one.item for one in self._batch]
        )
        future.add_done_callback(partial(self._finish, self._batch))

    def _take(self) -> list[PendingItem]:
        """The first item and others of its kind, up to the budget; one alone may exceed it."""
        batch: list[PendingItem] = []
        cost = 0
        for one in self._waiting:
            if one.item.meta.kind != self._waiting[0].item.meta.kind:
                continue
            cost += one.item.cost
            if batch and (cost > self._budget or one.alone or batch[0].alone):
                break
            batch.append(one)
        for one in batch:
            self._waiting.remove(one)
        return batch

    def _forward(self, items: Sequence[PreparedMedia]) -> list[Array]:
        """Embeddings, in memory that can be sent without another copy; runs in the thread."""
        with torch.inference_mode():
            embeddings = self._family.encode(self._module, items)
            made = [self._empty(self._dtype, tuple(rows.shape)) for rows in embeddings]
            for into, rows in zip(made, embeddings, strict=True):
                tensor_view(into).copy_(rows)
            synchronize(next(self._module.parameters()).device)
        return made

    def _finish(self, batch: Sequence[PendingItem], future: asyncio.Future[list[Array]]) -> None:
        self._batch = []
        error = None if future.cancelled() else future.exception()
        if error is not None and len(batch) > 1 and not self._closed:
            self._retry_alone(batch, error)
            return
        for at, one in enumerate(batch):
            if future.cancelled():
                one.done.cancel()
            elif error is None:
                one.done.set_result(future.result()[at])
            else:
                one.done.set_exception(_failure(error))
        if error is None and not future.cancelled():
            self.counters["encoder_batches"] += 1
            self.counters["encoded_items"] += len(batch)
        self._start()

    def _retry_alone(self, batch: Sequence[PendingItem], error: BaseException) -> None:
        """Encode the items of a failed batch one by one, before all others."""
        log.warning("encoder batch of %d items failed, encoding one by one: %r", len(batch), error)
        for one in batch:
            one.alone = True
        self._waiting.extendleft(reversed(batch))
        self._start()


def with_embeds_recipes(recipes: Recipes, width: int, dtype: str) -> Recipes:
    """The recipes with those of client-supplied embeddings, for every kind that is taken."""
    taken = {"image": recipes.image, "video": recipes.video, "audio": recipes.audio}
    embeds = {
        f"{kind}_embeds": EmbedsFormat(
            width, dtype, getattr(recipe, "merge", 0), getattr(recipe, "tile_tokens", 0)
        )
        for kind, recipe in taken.items()
        if recipe is not None
    }
    return replace(recipes, **embeds)


def _failure(error: BaseException) -> TriptychError:
    """A new error for each item: a traceback grows whenever its error is raised."""
    failure = EngineFailed(f"the encoder failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure
