"""Tokens: which, how many, why they end, and what is reported with them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.engines.panels import CONTEXT, Panels
from triptych.errors import InvalidSchema, InvalidValue
from triptych.messages import Grammar

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_tokens_are_always_the_same(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(1)
    first = await panel.answer(panels.work(prompt))
    again = await panel.answer(panels.work(prompt, seed=2, salt="again"))
    other = await panel.answer(panels.work(panels.prompt(2)))
    assert len(first.ids) == 12
    assert first.ids == again.ids
    assert first.ids != other.ids


async def test_the_first_delta_has_the_prompt_and_the_last_has_the_finish(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(3)
    answer = await panel.answer(panels.work(prompt, max_tokens=24))
    assert len(answer.deltas) > 1
    assert all(delta.ids for delta in answer.deltas)
    assert all(not delta.logprobs for delta in answer.deltas)
    assert answer.finish == "length"
    assert answer.prompt.tokens == len(prompt)
    assert answer.prompt.ids == prompt


async def test_a_stream_reports_its_timings(panels: Panels):
    panels.needs("times")
    panel = await panels.get("EPD")
    answer = await panel.answer(panels.work(panels.prompt(9), max_tokens=24))
    assert "prefill" in (answer.deltas[0].timings or {})
    assert "decode" in (answer.deltas[-1].timings or {})
    told = [delta.timings or {} for delta in answer.deltas]
    assert all(seconds >= 0 for spent in told for seconds in spent.values())


@pytest.mark.parametrize("count", [1, 2, 7])
async def test_max_tokens_are_generated_and_not_one_more(panels: Panels, count: int):
    panel = await panels.get("EPD")
    longer = await panel.answer(panels.work(panels.prompt(4)))
    answer = await panel.answer(panels.work(panels.prompt(4), max_tokens=count))
    assert answer.ids == longer.ids[:count]
    assert answer.finish == "length"


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 0.01, "temperature": 1e-5, "top_p": 1e-300, "min_p": 1.0},
        {"repetition_penalty": 2.0, "temperature": 100.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 1e-5},
        {"logit_bias": {1: 100.0, 2: -100.0}, "repetition_penalty": 0.01, "temperature": 0.5},
        {"top_p": 1e-300, "temperature": 1.0, "top_k": 1},
        {"min_p": 1.0, "temperature": 100.0},
    ],
    ids=str,
)
async def test_b45_extreme_settings_give_tokens_or_are_refused(
    panels: Panels, settings: dict[str, Any]
):
    """An engine whose own range is narrower refuses what lies outside it; ours does not."""
    panel = await panels.get("EPD")
    work = panels.work(panels.prompt(4), max_tokens=3, ignore_eos=True, **settings)
    try:
        answer = await panel.answer(work)
    except InvalidValue:
        assert panels.name not in ("torch", "fake")
    else:
        assert len(answer.ids) == 3


async def test_without_max_tokens_the_context_is_the_end(panels: Panels):
    panel = await panels.get("EPD")
    prompt = panels.prompt(5, CONTEXT - 9)
    answer = await panel.answer(panels.work(prompt, max_tokens=None))
    assert len(answer.ids) == 9
    assert answer.finish == "length"


async def test_a_stop_token_is_the_last(panels: Panels):
    panel = await panels.get("EPD")
    whole = (await panel.answer(panels.work(panels.prompt(6)))).ids
    stop = whole[5]
    answer = await panel.answer(panels.work(panels.prompt(6), stop_token_ids=(stop,)))
    assert answer.ids == whole[: whole.index(stop) + 1]
    assert answer.finish == "stop"


async def test_a_stop_token_does_not_come_before_min_tokens(panels: Panels):
    panels.needs("min_tokens")
    panel = await panels.get("EPD")
    whole = (await panel.answer(panels.work(panels.prompt(6)))).ids
    work = panels.work(panels.prompt(6), stop_token_ids=(whole[1],), min_tokens=6)
    answer = await panel.answer(work)
    assert len(answer.ids) >= 6
    assert whole[1] not in answer.ids[:6]


async def test_words_that_must_not_come_and_those_that_alone_may(panels: Panels):
    panels.needs("word lists")
    panel = await panels.get("EPD")
    whole = (await panel.answer(panels.work(panels.prompt(6)))).ids
    barred = ((whole[0],), (whole[3], whole[4]))
    answer = await panel.answer(panels.work(panels.prompt(6), bad_words=barred))
    assert whole[0] not in answer.ids
    assert (whole[3], whole[4]) not in itertools.pairwise(answer.ids)
    allowed = tuple(dict.fromkeys(whole[:4]))
    work = panels.work(panels.prompt(6), temperature=1.0, allowed_token_ids=allowed)
    assert set((await panel.answer(work)).ids) <= set(allowed)


@pytest.mark.parametrize("count", [0, 2])
async def test_logprobs_of_the_prompt_are_of_all_tokens_but_the_first(panels: Panels, count: int):
    panels.needs("word lists")
    panel = await panels.get("EPD")
    prompt = panels.prompt(8)
    for _ in range(2):  # the second time the prefix cache has the prompt
        answer = await panel.answer(panels.work(prompt, prompt_logprobs=count))
        assert len(answer.prompt.logprobs) == len(prompt) - 1
        assert all(one.logprob <= 0 < one.rank for one in answer.prompt.logprobs)
        assert all(len(one.top) == count for one in answer.prompt.logprobs)


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar("choice", '["abc","xyz"]'), {"abc", "xyz"}),
        (Grammar("regex", "(ab){2}|c"), {"abab", "c"}),
        (Grammar("json", '{"enum":["a",1]}'), {'"a"', "1"}),
        (Grammar("grammar", 'root ::= "x" | "y" "z"'), {"x", "yz"}),
    ],
)
async def test_a_grammar_is_followed_to_its_end(panels: Panels, grammar: Grammar, texts: set[str]):
    panels.needs("grammars")
    panel = await panels.get("EPD")
    work = panels.work(panels.prompt(6), max_tokens=24, temperature=1.0, grammar=grammar)
    answer = await panel.answer(work)
    tokenizer = Tokenizer.from_file(str(panels.model.folder / "tokenizer.json"))
    assert tokenizer.decode(answer.ids) in texts
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "("), Grammar("json", '{"type":"nothing"}'), Grammar("grammar", "?")],
)
async def test_b13_a_grammar_that_is_wrong_fails_its_own_request(panels: Panels, grammar: Grammar):
    panels.needs("grammars")
    panel = await panels.get("EPD")
    with pytest.raises(InvalidSchema):
        await panel.answer(panels.work(panels.prompt(6), grammar=grammar))
    assert (await panel.answer(panels.work(panels.prompt(6), max_tokens=2))).ids


async def test_an_end_token_ends_unless_it_is_ignored(panels: Panels):
    panels.needs("logits")
    panel = await panels.get("EPD")
    for end in panels.model.end_ids:
        forced = {"logit_bias": {end: 100.0}, "max_tokens": 3}
        ended = await panel.answer(panels.work(panels.prompt(7), ignore_eos=False, **forced))
        assert ended.ids == [end]
        assert ended.finish == "stop"
        ignored = await panel.answer(panels.work(panels.prompt(7), **forced))
        assert ignored.ids == [end] * 3
        assert ignored.finish == "length"


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_are_of_the_chosen_and_of_the_best(panels: Panels, count: int):
    panel = await panels.get("EPD")
    answer = await panel.answer(panels.work(panels.prompt(8), logprobs=count))
    assert all(len(delta.logprobs) == len(delta.ids) for delta in answer.deltas)
    for id, entry in zip(answer.ids, answer.logprobs, strict=True):
        assert entry.logprob <= 0
        assert len({one.id for one in entry.top}) == len(entry.top) == count
        assert list(entry.top) == sorted(entry.top, key=lambda one: -one.logprob)
        if count:  # the greedy choice is the best
            assert (entry.top[0].id, entry.top[0].logprob) == (id, entry.logprob)
    assert answer.ids == (await panel.answer(panels.work(panels.prompt(8)))).ids


async def test_logprobs_are_the_models_own_whatever_is_done_to_the_choice(panels: Panels):
    panels.needs("logits")
    panel = await panels.get("EPD")
    prompt = panels.prompt(9)
    plain = await panel.answer(panels.work(prompt, logprobs=3))
    narrow = {"temperature": 0.5, "top_k": 1, "top_p": 0.9, "min_p": 0.1}
    answer = await panel.answer(panels.work(prompt, logprobs=3, **narrow))
    assert answer.ids == plain.ids
    for found, own in zip(answer.logprobs, plain.logprobs, strict=True):
        assert found.logprob == pytest.approx(own.logprob, abs=1e-4)
        assert [one.id for one in found.top] == [one.id for one in own.top]


async def test_logprobs_are_the_models_own_under_a_bias_too(panels: Panels):
    panels.needs("logits")
    panels.needs("unbiased logprobs")
    panel = await panels.get("EPD")
    prompt = panels.prompt(9)
    [own] = (await panel.answer(panels.work(prompt, max_tokens=1, logprobs=3))).logprobs
    second = own.top[1]
    pushed = panels.work(prompt, max_tokens=1, logprobs=3, logit_bias={second.id: 100.0})
    answer = await panel.answer(pushed)
    assert answer.ids == [second.id]
    [found] = answer.logprobs
    assert found.logprob == pytest.approx(second.logprob, abs=1e-4)
    assert [one.id for one in found.top] == [one.id for one in own.top]


async def test_a_seed_decides_and_another_decides_otherwise(panels: Panels):
    panels.needs("seeds")
    panel = await panels.get("EPD")
    works = [
        panels.work(panels.prompt(10), temperature=1.0, seed=seed, salt=salt)
        for seed, salt in ((7, ""), (7, "again"), (8, ""))
    ]
    answers = [await panel.answer(work) for work in works]
    crowd = await asyncio.gather(*[panel.answer(work) for work in works])
    assert answers[0].ids == answers[1].ids
    assert answers[0].ids != answers[2].ids
    assert [answer.ids for answer in crowd] == [answer.ids for answer in answers]


async def test_sixteen_at_once_are_answered_like_one_at_a_time(panels: Panels):
    panel = await panels.get("EPD")
    shown = await panel.see(1, 2, 3)
    sampled = "seeds" not in panels.traits.lacks

    def asked(number: int, salt: str):
        seen = [shown[(number + i) % 3] for i in range(number % 3)]
        prompt = panels.prompt(20 + number, 5 + 11 * (number % 5), len(seen))
        temperature = 1.0 if sampled and number % 4 == 3 else 0.0
        return panels.work(prompt, salt=salt, temperature=temperature, seed=number), seen

    alone = [await panel.answer(*asked(number, "alone")) for number in range(16)]
    crowd = await asyncio.gather(*[panel.answer(*asked(number, "crowd")) for number in range(16)])
    assert [one.ids for one in crowd] == [one.ids for one in alone]
    assert len({tuple(one.ids) for one in alone}) == 16


async def test_tokens_and_logprobs_are_those_of_the_built_in_engine(
    panels: Panels, reference: Panels
):
    panels.needs("logits")
    if panels.name == reference.name:
        pytest.skip("it is the built-in engine")
    panel, built_in = await panels.get("EPD"), await reference.get("EPD")
    for number, seen in enumerate(((), (1,), (2, 3))):
        prompt = panels.prompt(40 + number, pictures=len(seen))
        work = panels.work(prompt, logprobs=3)
        found = await panel.answer(work, await panel.see(*seen))
        expected = await built_in.answer(work, await built_in.see(*seen))
        assert found.prompt.ids == expected.prompt.ids
        assert found.ids == expected.ids
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [top.id for top in one.top] == [top.id for top in other.top]
