"""How tokens are chosen, in SGLang's words. Loads nothing of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.errors import InvalidValue
from triptych.messages import Sampling

MAX_REPETITION_PENALTY = 2.0  # the strongest penalty that SGLang takes
SEED_MASK = (1 << 63) - 1  # SGLang's are signed numbers of 64 bits


def sglang_sampling_options(
    sampling: Sampling, end_ids: Sequence[int], limit: int
) -> dict[str, Any]:
    """What SGLang's SamplingParams take; ``limit``: the most tokens to generate.

    SGLang heeds a seed in its deterministic mode only (``--enable-deterministic-inference``), and
    an end token of its own reading of the checkpoint's files beside ours. Where a request ignores
    end tokens SGLang ignores ``stop_token_ids`` too: see ``own_stops``.
    """
    if sampling.repetition_penalty > MAX_REPETITION_PENALTY:
        raise InvalidValue(
            f"SGLang takes a repetition_penalty of {MAX_REPETITION_PENALTY:g} at most.",
            param="repetition_penalty",
        )
    return {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(id): bias for id, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": sampling.seed & SEED_MASK,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(dict.fromkeys((*end_ids, *sampling.stop_token_ids))),
    }


def stops_after_ignored_eos(sampling: Sampling) -> frozenset[int]:
    """Tokens that end the stream and that SGLang does not look for."""
    return frozenset(sampling.stop_token_ids) if sampling.ignore_eos else frozenset()
