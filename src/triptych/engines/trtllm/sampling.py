"""Sampling as TensorRT-LLM takes it, and its log-probabilities as we tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from triptych.checkpoint import Model
from triptych.engines.trtllm.api import TrtApi
from triptych.errors import EngineFailed
from triptych.messages import Sampling, TokenLogprob, TopLogprob


def trt_sampling_params(api: TrtApi, sampling: Sampling, model: Model, max_tokens: int) -> Any:
    """``max_tokens``: what this request may make at most.

    End tokens go as stop tokens, of which there may be several, and which stay in the output as
    they do with every engine of ours: ``end_id`` is one, and says nothing of that.
    """
    ends = () if sampling.ignore_eos else model.end_ids
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": -1,
        "pad_id": model.end_ids[0] if model.end_ids else 0,
        "stop_token_ids": list(dict.fromkeys((*ends, *sampling.stop_token_ids))) or None,
        "include_stop_str_in_output": True,
        "temperature": sampling.temperature,
        "detokenize": False,
        "add_special_tokens": False,
    }
    if sampling.temperature > 0:
        chosen |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "seed": sampling.seed % 2**63}
    # What has its neutral value is left out: some samplers refuse what they can't do.
    for name, neutral in (
        ("min_p", 0.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
    ):
        if (value := getattr(sampling, name)) != neutral:
            chosen[name] = value
    if sampling.logit_bias:
        bias = torch.zeros(model.vocabulary, dtype=torch.float32)
        for token, value in sampling.logit_bias.items():
            bias[token] = value
        chosen["embedding_bias"] = bias
    if sampling.logprobs is not None:
        chosen["logprobs"] = max(1, sampling.logprobs)  # 0 was not always the chosen one's
    return api.sampling(**chosen)


def to_logprobs(
    ids: Sequence[int], given: Sequence[Mapping[int, Any]], best: int
) -> tuple[TokenLogprob, ...]:
    """``given``: for every token the best ones' and its own, by id."""
    told = []
    for id, entries in zip(ids, given, strict=True):
        ordered = sorted(entries.items(), key=lambda entry: -entry[1].logprob)
        top = tuple(TopLogprob(token, float(entry.logprob)) for token, entry in ordered[:best])
        if id not in entries:
            raise EngineFailed(f"TensorRT-LLM gave no log-probability of token {id}")
        told.append(TokenLogprob(float(entries[id].logprob), top))
    return tuple(told)
