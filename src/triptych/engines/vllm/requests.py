"""One request in vLLM's terms: sampling settings, and the note that tells decode where prefill's KV
cache is. Does not import vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.engines.adapter.base import SamplingRequest, SamplingTable, sampling_options
from triptych.errors import TicketLost

SEED_FOR_MINUS_ONE = 1 << 62  # vLLM takes -1 for "any seed"


def _seed(request: SamplingRequest) -> dict[str, int]:
    seed = request.sampling.seed
    return {"seed": SEED_FOR_MINUS_ONE if seed == -1 else seed}


def _bad_words(request: SamplingRequest) -> dict[str, Any]:
    words = [list(word) for word in request.sampling.bad_words]
    return {"_bad_words_token_ids": words} if words else {}


def _structured_outputs(request: SamplingRequest) -> dict[str, Any]:
    """The fields of vLLM's StructuredOutputsParams, which has the kinds of a grammar too."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    value = msgspec.json.decode(grammar.text) if grammar.kind == "choice" else grammar.text
    return {"structured_outputs": {grammar.kind: value}}


VLLM_SAMPLING: SamplingTable = {
    "seed": _seed,
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
    # vLLM counts the end tokens that it reads from the checkpoint among those it puts off.
    "min_tokens": lambda request: {"min_tokens": request.min_tokens},
    # Not ``bad_words``: vLLM would tokenize strings itself. These are what it makes of them.
    "bad_words": _bad_words,
    "allowed_token_ids": lambda request: {
        "allowed_token_ids": list(request.sampling.allowed_token_ids) or None
    },
    "prompt_logprobs": lambda request: {
        "prompt_logprobs": request.sampling.prompt_logprobs if request.prefills else None
    },
    "grammar": _structured_outputs,
}


def vllm_sampling_options(request: SamplingRequest) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams. The frontend detokenizes."""
    return sampling_options(VLLM_SAMPLING, request) | {"detokenize": False}


PREFILL_PARAMS = {  # the kv_transfer_params of a prefill request
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Name = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Ranks = Annotated[int, Meta(ge=1, le=1024)]


class KvNote(Struct, frozen=True, forbid_unknown_fields=True):
    """All fields that vLLM's connector reports of prefilled blocks."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Port
    remote_block_ids: list[list[Block]]  # by group of layers
    remote_num_tokens: Count
    tp_size: Ranks
    do_remote_prefill: Literal[True]
    transfer_mode: Literal["pull"]
    do_remote_decode: Literal[False] = False
    dcp_size: Ranks = 1
    pp_size: Ranks = 1
    remote_blocks_expiry_time: float | None = None
    remote_prefill_cached_tokens: Count | None = None


def check_kv_note(note: KvNote, tokens: int, block_size: int, groups: int) -> dict[str, Any]:
    """The kv_transfer_params of a decode request; TicketLost if the note cannot belong to its
    prompt.

    vLLM does not check it: a note of the wrong shape ends the decode engine, and a note of too few
    tokens makes it read memory that was never written. Only vLLM's connector can tell whether the
    blocks still exist; if not, that request fails alone.
    ``tokens``: of the prompt; ``groups``: groups of layers in the KV cache.
    """
    blocks = -(-tokens // block_size)
    held = [len(group) for group in note.remote_block_ids]
    if len(held) != groups:
        raise TicketLost(f"prefill's note has {len(held)} groups of layers, not {groups}")
    if note.remote_num_tokens != tokens or not held or min(held) < blocks:
        raise TicketLost(
            f"prefill's note has {note.remote_num_tokens} tokens in {min(held, default=0)} "
            f"blocks, not {tokens} in {blocks}"
        )
    found: dict[str, Any] = msgspec.to_builtins(note)
    return found
