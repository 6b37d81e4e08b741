"""Whatever ends a request early, or is wrong with it, leaves the engine as it was.

That everything came back is looked at after every test: see ``conftest``.
"""

from __future__ import annotations

import asyncio

import pytest

from contract.engines.panels import CONTEXT, Listener, Panels, owned
from triptych.engines.base import Generation, Media
from triptych.errors import (
    ContextLengthExceeded,
    EngineFailed,
    PrefixGone,
    RequestError,
    TicketLost,
    WorkerLost,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
FAULTS = (EngineFailed, PrefixGone, TicketLost, WorkerLost)


async def serves(panels: Panels, role: str = "EPD") -> None:
    """The same engine as before goes on."""
    panel = await panels.get(role)
    assert not panel.dead
    answer = await panel.answer(panels.work(panels.prompt(99), max_tokens=3))
    assert len(answer.ids) == 3


async def test_cancelling_a_stream_ends_it(panels: Panels):
    """While another goes on, which began with it and would end with it."""
    panel = await panels.get("EPD")
    media = await panel.see(1)
    listeners = [Listener() for _ in range(4)]
    calls = []
    for number, listener in enumerate(listeners):
        seen = media[: number % 2]
        work = panels.work(panels.prompt(number, pictures=len(seen)), max_tokens=900)
        generation = Generation(work, "PD", seen)
        calls.append(asyncio.ensure_future(panel.engine.generate(generation, listener)))
    await asyncio.gather(*[listener.begun.wait() for listener in listeners])
    for call in calls[1:]:
        call.cancel()
    await asyncio.gather(*calls[1:], return_exceptions=True)
    assert all(call.cancelled() for call in calls[1:])
    heard = [len(listener.emitted) for listener in listeners[1:]]
    while (report := panel.loaded.report()).running + report.queued > 1:
        await asyncio.sleep(0)
    assert not calls[0].done()
    calls[0].cancel()
    await panel.rest()
    assert [len(listener.emitted) for listener in listeners[1:]] == heard
    await serves(panels)


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_cancelling_at_once_frees_too(panels: Panels, turns: int):
    panel = await panels.get("EPD")
    media = await panel.see(1)
    works = [panels.work(panels.prompt(number, 60, 1), max_tokens=800) for number in range(8)]
    calls = [asyncio.ensure_future(panel.answer(work, media)) for work in works]
    for _ in range(turns):
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await panel.rest()
    await serves(panels)


async def test_cancelling_one_leaves_the_others_running(panels: Panels):
    panel = await panels.get("EPD")
    works = [panels.work(panels.prompt(number), max_tokens=40) for number in range(4)]
    expected = [await panel.answer(work) for work in works]
    listener = Listener()
    long = Generation(panels.work(panels.prompt(50), max_tokens=900), "PD", ())
    call = asyncio.ensure_future(panel.engine.generate(long, listener))
    others = [asyncio.ensure_future(panel.answer(work)) for work in works]
    await listener.begun.wait()
    call.cancel()
    assert [one.ids for one in await asyncio.gather(*others)] == [one.ids for one in expected]
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_context_that_is_too_long_is_the_requests_own_fault(panels: Panels):
    panel = await panels.get("EPD")
    for length, max_tokens in ((CONTEXT - 5, 6), (CONTEXT, None), (CONTEXT + 1, 1)):
        work = panels.work(panels.prompt(1, length), max_tokens=max_tokens)
        with pytest.raises(ContextLengthExceeded):
            await panel.answer(work)
    fits = await panel.answer(panels.work(panels.prompt(1, CONTEXT - 5), max_tokens=5))
    assert len(fits.ids) == 5
    await serves(panels)


async def test_ids_that_are_not_tokens_are_a_client_error(panels: Panels):
    panel = await panels.get("EPD")
    for prompt in ((5, 10**6), (5, -1), ()):
        with pytest.raises(RequestError):
            await panel.answer(panels.work(prompt))
    await serves(panels)


async def test_media_that_are_not_there_fail_their_request_alone(panels: Panels):
    panel, encoder = await panels.get("EPD"), await panels.get("E")
    work = panels.work(panels.prompt(2, pictures=1), salt="missing")
    [encoded] = map(owned, await encoder.see(1))
    [own] = await panel.see(1)
    for media in ((), (Media(own.meta, ()),), (Media(encoded.meta, ()),), (own, own)):
        with pytest.raises(FAULTS):
            await panel.answer(work, media)
    await serves(panels)
    assert (await panel.answer(work, [own])).ids == (await panel.answer(work, [encoded])).ids


async def test_an_embedding_of_another_shape_fails_its_request_alone(panels: Panels):
    panel, encoder = await panels.get("EPD"), await panels.get("E")
    work = panels.work(panels.prompt(3, pictures=1), salt="shapes")
    [right] = map(owned, await encoder.see(1))
    [array] = right.arrays
    tokens, width = array.shape
    size = array.buffer.nbytes // tokens
    for shape, held in (
        ((tokens - 1, width), (tokens - 1) * size),
        ((tokens, width // 2), tokens * size // 2),
        ((tokens, width), tokens * size - 4),
    ):
        wrong = type(array)(array.buffer[:held], array.dtype, shape)
        with pytest.raises(FAULTS):
            await panel.answer(work, [Media(right.meta, (wrong,))])
    await serves(panels)
    assert (await panel.answer(work, [right])).ids


async def test_blocks_computed_from_stale_memory_are_not_cached(panels: Panels):
    """A caller that finds its tickets lost cancels itself while the first result is emitted."""
    panel, encoder = await panels.get("EPD"), await panels.get("E")
    prompt = panels.prompt(4, 300, pictures=1)
    right, other = map(owned, await encoder.see(1, 2))
    expected = await panel.answer(panels.work(prompt, salt="true"), [right])
    stale = Media(right.meta, other.arrays)

    async def call() -> None:
        task = asyncio.current_task()
        assert task is not None
        await panel.answer(panels.work(prompt, salt="stale"), [stale], task.cancel)

    with pytest.raises((asyncio.CancelledError, *FAULTS)):
        await asyncio.ensure_future(call())
    await panel.rest()
    fresh = await panel.answer(panels.work(prompt, salt="stale"), [right])
    assert fresh.ids == expected.ids
