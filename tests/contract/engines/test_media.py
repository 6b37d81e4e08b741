"""Pictures: their place, their order, and that an embedding is as good as what it was made of."""

from __future__ import annotations

import pytest

from contract.engines.panels import Panels, lent, owned

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_another_picture_gives_other_tokens(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(1, pictures=1)
    first, second = await panel.see(1, 2)
    one = await panel.answer(panels.work(prompt), [first])
    other = await panel.answer(panels.work(prompt), [second])
    again = await panel.answer(panels.work(prompt), await panel.see(1))
    assert first.meta.key != second.meta.key
    assert one.ids != other.ids
    assert one.ids == again.ids


async def test_a_picture_takes_its_place_in_the_prompt(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(2, pictures=1)
    [shown] = await panel.see(1)
    answer = await panel.answer(panels.work(prompt), [shown])
    image = panels.model.media_ids["image"]
    at, rows = prompt.index(image), shown.meta.tokens
    assert rows > 1
    assert answer.prompt.ids == (*prompt[:at], *(image,) * rows, *prompt[at + 1 :])
    assert answer.prompt.tokens == len(answer.prompt.ids)


async def test_several_pictures_keep_their_order(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(3, pictures=3)
    a, b, c = await panel.see(1, 2, 3)
    orders = ((a, b, c), (c, b, a), (a, a, c))
    answers = [await panel.answer(panels.work(prompt), order) for order in orders]
    assert len({tuple(answer.ids) for answer in answers}) == 3
    assert (await panel.answer(panels.work(prompt, salt="x"), orders[0])).ids == answers[0].ids


async def test_an_embedding_answers_like_the_picture(panels: Panels):
    """From another worker, where the engine encodes by itself and where it can't."""
    prompt = panels.prompt(4, pictures=2)
    whole = await panels.get("EPD")
    expected = await whole.answer(panels.work(prompt, logprobs=1), await whole.see(1, 2))
    encoder = await panels.get("E")
    made = await encoder.see(1, 2)
    assert all(media.encoded and media.arrays for media in made)
    for role in ("EPD", "PD"):
        panel = await panels.get(role)
        async with lent(made, encoder, panel) as media:
            found = await panel.answer(panels.work(prompt, salt="embedded", logprobs=1), media)
        assert found.ids == expected.ids
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_after_the_first_answer_the_media_are_needed_no_more(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(5, pictures=1)
    expected = await panel.answer(panels.work(prompt, max_tokens=40), await panel.see(1))
    [media] = map(owned, await panel.see(1))

    def spoil() -> None:
        for array in media.arrays:
            array.buffer[:] = bytes(array.buffer.nbytes)

    found = await panel.answer(panels.work(prompt, max_tokens=40, salt="spoilt"), [media], spoil)
    again = await panel.answer(
        panels.work(prompt, max_tokens=40, salt="spoilt"), await panel.see(1)
    )
    assert found.ids == again.ids == expected.ids
