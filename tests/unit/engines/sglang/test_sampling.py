"""Sampling in SGLang's words."""

from __future__ import annotations

from triptych.engines.sglang.sampling import sglang_sampling_options, stops_after_ignored_eos
from triptych.messages import Sampling


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
    )
    assert sglang_sampling_options(sampling, (2, 3), 12) == {
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
    }
    assert not stops_after_ignored_eos(sampling)


def test_what_means_everything_or_nothing_is_said_as_sglang_says_it():
    options = sglang_sampling_options(Sampling(seed=2**64 - 1), (), 1)
    assert options["top_k"] == -1
    assert options["logit_bias"] is None
    assert 0 <= options["sampling_seed"] < 2**63


def test_stops_are_ours_where_end_tokens_are_ignored():
    sampling = Sampling(seed=1, ignore_eos=True, stop_token_ids=(8,))
    assert sglang_sampling_options(sampling, (2,), 1)["ignore_eos"] is True
    assert stops_after_ignored_eos(sampling) == {8}
