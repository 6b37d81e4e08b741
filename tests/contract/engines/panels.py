"""One engine in every role, through the interface of ``engines.base``, without any server around.

A panel is what a worker has loaded, and the memory by which it hands over. ``Panels`` loads them
when they are asked for; of those that have an engine it keeps two, since some are processes of
gigabytes. Media and KV caches go from panel to panel by ticket, as between workers.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
from tools import tiny

from contract.engines.kinds import ABILITIES, KINDS, TRAITS, Traits
from support import pictures
from triptych.checkpoint import open_model, special_token_ids
from triptych.config import Config, FakeSettings, Limits, TorchSettings
from triptych.engines.base import Engine, Generation, LoadedEngine, LoadEngine, Media, PrefillOutput
from triptych.errors import first_error
from triptych.media.base import PreparedMedia
from triptych.media.prepare import dtype_name, prepare
from triptych.messages import Delta, MediaItem, PromptInfo, Sampling, TokenLogprob, Work
from triptych.topology import Role
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient

CONTEXT = 1024
LIVE = 2  # engines at a time
SECONDS = 60.0  # to come to rest
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """What was delivered of one stream: deltas that only say that something was read are not."""

    deltas: tuple[Delta, ...]

    @property
    def ids(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def prompt(self) -> PromptInfo:
        """Told once, with the first tokens."""
        [info] = [delta.prompt for delta in self.deltas if delta.prompt is not None]
        assert self.deltas[0].prompt is not None
        return info

    @property
    def finish(self) -> str:
        """Told once, with the last."""
        [finish] = [delta.finish for delta in self.deltas if delta.finish is not None]
        assert self.deltas[-1].finish is not None
        return finish


class Listener:
    """Takes what an engine emits. ``then`` is called within the first emit."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.begun = asyncio.Event()
        self.emitted: list[Delta | PrefillOutput] = []
        self._then = then
        self._thread = threading.get_ident()
        self._strays = 0  # calls from another thread than the event loop's

    def __call__(self, answer: Delta | PrefillOutput) -> None:
        self._strays += threading.get_ident() != self._thread
        self.emitted.append(answer)
        if len(self.emitted) == 1:
            self.begun.set()
            self._then()

    def answer(self) -> Answer:
        assert not self._strays
        deltas = [one.delta if isinstance(one, PrefillOutput) else one for one in self.emitted]
        return Answer(tuple(delta for delta in deltas if delta.ids or delta.finish))


@dataclass(frozen=True)
class Panel:
    role: Role
    loaded: LoadedEngine
    transfers: TransferClient

    @property
    def engine(self) -> Engine:
        assert self.loaded.engine is not None
        return self.loaded.engine

    @property
    def dead(self) -> bool:
        return self.loaded.died is not None and self.loaded.died.is_set()

    async def see(self, *numbers: int) -> tuple[Media, ...]:
        """The pictures of these numbers, encoded; all have the same size."""
        assert self.loaded.encoder is not None
        items = [prepared(self, number) for number in numbers]
        return tuple(await self.loaded.encoder.encode(items))

    async def answer(
        self, work: Work, media: Sequence[Media] = (), then: Callable[[], None] = lambda: None
    ) -> Answer:
        """Phases PD."""
        listener = Listener(then)
        await self.engine.generate(Generation(work, "PD", tuple(media)), listener)
        return listener.answer()

    async def rest(self) -> None:
        """Wait until nothing of any request is left, or fail."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not self._rests():
            assert asyncio.get_running_loop().time() < deadline, (self.role, self.loaded.report())
            await asyncio.sleep(0.01)

    def _rests(self) -> bool:
        report = self.loaded.report()
        waiting = report.queued + report.running
        return not waiting and report.kv_blocks_free == report.kv_blocks_total

    async def close(self) -> None:
        self.loaded.close()
        await self.transfers.close()


class Panels:
    def __init__(self, name: str) -> None:
        folder = tiny.ensure_checkpoint("qwen2_5_vl")
        self.name = name
        self.model = open_model(folder, CONTEXT)
        self.traits = TRAITS.get(name, Traits())
        self.traits.enter()
        self.config = Config(
            model=str(folder),
            engine=name,
            engine_args=self.traits.arguments,
            dtype="float32",
            max_model_len=CONTEXT,
            torch=TorchSettings(kv_blocks=512),
            kv_cache_bytes=256 << 20,
            cpu_threads=1,
            fake=FakeSettings(decode=True, kv_blocks=512),
        )
        self._open: dict[str, Panel] = {}  # the one used last stands last

    def needs(self, ability: str) -> None:
        """Skip the test where the engine can't."""
        assert ability in ABILITIES
        if reason := self.traits.lacks.get(ability):
            pytest.skip(f"{self.name}: {reason}")

    async def get(self, role: str) -> Panel:
        panel = self._open.pop(role, None)
        if panel is not None and panel.dead:  # a supervisor would start another
            await panel.close()
            panel = None
        if panel is None:
            await self._make_room(Role(role))
            panel = await self._load(Role(role))
        self._open[role] = panel
        return panel

    async def rest(self) -> None:
        for panel in self._open.values():
            if not panel.dead:
                await panel.rest()

    async def close(self) -> None:
        while self._open:
            await self._open.pop(next(iter(self._open))).close()

    async def _make_room(self, role: Role) -> None:
        engines = [role for role in self._open if Role(role).phases]
        if role.phases and len(engines) == LIVE:
            await self._open.pop(engines[0]).close()

    async def _load(self, role: Role) -> Panel:
        """As a worker does it."""
        transfers = TransferClient("shm", f"{self.name}-{role}", next(_numbers))
        load: LoadEngine = importlib.import_module(KINDS[self.name].module).load
        loaded = await asyncio.to_thread(
            load, self.config, role, transfers.empty, lambda what, share: None
        )
        assert (loaded.encoder is not None) == role.encodes
        assert (loaded.engine is not None) == bool(role.phases)
        return Panel(role, loaded, transfers)

    # Requests

    @cached_property
    def _marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after a picture's placeholder."""
        ids = special_token_ids(self.model.folder)
        before, after = ids.get("<|vision_start|>"), ids.get("<|vision_end|>")
        return (() if before is None else (before,)), (() if after is None else (after,))

    def prompt(self, seed: int, length: int = 20, pictures: int = 0) -> tuple[int, ...]:
        """So many words, and placeholders of pictures between them."""
        draw = random.Random(seed)
        words = [[draw.randrange(100, 300)] for _ in range(length)]
        before, after = self._marks
        for place in sorted(draw.sample(range(1, length), pictures), reverse=True):
            words.insert(place, [*before, self.model.media_ids["image"], *after])
        return tuple(id for word in words for id in word)

    def work(
        self,
        prompt: Sequence[int],
        *,
        salt: str = "",
        **sampling: object,
    ) -> Work:
        """Greedy, twelve tokens, unless it is said otherwise."""
        image = self.model.media_ids["image"]
        items = tuple(MediaItem("image", at, b"") for at, id in enumerate(prompt) if id == image)
        asked = {"seed": 1, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
        return Work(
            f"work-{next(_numbers)}",
            tuple(prompt),
            items,
            Sampling(**asked),
            salt=salt,
            return_prompt_ids=True,
        )


def prepared(panel: Panel, number: int, width: int = 84, height: int = 56) -> PreparedMedia:
    """The picture of this number as the decode pool gives it to a panel that encodes."""
    assert panel.loaded.encoder is not None
    recipes = panel.loaded.encoder.recipes
    assert recipes is not None
    data = memoryview(pictures.encoded(pictures.draw(number, width, height)))
    meta, made, cost, _ = prepare("image", "file", data, recipes, Limits(), False)
    arrays = [Array(memoryview(array.tobytes()), dtype_name(array), array.shape) for array in made]
    return PreparedMedia(meta, tuple(arrays), cost)


def owned(media: Media) -> Media:
    """The same in memory of its own, that can be written."""
    arrays = [replace(one, buffer=memoryview(bytearray(one.buffer))) for one in media.arrays]
    return replace(media, arrays=tuple(arrays))


@asynccontextmanager
async def lent(
    media: Sequence[Media], owner: Panel, reader: Panel
) -> AsyncIterator[tuple[Media, ...]]:
    """Embeddings of one panel as another has them: in place, read-only, for the time of a call."""
    async with AsyncExitStack() as scope:
        borrowed = []
        for one in media:
            ticket = await scope.enter_async_context(owner.transfers.offer(one.arrays))
            fetched = await scope.enter_async_context(reader.transfers.borrow(ticket))
            borrowed.append(replace(one, arrays=fetched.arrays))
        yield tuple(borrowed)


@dataclass(frozen=True)
class HandedOver:
    """What prefill gave, as another worker has it, while prefill's call is open."""

    delta: Delta
    kv: tuple[Array, ...]
    media: tuple[Media, ...]  # only what they are
    let_go: Callable[[], None]  # what decode's first answer does: prefill's call ends

    def decode(self, work: Work) -> Generation:
        return Generation(work, "D", self.media, self.kv, self.delta)


@asynccontextmanager
async def prefilling(
    prefill: Panel, decode: Panel, work: Work, media: Sequence[Media]
) -> AsyncIterator[HandedOver]:
    """Phase P, held open as ``stages.generate.run_prefill`` does. Raises what prefill raises."""
    bare = tuple(Media(one.meta, ()) for one in media)
    handed: asyncio.Queue[Delta | PrefillOutput] = asyncio.Queue()
    generation = Generation(work, "P", tuple(media))
    try:
        async with asyncio.TaskGroup() as hop, AsyncExitStack() as scope:
            call = hop.create_task(prefill.engine.generate(generation, handed.put_nowait))
            scope.callback(call.cancel)
            first = await handed.get()
            assert isinstance(first, PrefillOutput)
            if not first.kv:
                yield HandedOver(first.delta, (), bare, lambda: None)
                return
            ticket = await scope.enter_async_context(prefill.transfers.offer(first.kv))
            fetched = await scope.enter_async_context(decode.transfers.borrow(ticket))

            def let_go() -> None:
                fetched.close()
                prefill.transfers.release(ticket)
                call.cancel()

            yield HandedOver(first.delta, fetched.arrays, bare, let_go)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def split(prefill: Panel, decode: Panel, work: Work, media: Sequence[Media] = ()) -> Answer:
    """Phase P in one panel, D in the other, which gets the KV cache and no media."""
    async with prefilling(prefill, decode, work, media) as handed:
        told = Listener()
        told(handed.delta)
        if handed.delta.finish is None:
            listener = Listener(handed.let_go)
            await decode.engine.generate(handed.decode(work), listener)
            told.emitted += listener.emitted
        return told.answer()
