"""The prefix cache: hits are reported, and belong to one tenant and one picture."""

from __future__ import annotations

import pytest

from contract.engines.panels import Panels

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = 400  # words: some blocks of every engine


async def test_entries_from_before_are_found_again(panels: Panels):
    panels.needs("prefix cache")
    panel = await panels.get("EPD")
    prompt = panels.prompt(1, LONG)
    fresh = await panel.answer(panels.work(prompt, salt="found"))
    again = await panel.answer(panels.work(prompt, salt="found"))
    assert fresh.prompt.cached == 0
    assert LONG // 2 < again.prompt.cached < LONG
    assert again.ids == fresh.ids


async def test_tenants_have_caches_of_their_own(panels: Panels):
    panels.needs("prefix cache")
    panel = await panels.get("EPD")
    prompt = panels.prompt(2, LONG)
    answers = [await panel.answer(panels.work(prompt, salt=salt)) for salt in ("one", "two", "")]
    assert [answer.prompt.cached for answer in answers] == [0, 0, 0]
    assert len({tuple(answer.ids) for answer in answers}) == 1


async def test_another_picture_is_not_found_in_the_place_of_the_first(panels: Panels):
    panels.needs("prefix cache")
    panel = await panels.get("EPD")
    start, rest = panels.prompt(3, 10, pictures=1), panels.prompt(4, LONG)
    prompt = (*start, *rest)
    place = prompt.index(panels.model.media_ids["image"])
    first, second = await panel.see(1, 2)
    one = await panel.answer(panels.work(prompt, salt="pictures"), [first])
    other = await panel.answer(panels.work(prompt, salt="pictures"), [second])
    again = await panel.answer(panels.work(prompt, salt="pictures"), [first])
    assert one.prompt.cached == 0
    assert other.prompt.cached <= place
    assert again.prompt.cached > LONG // 2
    assert one.ids == again.ids != other.ids
