"""min_tokens, bad_words, allowed_token_ids and prompt_logprobs, beside plain transformers."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import torch
from tools import tiny
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
)

import reference
from support.torch_engine import Bench, settled, split, whole
from triptych.engines.torch.sampler import PermittedTokens, Sampler
from triptych.messages import Sampling

TIGHT = {"step_tokens": 24, "kv_blocks": 64, "block_size": 4, "max_running": 8}
VOCABULARY = 50
PROMPT = [120, 121, 122, 123, 124]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tiny.make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model") / "tiny"))


# --- the sampler alone


def first(logits: torch.Tensor, made: list[int], ends: frozenset[int] = frozenset(), **settings):
    """The token after a prompt [1, 2] and these."""
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"), ends)
    sampler.assign(0, Sampling(1, **{"temperature": 0.0, **settings}), [1, 2, *made], 2)
    return sampler.choose(logits, [0], [2 + len(made)]).ids[0]


def ramp(*best: int) -> torch.Tensor:
    """Logits by which these tokens are the best, in this order."""
    logits = torch.zeros(1, VOCABULARY)
    for place, token in enumerate(best):
        logits[0, token] = 10.0 - place
    return logits


def test_end_and_stop_tokens_are_put_off():
    logits, settings = ramp(7, 8, 9), {"stop_token_ids": (8, 10_000), "min_tokens": 2}
    assert first(logits, [], frozenset({7}), **settings) == 9
    assert first(logits, [3], frozenset({7}), **settings) == 9
    assert first(logits, [3, 3], frozenset({7}), **settings) == 7
    # As with vLLM, also where end tokens do not end a stream.
    assert first(logits, [], frozenset({7}), ignore_eos=True, **settings) == 9


def test_a_bad_word_is_never_completed():
    logits, words = ramp(7, 8), ((7,), (4, 8), (3, 4, 8))
    assert first(logits, [], bad_words=words) == 8
    assert first(logits, [4], bad_words=words) == 0  # neither 7 nor 8
    assert first(logits, [3], bad_words=words) == 8
    # 2 is a token of the prompt: as with vLLM, no word begins there.
    assert first(logits, [], bad_words=((2, 7),)) == 7
    assert first(logits, [2], bad_words=((2, 7),)) == 8
    assert first(logits, [9], bad_words=((2, 9, 7),)) == 7


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 1e-5, "top_p": 0.5}]
)
def test_no_other_token_than_the_allowed_comes(settings):
    logits = ramp(7, 8)
    assert first(logits, [], allowed_token_ids=(30,), **settings) == 30
    # All of them avoided too: one of them still comes, and none that is not allowed.
    for avoided in ({"bad_words": ((30,),)}, {"stop_token_ids": (30,), "min_tokens": 3}):
        assert first(logits, [], allowed_token_ids=(30,), **avoided, **settings) == 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_avoided_token_comes_rather_than_one_outside_the_grammar(temperature):
    """Token 9 alone is permitted, and a bad word; token 7 ends, and comes too early."""
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"), frozenset({7}))
    settings = {"temperature": temperature, "min_tokens": 5, "bad_words": ((9,),)}
    sampler.assign(0, Sampling(1, **settings), [1, 2], 2)
    tokens = np.zeros((1, VOCABULARY), bool)
    tokens[0, 9] = True
    permitted = PermittedTokens([0], tokens)
    assert sampler.choose(ramp(7, 8), [0], [2], permitted).ids == [9]


def test_other_rows_and_later_sequences_are_unchanged():
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    plain, best = Sampling(5), int(logits[1].argmax())
    sampler = Sampler(3, VOCABULARY, torch.device("cpu"))
    for row in range(3):
        sampler.assign(row, plain, [1], 1)
    before = sampler.choose(logits, [0, 1, 2], [1, 1, 1]).ids
    barred = Sampling(5, temperature=0, bad_words=((best,),), allowed_token_ids=(3, best))
    sampler.assign(1, barred, [1], 1)
    assert sampler.choose(logits, [0, 1, 2], [1, 1, 1]).ids == [before[0], 3, before[2]]
    sampler.assign(1, plain, [1], 1)
    assert sampler.choose(logits, [0, 1, 2], [1, 1, 1]).ids == before


def test_logprobs_stay_the_models():
    logits = ramp(7, 8)
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    sampler.assign(0, Sampling(1, temperature=0, logprobs=1, allowed_token_ids=(8,)), [1], 1)
    found = sampler.choose(logits, [0], [1]).logprobs[0]
    assert found.logprob == pytest.approx(logits.log_softmax(-1)[0, 8].item())
    assert found.top[0].id == 7


# --- the engine


def stock(bench: Bench, prompt: list[int], processors: list, tokens: int) -> list[int]:
    """Greedy tokens of transformers."""
    model, ids, inputs = reference._prepare(bench.folder, prompt, (), None)
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=model.config.get_text_config().vocab_size,  # one that never comes
            logits_processor=LogitsProcessorList(processors),
            **inputs,
        )
    return made[0, len(prompt) :].tolist()


async def test_min_tokens_are_those_of_transformers(bench):
    plain = stock(bench, PROMPT, [], 12)
    ends = [plain[0], plain[3]]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, ends, device="cpu")
    expected = stock(bench, PROMPT, [processor], 24)
    with bench.engine() as engine:
        work = bench.work(
            PROMPT, max_tokens=24, min_tokens=8, stop_token_ids=tuple(ends), ignore_eos=True
        )
        answer = await whole(engine, *work)
    # ``min_tokens`` also puts off the model's own end tokens, which are not among the best here.
    assert answer.ids[:8] == expected[:8]
    assert not set(ends) & set(answer.ids[:8])
    assert plain[:8] != expected[:8]


async def test_bad_words_are_those_of_transformers(bench):
    plain = stock(bench, PROMPT, [], 12)
    words = [[plain[0]], plain[2:4], plain[4:7]]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=None)
    expected = stock(bench, PROMPT, [processor], 24)
    with bench.engine() as engine:
        work = bench.work(
            PROMPT, max_tokens=24, ignore_eos=True, bad_words=tuple(map(tuple, words))
        )
        answer = await whole(engine, *work)
    assert answer.ids == expected != plain


RESTRICTED = {
    "temperature": 1.0,
    "max_tokens": 40,
    "allowed_token_ids": tuple(range(100, 130)),
    "bad_words": ((101,), (102, 103), (104, 105)),
    "stop_token_ids": (106, 107),
    "min_tokens": 30,
    "ignore_eos": True,
}


async def test_they_hold_when_prefill_is_apart_and_sequences_are_preempted(bench):
    requests = bench.prompts(8, pictures=1, seed=5)
    works = [
        bench.work(r.prompt, r.pictures, **{**RESTRICTED, "seed": seed})
        for seed, r in enumerate(requests)
    ]
    with bench.engine() as engine, bench.engine() as other:
        alone = [(await whole(engine, *work)).ids for work in works]
        apart = [(await split(engine, other, *work)).ids for work in works]
    with bench.engine(block_size=4, kv_blocks=90) as engine:
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        assert await settled(engine)
        assert engine.report().counters["preemptions"] > 0
    assert alone == apart == [answer.ids for answer in answers]
    for ids in alone:
        assert set(ids) <= set(RESTRICTED["allowed_token_ids"]) - {101}
        assert not {(102, 103), (104, 105)} & set(itertools.pairwise(ids))
        assert len(ids) >= 30
        assert not {106, 107} & set(ids[:30])


async def test_they_change_no_token_of_other_requests(bench):
    requests = bench.prompts(6, pictures=0, seed=9)
    plain = [bench.work(r.prompt, temperature=1.0, seed=n) for n, r in enumerate(requests)]
    with bench.engine() as engine:
        before = [(await whole(engine, *work)).ids for work in plain]
        mixed = [*plain, *[bench.work(r.prompt, **RESTRICTED) for r in requests]]
        answers = await asyncio.gather(*[whole(engine, *work) for work in mixed])
    assert [answer.ids for answer in answers[:6]] == before


# --- log-probabilities of the prompt


def expected_logprobs(bench: Bench, ids: list[int], pictures) -> list[float]:
    """Of all tokens but the first, by transformers."""
    model, prompt, inputs = reference._prepare(bench.folder, ids, pictures, None)
    with torch.inference_mode():
        output = model(input_ids=prompt, attention_mask=torch.ones_like(prompt), **inputs)
    logprobs = output.logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, prompt[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["whole", "in chunks"])
async def test_logprobs_of_the_prompt_are_those_of_transformers(bench, settings):
    requests = bench.prompts(6, pictures=1, seed=4)
    with bench.engine(**settings) as engine:
        plain = [bench.work(r.prompt, r.pictures) for r in requests]
        before = await asyncio.gather(*[whole(engine, *work) for work in plain])
        works = [
            bench.work(r.prompt, r.pictures, prompt_logprobs=n) for n, r in enumerate(requests)
        ]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        assert answer.ids == before[number].ids
        info = answer.deltas[0].prompt
        assert info is not None
        assert info.cached == 0  # though the prompt was in the prefix cache
        ids = list(info.ids or ())
        found = info.logprobs
        assert len(found) == len(ids) - 1
        assert all(len(one.top) == number for one in found)
        best = [one for one in found if number and one.rank == 1]
        assert all(one.top[0].logprob == one.logprob for one in best)
        expected = expected_logprobs(bench, ids, request.pictures)
        assert [one.logprob for one in found] == pytest.approx(expected, abs=1e-4)


async def test_logprobs_of_the_prompt_come_from_prefill(bench):
    work = bench.work(PROMPT, prompt_logprobs=1)
    with bench.engine() as engine, bench.engine() as other:
        alone = await whole(engine, *work)
        apart = await split(engine, other, *work)
    assert apart.ids == alone.ids
    assert apart.deltas[0].prompt == alone.deltas[0].prompt
    assert not any(delta.prompt for delta in apart.deltas[1:])


async def test_a_sequence_moved_out_amid_its_prompt_keeps_its_logprobs(bench):
    prompt = [100 + at % 90 for at in range(200)]
    with bench.engine() as engine:
        expected = await whole(engine, *bench.work(prompt, prompt_logprobs=2))
    with bench.engine(block_size=4, step_tokens=24) as engine:
        scheduler = engine._scheduler
        schedule, moved = scheduler.schedule, []

        def disturbed():
            if scheduler.running and len(moved) < 3:
                moved.append(scheduler.running[0].computed)
                scheduler._preempt(scheduler.running[0])
            return schedule()

        scheduler.schedule = disturbed
        answer = await whole(engine, *bench.work(prompt, prompt_logprobs=2))
    assert any(0 < computed < 200 for computed in moved)
    found, wanted = answer.deltas[0].prompt, expected.deltas[0].prompt
    assert found is not None
    assert wanted is not None
    assert [one.logprob for one in found.logprobs] == pytest.approx(
        [one.logprob for one in wanted.logprobs], abs=1e-4
    )
