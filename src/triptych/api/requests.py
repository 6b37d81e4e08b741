"""Requests as structs, and how they become turns, prompts and Sampling.

A field that is not declared here is refused. ``UNSUPPORTED`` of a struct lists parameters that the
server does not support, with the values (besides null) that mean they are not used: with these,
``decode`` drops the parameter. Types check what depends on the request alone; the functions below
check what depends on the model and the limits. Content parts are in ``content``.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from triptych.api.content import (
    ChatContentPart,
    MediaPolicy,
    MediaSlices,
    check_media_count,
    to_prompt_part,
)
from triptych.api.structured import StructuredOptions, to_grammar
from triptych.config import Limits
from triptych.errors import InvalidValue
from triptych.messages import Sampling
from triptych.prompt.processor import ChatTurn, MediaPart, TextPart

MAX_CHOICES = 128  # prompts times n in one completion request
MIN_TEMPERATURE = 1e-5  # below it logits would overflow: it counts as 0

Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Unsupported = Mapping[str, tuple[Any, ...]]


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    UNSUPPORTED: ClassVar[
        Unsupported
    ] = {  # fields of other servers' responses, which clients send back
        "name": (),
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "reasoning_content": (),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ChatContentPart] | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class CompletionOptions(StructuredOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of both chat and text completions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None  # accepted and not used


class ChatRequest(CompletionOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    UNSUPPORTED: ClassVar[Unsupported] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (False, True),
        "prediction": (),
        "prompt_cache_key": (),
        "reasoning_effort": (),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: Messages
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class CompletionRequest(CompletionOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    UNSUPPORTED: ClassVar[Unsupported] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    )
    logprobs: TopLogprobs | None = None


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # null: true


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


_random = random.Random()  # seeded by the system


def to_turns(
    messages: Sequence[ChatMessage], slices: MediaSlices, policy: MediaPolicy
) -> tuple[ChatTurn, ...]:
    """The turns of a chat, with the bytes of the media in the request."""
    if not messages:
        raise InvalidValue("'messages' is empty.", param="messages")
    contents = [message.content for message in messages if isinstance(message.content, list)]
    if contents and policy.enabled:
        check_media_count(itertools.chain.from_iterable(contents), policy)
    return tuple(
        ChatTurn(
            "system"
            if message.role == "developer"
            else message.role,  # the older name, which templates know
            _content(message, i, slices, policy),
        )
        for i, message in enumerate(messages)
    )


def _content(
    message: ChatMessage, at: int, slices: MediaSlices, policy: MediaPolicy
) -> str | tuple[TextPart | MediaPart, ...]:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidValue("The message has no content.", param=f"messages[{at}].content")
    return tuple(
        to_prompt_part(part, f"messages[{at}].content[{i}]", slices, policy)
        for i, part in enumerate(content)
    )


def to_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request: one or several."""
    given = request.prompt
    several: list[str | list[int]]
    if isinstance(given, str):
        several = [given]
    elif given and all(isinstance(item, int) for item in given):
        several = [[item for item in given if isinstance(item, int)]]
    elif any(isinstance(item, int) for item in given):
        raise InvalidValue("'prompt' mixes token ids with other prompts.", param="prompt")
    else:
        several = [item for item in given if not isinstance(item, int)]
    if not several or not all(several):
        raise InvalidValue("'prompt' is empty.", param="prompt")
    if len(several) * (request.n or 1) > MAX_CHOICES:
        raise InvalidValue(f"More than {MAX_CHOICES} choices in one request.", param="prompt")
    return several


def check_token_ids(ids: Sequence[int], size: int, param: str) -> None:
    """Refuse ids that are not in the vocabulary."""
    if ids and max(ids) >= size:
        raise InvalidValue(
            f"'{param}' has the token id {max(ids)}, but the vocabulary has {size}.", param=param
        )


def check_request(request: ChatRequest | CompletionRequest, limits: Limits) -> None:
    """Check what concerns neither the prompt nor the sampling."""
    if request.n is not None and request.n > limits.choices:
        raise InvalidValue(f"n is {request.n}; the limit is {limits.choices}.", param="n")
    if request.stream_options is not None and not request.stream:
        raise InvalidValue("stream_options is for stream=true only.", param="stream_options")


def stop_strings(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    given = request.stop
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def to_sampling(
    request: ChatRequest | CompletionRequest, size: int, grammar_bytes: int
) -> Sampling:
    """The sampling of the first choice. ``size``: of the vocabulary."""
    bias = request.logit_bias or {}
    ids = tuple(request.stop_token_ids or ())
    check_token_ids(tuple(bias), size, "logit_bias")
    check_token_ids(ids, size, "stop_token_ids")
    temperature = _default(request.temperature, 1.0)
    return Sampling(
        seed=_random.getrandbits(63) if request.seed is None else request.seed,
        max_tokens=_max_tokens(request),
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=_default(request.top_p, 1.0),
        top_k=request.top_k or 0,
        min_p=_default(request.min_p, 0.0),
        presence_penalty=_default(request.presence_penalty, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        logit_bias=bias,
        stop_token_ids=ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=_logprobs(request),
        grammar=to_grammar(request, grammar_bytes),
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidValue(
            "max_tokens and max_completion_tokens differ; give one.", param="max_tokens"
        )
    return request.max_completion_tokens


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidValue("top_logprobs needs logprobs=true.", param="top_logprobs")
    return None


def derive_seed(seed: int, index: int) -> int:
    """The seed of a choice. The first has the request's own, so that n does not change it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
