"""Sampling in SGLang's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.engines.adapter.base import SamplingRequest
from triptych.engines.sglang.requests import sglang_sampling_options, stops_after_ignored_eos
from triptych.errors import InvalidValue, UnsupportedParameter
from triptych.messages import Grammar, Sampling


def options(sampling: Sampling, end_ids: tuple[int, ...], limit: int) -> dict[str, Any]:
    model: Any = SimpleNamespace(end_ids=end_ids)
    return sglang_sampling_options(SamplingRequest(sampling, model, limit))


def test_every_setting_arrives():
    sampling = Sampling(
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={4: 2.0},
        stop_token_ids=(8, 2),
        min_tokens=5,
    )
    assert options(sampling, (2, 3), 12)["sampling_params"] == {
        "max_new_tokens": 12,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"4": 2.0},
        "sampling_seed": 7,
        "ignore_eos": False,
        "stop_token_ids": [2, 3, 8],
        "min_new_tokens": 5,
    }
    assert not stops_after_ignored_eos(sampling)


def test_what_means_everything_or_nothing_is_said_as_sglang_says_it():
    params = options(Sampling(seed=2**64 - 1), (), 1)["sampling_params"]
    assert params["top_k"] == -1
    assert params["logit_bias"] is None
    assert 0 <= params["sampling_seed"] < 2**63


@pytest.mark.parametrize(("asked", "flag", "count"), [(None, False, 0), (0, True, 0), (3, True, 3)])
def test_logprobs_are_arguments_of_the_request(asked: int | None, flag: bool, count: int):
    made = options(Sampling(seed=1, logprobs=asked), (), 1)
    assert (made["return_logprob"], made["top_logprobs_num"]) == (flag, count)
    assert set(made) == {"sampling_params", "return_logprob", "top_logprobs_num"}


def test_a_penalty_that_sglang_does_not_take_is_refused():
    with pytest.raises(InvalidValue, match="at most"):
        options(Sampling(seed=1, repetition_penalty=2.1), (), 1)


def test_no_more_tokens_are_demanded_than_may_come():
    assert options(Sampling(seed=1, min_tokens=5), (), 1)["sampling_params"]["min_new_tokens"] == 1


@pytest.mark.parametrize(
    "settings", [{"bad_words": ((4,),)}, {"allowed_token_ids": (4,)}, {"prompt_logprobs": 0}]
)
def test_what_sglang_has_no_option_for_is_refused(settings: dict[str, Any]):
    with pytest.raises(UnsupportedParameter) as refused:
        options(Sampling(seed=1, **settings), (), 1)
    assert refused.value.param == next(iter(settings))


def test_stops_are_ours_where_end_tokens_are_ignored():
    sampling = Sampling(seed=1, ignore_eos=True, stop_token_ids=(8,))
    assert options(sampling, (2,), 1)["sampling_params"]["ignore_eos"] is True
    assert stops_after_ignored_eos(sampling) == {8}


def test_a_grammar_is_refused():
    with pytest.raises(UnsupportedParameter, match="structured output"):
        options(Sampling(seed=7, grammar=Grammar("regex", "a")), (2,), 1)
