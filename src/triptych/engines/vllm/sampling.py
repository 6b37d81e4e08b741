"""Sampling settings as vLLM's SamplingParams. Does not import vLLM."""

from __future__ import annotations

from typing import Any

from triptych.engines.adapter.base import SamplingRequest, SamplingTable, sampling_options

SEED_FOR_MINUS_ONE = 1 << 62  # vLLM takes -1 for "any seed"

VLLM_SAMPLING: SamplingTable = {
    "seed": lambda request: {"seed": _seed(request.sampling.seed)},
    "max_tokens": lambda request: {"max_tokens": request.max_tokens},
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": lambda request: {"logit_bias": request.sampling.logit_bias or None},
    "stop_token_ids": lambda request: {"stop_token_ids": request.stop_ids},
    # vLLM reads end tokens from several files of a checkpoint. It ignores them here: the end tokens
    # that Triptych read, and no others, end a stream on every engine alike.
    "ignore_eos": lambda request: {"ignore_eos": True},
    "logprobs": "logprobs",
}


def vllm_sampling_options(request: SamplingRequest) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams. The frontend detokenizes."""
    return sampling_options(VLLM_SAMPLING, request) | {"detokenize": False}


def _seed(seed: int) -> int:
    return SEED_FOR_MINUS_ONE if seed == -1 else seed
