"""The prefix cache is reported block by block, by hashes that a frontend can compute itself.

Each guard was switched off once and the tests failed: removals not reported, media left out of the
report, the salt left out, offsets counted from the block instead of the first token, and stale
blocks reported all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from contract.engines.panels import SECONDS, Answer, Listener, Panel, Panels, split
from triptych import blocks
from triptych.engines.base import Generation, Media
from triptych.messages import CacheChange, KvEvent, MediaSpan
from triptych.stages.cache_reporter import CacheReporter

pytestmark = pytest.mark.asyncio(loop_scope="session")
FILLER = 900  # words of a prompt that needs many blocks


class Frontend:
    """Watches a worker's cache, as a frontend does."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.gone: set[int] = set()

    def send(self, change: CacheChange) -> None:
        if change.snapshot:
            self.held = set()
        self.held = (self.held | set(change.stored)) - set(change.removed)
        self.gone |= set(change.removed)

    async def ready(self) -> None: ...

    async def until_held(self, names: Sequence[int]) -> None:
        async with asyncio.timeout(SECONDS):
            while not self.held >= set(names):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(panel: Panel) -> AsyncIterator[Frontend]:
    cache = panel.loaded.cache
    assert cache is not None
    reporter, frontend = CacheReporter(cache.block_size, cache.blocks), Frontend()
    loop = asyncio.get_running_loop()

    def receive(events: Sequence[KvEvent]) -> None:
        assert asyncio.get_running_loop() is loop
        reporter.receive(events)

    cache.listen(receive)
    task = asyncio.create_task(reporter.watch(frontend))
    yield frontend
    task.cancel()


def names(panel: Panel, answer: Answer, media: Sequence[Media], salt: str = "") -> list[int]:
    """Of the whole prompt and of what followed, but for the last token: it was not computed."""
    assert panel.loaded.cache is not None
    size = panel.loaded.cache.block_size
    info = answer.prompt
    assert info.ids is not None
    ids = [*info.ids, *answer.ids][:-1]
    assert [place.key for place in info.media] == [one.meta.key for one in media]
    standing = [
        [(place.key, place.start) for place in info.media if _meets(place, at, at + size)]
        for at in range(0, len(ids), size)
    ]
    return list(blocks.hash_blocks(blocks.hash_salt(salt), ids, size, standing))


def _meets(place: MediaSpan, begin: int, end: int) -> bool:
    return place.start < end and place.start + place.length > begin


@pytest.mark.parametrize("pictures", [0, 1, 3])
async def test_computed_blocks_are_reported_by_their_hashes(panels: Panels, pictures: int):
    panels.needs("telling")
    panel = await panels.get("EPD")
    media = await panel.see(*range(11, 11 + pictures))
    prompt = panels.prompt(20 + pictures, 100, pictures=pictures)
    work = panels.work(prompt, salt="told", max_tokens=70)
    async with watching(panel) as frontend:
        answer = await panel.answer(work, media)
        expected = names(panel, answer, media, "told")
        assert len(expected) > 3
        await frontend.until_held(expected)


async def test_offsets_are_those_of_the_items(panels: Panels):
    panels.needs("telling")
    panel = await panels.get("EPD")
    media = await panel.see(1, 2)
    prompt = panels.prompt(30, 40, pictures=2)
    info = (await panel.answer(panels.work(prompt), media)).prompt
    image = panels.model.media_ids["image"]
    ids: list[int] = []
    for place, before in zip(info.media, _parts(prompt, image), strict=False):
        ids += before
        assert (place.start, place.ids) == (len(ids), ())
        ids += [image] * place.length
    assert info.ids == (*ids, *_parts(prompt, image)[-1])
    assert info.tokens == len(info.ids)


def _parts(prompt: Sequence[int], image: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for id in prompt:
        parts.append([]) if id == image else parts[-1].append(id)
    return parts


async def test_cached_blocks_are_reported_at_most_once(panels: Panels):
    """And the blocks after it are reported with their own parent."""
    panels.needs("telling")
    panel = await panels.get("EPD")
    media = await panel.see(1)
    prompt = panels.prompt(31, 100, pictures=1)
    async with watching(panel) as frontend:
        first = await panel.answer(panels.work(prompt, salt="again"), media)
        longer = (*prompt, *panels.prompt(32, 80))
        second = await panel.answer(panels.work(longer, salt="again"), media)
        assert second.prompt.cached > 0
        await frontend.until_held(names(panel, second, media, "again"))
        await frontend.until_held(names(panel, first, media, "again"))
        assert not frontend.gone


async def test_evicted_blocks_are_reported(panels: Panels):
    """A name is held as long as its block is found."""
    panels.needs("telling")
    panel = await panels.get("EPD")
    prompt = panels.prompt(33, 200)
    cache = panel.loaded.cache
    assert cache is not None
    async with watching(panel) as frontend:
        answer = await panel.answer(panels.work(prompt, salt="goes"))
        mine = names(panel, answer, (), "goes")
        await frontend.until_held(mine)
        count = cache.blocks // (FILLER // cache.block_size) + 2  # more than the cache can hold
        fillers = [panels.prompt(1000 + number, FILLER) for number in range(count)]
        works = [panels.work(filler, salt="goes", max_tokens=1) for filler in fillers]
        await asyncio.gather(*(panel.answer(one) for one in works))
        async with asyncio.timeout(SECONDS):
            while not frontend.gone >= set(mine):
                await asyncio.sleep(0.005)
        assert not frontend.held & set(mine)
        assert len(frontend.held) <= cache.blocks
        again = await panel.answer(panels.work(prompt, salt="goes"))
        assert again.prompt.cached == 0
        await frontend.until_held(mine)


async def test_decode_reports_the_blocks_that_it_received(panels: Panels):
    """What prefill answers with carries the places; what decode imports is found there later."""
    panels.needs("telling")
    prefill, decode = await panels.get("EP"), await panels.get("D")
    media = await prefill.see(1)
    prompt = panels.prompt(34, 100, pictures=1)
    work = panels.work(prompt, salt="apart", max_tokens=40)
    async with watching(prefill) as first, watching(decode) as second:
        answer = await split(prefill, decode, work, media)
        expected = names(decode, answer, media, "apart")
        assert prefill.loaded.cache is not None
        count = answer.prompt.tokens // prefill.loaded.cache.block_size
        await first.until_held(expected[:count])
        await second.until_held(expected)


async def test_stale_blocks_are_not_reported(panels: Panels):
    panels.needs("telling")
    panel = await panels.get("EPD")
    media = await panel.see(5)
    prompt = panels.prompt(35, 100, pictures=1)
    sound = panels.work(prompt, salt="sound")
    async with watching(panel) as frontend:
        generation = Generation(panels.work(prompt, salt="stale"), "PD", media)
        call = asyncio.create_task(panel.engine.generate(generation, Listener(lambda: end())))

        def end() -> None:
            call.cancel()

        await asyncio.wait([call])
        answer = await panel.answer(sound, media)
        await frontend.until_held(names(panel, answer, media, "sound"))
        assert not frontend.held & set(names(panel, answer, media, "stale"))
