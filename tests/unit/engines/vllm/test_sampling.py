"""vLLM's sampling parameters say what the request says, and end where Triptych says."""

from types import SimpleNamespace

from triptych.engines.adapter.base import SamplingRequest
from triptych.engines.vllm.requests import SEED_FOR_MINUS_ONE, vllm_sampling_options
from triptych.messages import Grammar, Sampling


def options(sampling, end_ids, limit):
    return vllm_sampling_options(SamplingRequest(sampling, SimpleNamespace(end_ids=end_ids), limit))


def test_every_field_goes_through():
    sampling = Sampling(
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.0},
        stop_token_ids=(9,),
        logprobs=2,
        min_tokens=5,
        bad_words=((4,), (6, 7)),
        allowed_token_ids=(4, 5),
        prompt_logprobs=3,
    )
    assert options(sampling, (1, 2), 64) == {
        "max_tokens": 64,
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {5: -1.0},
        "stop_token_ids": [1, 2, 9],
        "ignore_eos": True,
        "logprobs": 2,
        "min_tokens": 5,
        "_bad_words_token_ids": [[4], [6, 7]],
        "allowed_token_ids": [4, 5],
        "prompt_logprobs": 3,
        "detokenize": False,
    }


def test_what_is_not_asked_for_is_not_set():
    found = options(Sampling(seed=7), (), 64)
    assert found["allowed_token_ids"] is found["prompt_logprobs"] is None
    assert "_bad_words_token_ids" not in found


def test_prefill_alone_demands_one_token_and_decode_has_no_prompt_to_rank():
    sampling = Sampling(seed=7, min_tokens=5, prompt_logprobs=1)
    assert options(sampling, (), 1)["min_tokens"] == 1
    request = SamplingRequest(sampling, SimpleNamespace(end_ids=()), 64, prefills=False)
    assert vllm_sampling_options(request)["prompt_logprobs"] is None


def test_ignore_eos_leaves_the_clients_own_stops():
    sampling = Sampling(seed=7, ignore_eos=True, stop_token_ids=(9,))
    assert options(sampling, (1, 2), 1)["stop_token_ids"] == [9]


def test_a_stop_that_is_an_end_is_named_once():
    sampling = Sampling(seed=7, stop_token_ids=(2, 9))
    assert options(sampling, (1, 2), 1)["stop_token_ids"] == [1, 2, 9]


def test_minus_one_is_a_seed_like_others():
    assert options(Sampling(seed=-1), (), 1)["seed"] == SEED_FOR_MINUS_ONE


def test_no_logprobs_and_none_but_the_chosen_are_two_things():
    assert options(Sampling(seed=0), (), 1)["logprobs"] is None
    assert options(Sampling(seed=0, logprobs=0), (), 1)["logprobs"] == 0


def test_a_grammar_becomes_structured_outputs_of_its_kind():
    schema = Sampling(seed=7, grammar=Grammar("json", '{"type":"object"}'))
    assert options(schema, (1,), 1)["structured_outputs"] == {"json": '{"type":"object"}'}
    choice = Sampling(seed=7, grammar=Grammar("choice", '["a","b"]'))
    assert options(choice, (1,), 1)["structured_outputs"] == {"choice": ["a", "b"]}
    assert "structured_outputs" not in options(Sampling(seed=7), (1,), 1)


def test_an_end_token_that_a_grammar_permits_ends_the_stream_though_ignored():
    sampling = Sampling(seed=7, ignore_eos=True, grammar=Grammar("regex", "a"))
    assert options(sampling, (1, 2), 1)["stop_token_ids"] == [1, 2]
