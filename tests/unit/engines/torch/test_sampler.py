from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.engines.torch.sampler import Sampler, uniforms
from triptych.messages import Sampling

VOCABULARY = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def choose(samplings, logits, positions=None, histories=None, prompts=None):
    sampler = Sampler(len(samplings), VOCABULARY, torch.device("cpu"))
    histories = histories or [[1, 2, 3]] * len(samplings)
    prompts = prompts or [3] * len(samplings)
    for row, sampling in enumerate(samplings):
        sampler.assign(row, sampling, histories[row], prompts[row])
    positions = positions or [len(history) for history in histories]
    return sampler.choose(logits, list(range(len(samplings))), positions)


def drawn(sampling: Sampling, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Frequencies [vocabulary] of ``count`` draws at as many places."""
    chosen = choose([sampling] * count, logits.expand(count, -1), positions=list(range(count)))
    return torch.bincount(torch.tensor(chosen.ids), minlength=VOCABULARY) / count


def test_temperature_zero_takes_the_best():
    logits = logits_of(4)
    assert choose([Sampling(1, temperature=0)] * 4, logits).ids == logits.argmax(-1).tolist()


def test_a_row_of_nan_is_reported_and_changes_no_other():
    logits = logits_of(3)
    logits[1, 7] = float("nan")
    chosen = choose([Sampling(1, temperature=0), Sampling(2), Sampling(3)], logits)
    assert chosen.finite == [True, False, True]
    assert chosen.ids[0] == int(logits[0].argmax())


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.8),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution_that_transformers_makes(settings, warpers):
    logits = logits_of(1)
    expected = logits.clone()
    for warper in warpers:
        expected = warper(torch.tensor([[0]]), expected)
    expected = expected.softmax(-1)[0]
    found = drawn(Sampling(11, **settings), logits, 20000)
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() < 0.015


def test_the_number_depends_on_seed_and_place_alone():
    numbers = uniforms(
        np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100), 100)
    )
    assert len(set(numbers.tolist())) == 10000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    grid = numbers.reshape(100, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05
    again = uniforms(np.array([7], np.uint64), np.array([42]))
    assert again[0] == grid[7, 42]
    # Written down: another number would break requests that move between versions of a worker.
    assert again[0] == 0.6943368621084349


def test_a_request_gets_the_same_token_in_every_batch():
    logits = logits_of(6)
    samplings = [
        Sampling(5),
        Sampling(6, temperature=0),
        Sampling(7, top_p=0.5),
        Sampling(-3, top_k=3),
        Sampling(2**70, min_p=0.1),
        Sampling(5, presence_penalty=1.0, logit_bias={3: 4.0}),
    ]
    positions = [10, 11, 12, 13, 14, 15]
    together = choose(samplings, logits, positions).ids
    alone = [
        choose([samplings[i]], logits[i : i + 1], positions[i : i + 1]).ids[0] for i in range(6)
    ]
    backwards = choose(samplings[::-1], logits.flip(0), positions[::-1]).ids[::-1]
    assert together == alone == backwards


def test_rounding_noise_does_not_reorder_near_equal_tokens():
    logits = torch.zeros(1, VOCABULARY)
    noisy = logits + 1e-6 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    count = 2000
    samplings = [Sampling(3)] * count
    places = list(range(count))
    one = choose(samplings, logits.expand(count, -1), places).ids
    two = choose(samplings, noisy.expand(count, -1), places).ids
    assert sum(a != b for a, b in zip(one, two, strict=True)) <= 1


def test_repetition_penalty_is_that_of_transformers():
    logits = logits_of(1)
    history = [4, 9, 9, 30, 31]
    expected = RepetitionPenaltyLogitsProcessor(8.0)(torch.tensor([history]), logits.clone())
    sampling = Sampling(1, temperature=0, repetition_penalty=8.0)
    found = choose([sampling], logits, histories=[history], prompts=[2])
    assert found.ids == expected.argmax(-1).tolist()
    best = int(logits.argmax())
    barred = choose([sampling], logits, histories=[[best]], prompts=[1])
    assert barred.ids != [best]


def test_presence_and_frequency_count_generated_tokens_only():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 8], logits[0, 9] = 3.0, 2.5

    def first(history, prompt, **penalty):
        sampling = Sampling(1, temperature=0, **penalty)
        return choose([sampling], logits, histories=[history], prompts=[prompt]).ids[0]

    assert first([8, 8], 2, presence_penalty=2.0) == 8
    assert first([1, 8], 1, presence_penalty=2.0) == 9
    assert first([1, 8], 1, frequency_penalty=0.3) == 8
    assert first([1, 8, 8], 1, frequency_penalty=0.3) == 9


def test_tokens_chosen_here_are_counted_too():
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    sampler.assign(0, Sampling(1, temperature=0, presence_penalty=100.0), [1], 1)
    logits = logits_of(1)
    seen = [sampler.choose(logits, [0], [1 + i]).ids[0] for i in range(VOCABULARY)]
    assert sorted(seen) == list(range(VOCABULARY))


def test_bias_forces_and_bars():
    logits = logits_of(1)
    best = int(logits.argmax())
    sampling = Sampling(1, temperature=0, logit_bias={best: -100.0})
    assert choose([sampling], logits).ids != [best]
    assert choose([Sampling(1, logit_bias={17: 100})], logits).ids == [17]


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(3)
    expected = logits.log_softmax(-1)
    chosen = choose(
        [
            Sampling(1, temperature=0, logprobs=3, logit_bias={0: 100.0}),
            Sampling(1, temperature=0),
            Sampling(1, temperature=0.1, logprobs=0),
        ],
        logits,
    )
    assert chosen.ids[0] == 0
    assert set(chosen.logprobs) == {0, 2}
    first = chosen.logprobs[0]
    assert first.logprob == pytest.approx(expected[0, 0].item())
    best = expected[0].topk(3)
    assert [top.id for top in first.top] == best.indices.tolist()
    assert [top.logprob for top in first.top] == pytest.approx(best.values.tolist())
    assert chosen.logprobs[2].top == ()
    assert chosen.logprobs[2].logprob == pytest.approx(expected[2, chosen.ids[2]].item())


def test_a_row_that_changes_hands_keeps_nothing_of_the_last():
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    logits = logits_of(1)
    best = int(logits.argmax())
    barring = Sampling(1, temperature=0, presence_penalty=100.0, logit_bias={best: -100.0})
    for sampling, expected in ((barring, False), (Sampling(1, temperature=0), True)):
        sampler.assign(0, sampling, [1, best], 1)
        assert (sampler.choose(logits, [0], [2]).ids == [best]) == expected
    sampler.assign(0, Sampling(1, temperature=0, presence_penalty=0.01), [1], 1)
    assert sampler.choose(logits, [0], [1]).ids == [best]


def test_logprobs_of_the_chosen_alone():
    logits = logits_of(2)
    chosen = choose([Sampling(1, temperature=0, logprobs=0)] * 2, logits)
    assert [chosen.logprobs[at].top for at in range(2)] == [(), ()]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-5, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-46, 1e-38, 1e-10, 1e30])
def test_b45_an_extreme_penalty_leaves_the_scores_defined(penalty, temperature):
    logits = logits_of(1)
    logits[0, :4] = torch.tensor([0.0, 5.0, -5.0, 1e30])
    settings = {"temperature": temperature, "repetition_penalty": penalty}
    sampling = Sampling(1, presence_penalty=2.0, frequency_penalty=-2.0, **settings)
    chosen = choose([sampling], logits, histories=[[0, 1, 2, 3]], prompts=[2])
    assert chosen.finite == [True]
    if penalty < 1:  # what was seen and has a score above 0 is preferred beyond all else
        assert chosen.ids[0] in (1, 3)


def test_b45_nan_logits_are_reported_with_any_settings():
    logits = logits_of(2)
    logits[0, 2], logits[1, 2] = float("inf"), float("nan")
    samplings = [Sampling(1, repetition_penalty=penalty) for penalty in (1.1, 1e-38)]
    assert choose(samplings, logits).finite == [False, False]
