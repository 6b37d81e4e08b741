"""A decode worker prefills the rest of a prompt itself, its media from its prefix cache alone.

Proved by leaving out the check of what was found: torch then computes with placeholders in the
place of a picture, and its tokens are others; the fake engine answers what it can't know.
"""

from __future__ import annotations

import asyncio

import pytest

from contract.engines.panels import Panel, Panels, split
from triptych.engines.base import Media
from triptych.errors import PrefixGone

pytestmark = pytest.mark.asyncio(loop_scope="session")
FILLER = 900  # words of a prompt that needs many blocks


async def decoding(panels: Panels) -> Panel:
    panel = await panels.get("D")
    if panel.loaded.cache is None or not panel.loaded.cache.can_prefill_from_cache:
        pytest.skip(f"{panels.name}: it takes no media from its cache")
    return panel


def bare(media: tuple[Media, ...]) -> tuple[Media, ...]:
    return tuple(Media(one.meta, ()) for one in media)


async def test_the_next_turn_needs_neither_encoder_nor_prefill(panels: Panels):
    """Token for token what the whole way gives."""
    decode, prefill = await decoding(panels), await panels.get("EP")
    media = await prefill.see(1, 2)
    prompt = panels.prompt(50, 60, pictures=2)
    first = await split(prefill, decode, panels.work(prompt, salt="recall"), media)
    longer = (*prompt, *first.ids, *panels.prompt(51, 40))
    whole = await split(prefill, decode, panels.work(longer, salt="other"), media)
    again = await decode.answer(panels.work(longer, salt="recall"), bare(media))
    assert again.ids == whole.ids
    assert again.prompt.cached >= max(p.start + p.length for p in whole.prompt.media)
    assert again.prompt.media == whole.prompt.media


async def test_missing_cached_media_are_refused_and_other_requests_go_on(panels: Panels):
    decode, prefill = await decoding(panels), await panels.get("EP")
    media = await prefill.see(3)
    prompt = panels.prompt(52, 60, pictures=1)
    for salt in ("never", "nor this"):
        with pytest.raises(PrefixGone):
            await decode.answer(panels.work(prompt, salt=salt), bare(media))
    others = [decode.answer(panels.work(panels.prompt(n, 80), salt="never")) for n in (53, 54)]
    refused = decode.answer(panels.work(prompt, salt="never"), bare(media))
    results = await asyncio.gather(*others, refused, return_exceptions=True)
    assert isinstance(results.pop(), PrefixGone)
    assert [len(answer.ids) for answer in results] == [12, 12]
    await decode.rest()


async def test_what_had_to_go_is_refused(panels: Panels):
    decode, prefill = await decoding(panels), await panels.get("EP")
    cache = decode.loaded.cache
    assert cache is not None
    media = await prefill.see(4)
    prompt = panels.prompt(55, 60, pictures=1)
    work = panels.work(prompt, salt="goes")
    await split(prefill, decode, work, media)
    await decode.answer(work, bare(media))  # it is there
    for number in range(cache.blocks // (FILLER // cache.block_size) + 2):
        filler = panels.work(panels.prompt(2000 + number, FILLER), salt="goes", max_tokens=1)
        await decode.answer(filler)
    with pytest.raises(PrefixGone):
        await decode.answer(work, bare(media))
