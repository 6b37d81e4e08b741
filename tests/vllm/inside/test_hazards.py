"""What kills a vLLM left to itself, or keeps its memory, ends one request here and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from contract.engines.panels import Listener, Panel, Panels, prefilling, split
from triptych.engines.adapter.base import read_note, write_note
from triptych.engines.base import Generation, Media
from triptych.errors import TicketLost
from triptych.messages import Work

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
BLOCKS = 36  # of 32 tokens: little more than one context
LONG = 560  # tokens: two such answers don't fit


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small() -> AsyncIterator[Panels]:
    """Prefill and decode apart, with hardly any memory."""
    panels = Panels("vllm")
    args = f"--num-gpu-blocks-override={BLOCKS}"
    panels.config = msgspec.structs.replace(panels.config, engine_args=args)
    yield panels
    await panels.close()


@pytest_asyncio.fixture(loop_scope="module")
async def panels(small: Panels) -> AsyncIterator[Panels]:
    yield small
    await small.rest()


async def handed(prefill: Panel, decode: Panel, work: Work, media: Any) -> Generation:
    """What decode gets, from a prefill that is over: its note is of memory that was given back."""
    async with prefilling(prefill, decode, work, media) as given:
        note = read_note(given.kv, dict)
        generation = given.decode(work)
    return replace(generation, kv=(write_note(decode.transfers.empty, note),))


def changed(decode: Panel, generation: Generation, **change: Any) -> Generation:
    note = read_note(generation.kv, dict) | change
    return replace(generation, kv=(write_note(decode.transfers.empty, note),))


async def still_answers(panel: Panel, panels: Panels) -> None:
    assert not panel.dead
    assert len((await panel.answer(panels.work(panels.prompt(9), max_tokens=3))).ids) == 3


async def test_a_note_of_a_prefill_that_is_not_there_is_a_lost_ticket(panels: Panels):
    """Another incarnation at its address, or none."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = await prefill.see(1)
    generation = await handed(prefill, decode, panels.work(panels.prompt(1, 40, 1)), media)
    for change in ({"remote_engine_id": "another"}, {"remote_engine_id": "none", "remote_port": 1}):
        with pytest.raises(TicketLost):
            await decode.engine.generate(changed(decode, generation, **change), Listener())
    await still_answers(decode, panels)


async def test_a_note_of_another_prompt_is_a_lost_ticket(panels: Panels):
    decode, prefill = await panels.get("D"), await panels.get("EP")
    generation = await handed(prefill, decode, panels.work(panels.prompt(2, 40)), ())
    longer = replace(generation, work=panels.work(panels.prompt(2, 90)))
    with pytest.raises(TicketLost):
        await decode.engine.generate(longer, Listener())
    flat = changed(decode, generation, remote_block_ids=[1])
    with pytest.raises(TicketLost):
        await decode.engine.generate(flat, Listener())
    await still_answers(decode, panels)


async def test_media_that_are_nowhere_end_one_request(panels: Panels):
    """Neither pixels nor embedding nor KV cache: only what they are."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = [Media(one.meta, ()) for one in await prefill.see(2)]
    work = panels.work(panels.prompt(3, 40, 1))
    with pytest.raises(TicketLost):
        await decode.engine.generate(Generation(work, "PD", tuple(media)), Listener())
    await still_answers(decode, panels)


async def test_a_decode_that_cannot_be_computed_again_is_lost_alone(panels: Panels):
    """Preempted, and its prompt gone from the cache: without its picture it is lost, to be tried
    again. Words are computed again."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = await prefill.see(3)
    words = panels.work(panels.prompt(10, 40), max_tokens=400)
    seen = panels.work(panels.prompt(11, 40, 1), max_tokens=400)
    alone = await decode.answer(words)
    before = decode.loaded.report().counters["preemptions"]
    spoken, shown = Listener(), Listener()
    work = msgspec.structs.replace(words, id="again")
    first = asyncio.ensure_future(decode.engine.generate(Generation(work, "PD", ()), spoken))
    async with prefilling(prefill, decode, seen, media) as given:
        second = asyncio.ensure_future(decode.engine.generate(given.decode(seen), shown))
        await asyncio.gather(spoken.begun.wait(), shown.begun.wait())
        await preempt_all(decode)
    with pytest.raises(TicketLost):
        await second
    await first
    assert decode.loaded.report().counters["preemptions"] > before
    assert spoken.answer().ids == alone.ids
    await still_answers(decode, panels)


async def preempt_all(panel: Panel) -> None:
    """By vLLM's own means, which empties its cache too; not while a step still holds blocks."""
    engine: Any = panel.engine
    for _ in range(1000):
        with contextlib.suppress(Exception):  # vLLM's client has no name for it
            if await engine._llm.reset_prefix_cache(reset_running_requests=True):
                return
    pytest.fail("vLLM's cache was never empty")


async def test_decode_out_of_memory_loses_only_what_it_cannot_compute_again(panels: Panels):
    """Three answers of which hardly two fit: some are preempted. One whose prompt went from the
    cache meanwhile may be lost; all others are what they are alone."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = await prefill.see(3)
    prompts = [panels.prompt(n, 40, 1) for n in (4, 5, 6)]
    alone = [
        await split(prefill, decode, panels.work(one, max_tokens=40, salt="alone"), media)
        for one in prompts
    ]
    before = decode.loaded.report().counters["preemptions"]
    works = [panels.work(one, max_tokens=LONG) for one in prompts]
    found = await asyncio.gather(
        *[split(prefill, decode, work, media) for work in works], return_exceptions=True
    )
    assert decode.loaded.report().counters["preemptions"] > before
    whole = 0
    for one, like in zip(found, alone, strict=True):
        if isinstance(one, BaseException):
            assert isinstance(one, TicketLost)
        else:
            whole += 1
            assert len(one.ids) == LONG
            assert one.ids[:40] == like.ids
    assert whole  # the one that was let in first is never preempted
    await still_answers(decode, panels)


async def test_words_give_way_to_what_cannot_be_computed_again(panels: Panels):
    """The one with a picture came last, which is whom vLLM would preempt."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    words = panels.work(panels.prompt(6, 40), max_tokens=LONG)
    seen = panels.work(panels.prompt(7, 40, 1), max_tokens=LONG)
    media = await prefill.see(4)
    alone = await decode.answer(words), await split(prefill, decode, seen, media)
    before = decode.loaded.report().counters["preemptions"]
    begun = Listener()
    first = asyncio.ensure_future(
        decode.engine.generate(Generation(msgspec.structs.replace(words, id="w"), "PD", ()), begun)
    )
    await begun.begun.wait()
    second = await split(prefill, decode, msgspec.structs.replace(seen, id="s"), media)
    assert not first.done()  # it has waited for free blocks
    await first
    assert decode.loaded.report().counters["preemptions"] > before
    assert begun.answer().ids == alone[0].ids
    assert second.ids == alone[1].ids


async def test_many_wait_rather_than_be_lost(panels: Panels):
    """Of more than fit, each is let in only where it can go on for a while."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = await prefill.see(5)
    works = [panels.work(panels.prompt(n, 30, 1), max_tokens=200) for n in range(20, 28)]
    found = await asyncio.gather(*[split(prefill, decode, work, media) for work in works])
    assert [len(one.ids) for one in found] == [200] * len(works)


async def test_blocks_that_were_read_too_late_are_not_cached(panels: Panels):
    """Prefill's memory was released while decode read it, which decode learns within its first
    emit: the next one with that prompt finds nothing in the cache."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    media = await prefill.see(6)
    bare = tuple(Media(one.meta, ()) for one in media)
    prompt = panels.prompt(8, 12, 1) + panels.prompt(9, 120)

    async def again() -> None:
        """From the cache, or not at all: the picture stands at the beginning."""
        work = panels.work(prompt, max_tokens=2)
        await decode.engine.generate(Generation(work, "PD", bare), Listener())

    work = panels.work(prompt)
    async with prefilling(prefill, decode, work, media) as given:
        task = asyncio.ensure_future(
            decode.engine.generate(given.decode(work), Listener(lambda: bool(task.cancel())))
        )
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(TicketLost):
        await again()
    await split(prefill, decode, panels.work(prompt), media)
    await again()
