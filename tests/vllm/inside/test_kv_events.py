"""What vLLM's prefix cache holds is known, block by block, with the media keys and salts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from contract.engines.panels import SECONDS, Panel, Panels
from triptych.engines.adapter.kv_events import KvListener
from triptych.messages import KvEvent, KvRemoved, KvStored

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
BLOCK = 32
BLOCKS = 36


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def panels(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Panels]:
    panels = Panels("vllm")
    panels.config = msgspec.structs.replace(
        panels.config,
        run_dir=str(tmp_path_factory.mktemp("run")),
        engine_args=f"--num-gpu-blocks-override={BLOCKS}",
    )
    yield panels
    await panels.close()
    assert not os.listdir(panels.config.run_dir)


@pytest_asyncio.fixture(loop_scope="module")
async def panel(panels: Panels) -> Panel:
    return await panels.get("EPD")


class Heard:
    """Another listener than the worker's own, to see what was said."""

    def __init__(self, run_dir: str, *, again: bool) -> None:
        [socket] = Path(run_dir).glob("vllm-*/kv")
        self.events: list[KvEvent] = []
        replay = f"ipc://{socket}-replay" if again else None
        self._listener = KvListener(f"ipc://{socket}", replay)
        self._listener.listen(self.events.extend)

    async def __aenter__(self) -> Heard:
        self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    def stored(self, key: bytes) -> list[KvStored]:
        """What begins a prompt with this medium, and what follows."""
        found: list[KvStored] = []
        for event in self.events:
            if isinstance(event, KvStored) and (
                any(one == key for block in event.media for one, _ in block)
                or (found and event.parent == found[-1].blocks[-1])
            ):
                found.append(event)
        return found


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():
            await asyncio.sleep(0.02)


async def test_a_prompt_is_stored_with_its_media_and_salt(panels: Panels, panel: Panel):
    media = await panel.see(1)
    key = media[0].meta.key
    work = panels.work(panels.prompt(1, 60, 1), salt="tenant", max_tokens=40)
    async with Heard(panels.config.run_dir, again=True) as heard:
        answer = await panel.answer(work, media)
        whole = [*(answer.prompt.ids or ()), *answer.ids]
        count = (len(whole) - 1) // BLOCK  # the last token is not in the cache
        await until(lambda: sum(len(one.blocks) for one in heard.stored(key)) == count)
    first, *rest = heard.stored(key)
    assert (first.parent, first.salt, first.block_size) == (None, "tenant", BLOCK)
    at = whole.index(panels.model.media_ids["image"])
    assert first.media[0] == ((key, at),)
    assert [one.salt for one in rest] == [""] * len(rest)
    assert [id for one in (first, *rest) for id in one.tokens] == whole[: count * BLOCK]


async def test_what_was_said_before_is_asked_for(panels: Panels, panel: Panel):
    """One that comes late hears everything; one that can't ask again hears nothing of it."""
    media = await panel.see(2)
    await panel.answer(panels.work(panels.prompt(2, 60, 1)), media)
    key = media[0].meta.key
    async with Heard(panels.config.run_dir, again=True) as late:
        await until(lambda: late.stored(key))
    async with Heard(panels.config.run_dir, again=False) as deaf:
        await panel.answer(panels.work(panels.prompt(3, 60)))
        await until(lambda: deaf.events)
    assert not deaf.stored(key)


async def test_the_worker_counts(panels: Panels, panel: Panel):
    def count(name: str) -> float:
        return panel.loaded.report().counters[name]

    before = count("kv_blocks_stored")
    async with Heard(panels.config.run_dir, again=True) as heard:
        for number in range(4):  # more than the cache can hold
            await panel.answer(panels.work(panels.prompt(10 + number, 400), max_tokens=2))
        await until(lambda: count("kv_blocks_stored") == before + 4 * (401 // BLOCK))
        await until(lambda: count("kv_blocks_removed"))
        await until(lambda: any(isinstance(event, KvRemoved) for event in heard.events))
    assert count("kv_events_missed") == 0
