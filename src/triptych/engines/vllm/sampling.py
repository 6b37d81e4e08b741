"""How tokens are chosen, in vLLM's words. Loads nothing of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.messages import Sampling

SEED_FOR_MINUS_ONE = 1 << 62  # stands for -1, by which vLLM means that any will do


def vllm_sampling_options(sampling: Sampling, end_ids: Sequence[int], limit: int) -> dict[str, Any]:
    """Keywords of vLLM's SamplingParams; ``limit``: the most tokens to generate.

    vLLM reads end tokens from several of a checkpoint's files. Those that Triptych read, and no
    others, end a stream on every engine alike: vLLM is told to ignore its own.
    """
    ends = () if sampling.ignore_eos else end_ids
    return {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias or None,
        "seed": SEED_FOR_MINUS_ONE if sampling.seed == -1 else sampling.seed,
        "ignore_eos": True,
        "stop_token_ids": list(dict.fromkeys((*ends, *sampling.stop_token_ids))),
        "logprobs": sampling.logprobs,
        "detokenize": False,  # the frontend does it
    }
