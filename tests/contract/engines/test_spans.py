"""Prefill here and decode there: the same tokens, each once, from the KV cache and no media."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from contract.engines.panels import Answer, Listener, Panel, Panels, lent, prefilling, split
from triptych.engines.base import Generation, Media
from triptych.errors import EngineFailed, TicketLost, WorkerLost
from triptych.messages import Work
from triptych.transfer.base import Array

pytestmark = pytest.mark.asyncio(loop_scope="session")
FAULTS = (EngineFailed, TicketLost, WorkerLost)


def asked(panels: Panels) -> list[tuple[Work, tuple[int, ...]]]:
    """Words, one picture, two pictures; greedy, and sampled where seeds decide."""
    sampled = 0.0 if "seeds" in panels.traits.lacks else 1.0
    return [
        (panels.work(panels.prompt(seed, length, len(seen)), temperature=heat, logprobs=2), seen)
        for seed, length, seen, heat in (
            (1, 30, (), 0.0),
            (2, 150, (1,), 0.0),
            (3, 40, (2, 1), 0.0),
            (4, 12, (3,), sampled),
        )
    ]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def expected(one_engine: Panels) -> list[Answer]:
    """What the engine answers in one piece."""
    whole = await one_engine.get("EPD")
    return [await whole.answer(work, await whole.see(*seen)) for work, seen in asked(one_engine)]


def equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    assert [one.ids for one in found] == [one.ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.finish == other.finish
        assert one.prompt.ids == other.prompt.ids
        assert len(one.logprobs) == len(one.ids)
        for entry, like in zip(one.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(like.logprob, abs=1e-3)


async def test_prefill_and_decode_apart_give_the_tokens_of_the_whole(panels: Panels, expected):
    """As in EP/D; all at once."""
    decode, prefill = await panels.get("D"), await panels.get("EP")
    shown = [(work, await prefill.see(*seen)) for work, seen in asked(panels)]
    found = await asyncio.gather(*[split(prefill, decode, work, seen) for work, seen in shown])
    equal(found, expected)


async def test_encode_prefill_and_decode_apart_give_the_tokens_of_the_whole(
    panels: Panels, expected
):
    """As in E/P/D."""
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    found = []
    for work, seen in asked(panels):
        async with lent(await encoder.see(*seen), encoder, prefill) as media:
            found.append(await split(prefill, decode, work, media))
    equal(found, expected)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_first_token_that_is_the_last_comes_once(panels: Panels, max_tokens: int):
    decode, prefill = await panels.get("D"), await panels.get("P")
    prompt = panels.prompt(5)
    longer = await split(prefill, decode, panels.work(prompt))
    work = panels.work(prompt, max_tokens=max_tokens)
    answer = await split(prefill, decode, work)
    assert answer.ids == longer.ids[:max_tokens]
    assert answer.finish == "length"
    stop = panels.work(prompt, stop_token_ids=(longer.ids[0],))
    stopped = await split(prefill, decode, stop)
    assert stopped.ids == longer.ids[:1]
    assert stopped.finish == "stop"


@pytest.mark.parametrize("role", ["P", "D"])
async def test_every_role_answers_words_alone(panels: Panels, role: str):
    """How a worker shows that its engine works."""
    panel = await panels.get(role)
    answer = await panel.answer(panels.work((1, 2, 3), max_tokens=1, ignore_eos=False))
    assert len(answer.ids) == 1


async def test_decode_goes_on_from_the_kv_cache_it_was_given(panels: Panels):
    """The KV cache of another picture, under the name of the first: its answer is the other's."""
    panels.needs("blind decode")
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    prompt = panels.prompt(6, 40, pictures=1)
    [first], [second] = await encoder.see(1), await encoder.see(2)
    apart = [
        await split(prefill, decode, panels.work(prompt, salt="apart"), [media])
        for media in (first, second)
    ]
    assert apart[0].ids != apart[1].ids
    work = panels.work(prompt, salt="crossed")
    async with prefilling(prefill, decode, work, [second]) as handed:
        listener = Listener(handed.let_go)
        crossed = replace(handed.decode(work), media=(Media(first.meta, ()),))
        await decode.engine.generate(crossed, listener)
    given = [*handed.delta.ids, *listener.answer().ids]
    assert given == apart[1].ids


async def test_cancelling_between_prefill_and_decode_frees_both(panels: Panels):
    decode, prefill = await panels.get("D"), await panels.get("P")
    for number in range(3):
        async with prefilling(prefill, decode, panels.work(panels.prompt(number, 100)), ()):
            pass
    await prefill.rest()
    await decode.rest()


async def test_cancelling_decode_frees_both(panels: Panels):
    decode, prefill = await panels.get("D"), await panels.get("P")
    work = panels.work(panels.prompt(7, 100), max_tokens=800)
    for turns in (0, 3):
        async with prefilling(prefill, decode, work, ()) as handed:
            call = asyncio.ensure_future(decode.engine.generate(handed.decode(work), Listener()))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
    listener = Listener()
    async with prefilling(prefill, decode, work, ()) as handed:
        call = asyncio.ensure_future(decode.engine.generate(handed.decode(work), listener))
        await listener.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await prefill.rest()
    await decode.rest()
    assert (await split(prefill, decode, panels.work(panels.prompt(7), max_tokens=5))).ids


async def test_a_hand_over_that_is_none_fails_its_request_alone(panels: Panels):
    decode, prefill = await panels.get("D"), await panels.get("P")
    work = panels.work(panels.prompt(8, 100))
    expected = await split(prefill, decode, work)
    async with prefilling(prefill, decode, work, ()) as handed:
        generation = handed.decode(work)
        for text in (b"{}", b"[1, 2]", b"\xff\x00", b'{"room": -1}'):
            wrong = Array(memoryview(bytearray(text)), "uint8", (len(text),))
            with pytest.raises(FAULTS):
                await decode.engine.generate(replace(generation, kv=(wrong,)), Listener())
        for kv in ((), (*generation.kv, *generation.kv)):
            with pytest.raises(FAULTS):
                await decode.engine.generate(replace(generation, kv=kv), Listener())
    await decode.rest()
    assert (await split(prefill, decode, work)).ids == expected.ids


@pytest.mark.parametrize("last", [False, True], ids=["goes on", "stops at once"])
async def test_blocks_that_decode_computed_from_stale_memory_are_not_cached(
    panels: Panels, last: bool
):
    """Prefill's call ended before decode had read: the caller finds its ticket lost in time."""
    decode, prefill = await panels.get("D"), await panels.get("P")
    prompt = panels.prompt(9, 300)
    expected = await split(prefill, decode, panels.work(prompt, salt="true"))
    work = panels.work(prompt, salt="late")
    async with prefilling(prefill, decode, work, ()) as handed:
        kept = tuple(map(copied, handed.kv))
    other = panels.work(panels.prompt(11, 300))
    async with prefilling(prefill, decode, other, ()) as later:
        if not is_note(kept):  # its memory has another's KV cache now
            kept = tuple(map(copied, later.kv))
    for number in range(4):  # and so have its blocks
        await prefill.answer(panels.work(panels.prompt(60 + number, 300), max_tokens=20))
    if last:
        work = panels.work(prompt, salt="late", stop_token_ids=every_token(panels))
    late = Generation(work, "D", (), kept, handed.delta)
    await gives_up(decode, late)
    fresh = await split(prefill, decode, panels.work(prompt, salt="late"))
    assert fresh.ids == expected.ids


@pytest.mark.parametrize("last", ["", "length", "stop"])
async def test_blocks_that_prefill_computed_from_stale_memory_are_not_cached(
    panels: Panels, last: str
):
    """Also where its first token is the last."""
    ends: dict[str, Any] = {
        "length": {"max_tokens": 1},
        "stop": {"stop_token_ids": every_token(panels)},
    }
    encoder, decode, prefill = await panels.get("E"), await panels.get("D"), await panels.get("P")
    prompt = panels.prompt(10, 300, pictures=1)
    right, other = await encoder.see(1, 2)
    expected = await split(prefill, decode, panels.work(prompt, salt="true"), [right])
    salt = f"stale {last}"
    work = panels.work(prompt, salt=salt, **ends.get(last, {}))
    await gives_up(prefill, Generation(work, "P", (replace(right, arrays=other.arrays),)))
    fresh = await split(prefill, decode, panels.work(prompt, salt=salt), [right])
    assert fresh.ids == expected.ids


def every_token(panels: Panels) -> tuple[int, ...]:
    return tuple(range(panels.model.vocabulary))


async def gives_up(panel: Panel, generation: Generation) -> None:
    """A stage whose tickets are lost cancels itself while the first result is emitted."""

    async def call() -> None:
        task = asyncio.current_task()
        assert task is not None
        await panel.engine.generate(generation, Listener(task.cancel))

    with pytest.raises((asyncio.CancelledError, *FAULTS)):
        await asyncio.ensure_future(call())
    await panel.rest()
    assert not panel.dead


def copied(array: Array) -> Array:
    return replace(array, buffer=memoryview(bytes(array.buffer)))


def is_note(arrays: Sequence[Array]) -> bool:
    """Whether an engine that moves its KV cache itself wrote them."""
    return len(arrays) == 1 and bytes(arrays[0].buffer[:1]) == b"{"
