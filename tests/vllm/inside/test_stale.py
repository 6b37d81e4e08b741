"""Blocks computed from revoked memory stay neither in vLLM's caches nor reserved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from contract.engines.panels import Listener, Panel, Panels, prefilling, split
from triptych.engines.base import Generation, Media
from triptych.errors import TicketLost
from triptych.messages import Work

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Panels]:
    panels = Panels("vllm")
    yield panels
    await panels.close()


@pytest_asyncio.fixture(loop_scope="module")
async def panels(engines: Panels) -> AsyncIterator[Panels]:
    yield engines
    await engines.rest()


@contextmanager
def cancelled_by_its_first_output(panel: Panel, task: asyncio.Task[None]) -> Iterator[None]:
    """Between vLLM's client, which has the output, and the task, which has not read it yet."""
    engine: Any = panel.engine
    processor = engine._llm.output_processor
    process = processor.process_outputs

    def processed(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = process(outputs, *args, **kwargs)
        if outputs:
            task.cancel()
        return found

    processor.process_outputs = processed
    try:
        yield
    finally:
        processor.process_outputs = process


async def finds(panel: Panel, panels: Panels, prompt: Any, media: tuple[Media, ...]) -> bool:
    """Whether the prompt is in the cache: its picture stands at the beginning, and is nowhere
    else."""
    work = panels.work(prompt, max_tokens=2)
    try:
        await panel.engine.generate(Generation(work, "PD", media), Listener())
    except TicketLost:
        return False
    return True


def seen_first(panels: Panels, number: int) -> tuple[int, ...]:
    return (*panels.prompt(number, 12, 1), *panels.prompt(number + 50, 120))


def stopping(panels: Panels, prompt: Any) -> Work:
    return panels.work(prompt, stop_token_ids=tuple(range(panels.model.vocabulary)))


async def test_a_decode_that_ends_with_its_first_token_forgets_too(panels: Panels):
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    media = await encoder.see(1)
    prompt = seen_first(panels, 1)

    async def call(generation: Generation, stale: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        listener = Listener(task.cancel if stale else lambda: None)
        await decode.engine.generate(generation, listener)

    for stale in (True, False):
        async with prefilling(prefill, decode, panels.work(prompt), media) as given:
            generation = Generation(stopping(panels, prompt), "D", given.media, given.kv)
            task = asyncio.ensure_future(call(generation, stale))
            await asyncio.wait([task])
            assert task.cancelled() == stale
        assert await finds(decode, panels, prompt, given.media) != stale


async def test_a_decode_without_output_forgets_its_blocks(panels: Panels):
    """Its canceller may have ended prefill's call while it read."""
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    media = await encoder.see(2)
    prompt = seen_first(panels, 2)
    for work in (panels.work(prompt), stopping(panels, prompt)):
        async with prefilling(prefill, decode, panels.work(prompt), media) as given:
            listener = Listener()
            generation = Generation(work, "D", given.media, given.kv)
            task = asyncio.ensure_future(decode.engine.generate(generation, listener))
            with cancelled_by_its_first_output(decode, task):
                await asyncio.wait([task])
        assert task.cancelled()
        assert not listener.emitted
        assert not await finds(decode, panels, prompt, given.media)


async def test_a_prefill_without_output_holds_nothing(panels: Panels):
    """vLLM has ended it and holds its blocks, which are never handed over. Nor are they found:
    the embedding may have been revoked before it was copied."""
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    media = await encoder.see(3)
    prompt = seen_first(panels, 3)
    for work in (panels.work(prompt), panels.work(prompt, max_tokens=1), stopping(panels, prompt)):
        listener = Listener()
        generation = Generation(work, "P", media)
        task = asyncio.ensure_future(prefill.engine.generate(generation, listener))
        with cancelled_by_its_first_output(prefill, task):
            await asyncio.wait([task])
        assert task.cancelled()
        assert not listener.emitted
        await prefill.rest()
        bare = tuple(Media(one.meta, ()) for one in media)
        assert not await finds(prefill, panels, prompt, bare)
    assert (await split(prefill, decode, panels.work(prompt), media)).ids
