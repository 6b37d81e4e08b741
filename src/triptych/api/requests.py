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

import msgspec
from msgspec import Meta, Struct

from triptych.api.content import (
    ChatContentPart,
    MediaPolicy,
    MediaSlices,
    check_media_count,
    to_prompt_part,
)
from triptych.api.responses import ReplyParts
from triptych.api.structured import StructuredOptions, to_grammar
from triptych.api.tools import (
    FunctionChoice,
    FunctionDefinition,
    ToolChoice,
    ToolDefinition,
    ToolRequest,
    ToolUse,
    check_depth,
    to_tool_use,
)
from triptych.config import Limits
from triptych.errors import InvalidValue
from triptych.messages import Sampling
from triptych.prompt.chat_options import ChatOptions, EarlierCall, TurnDetails
from triptych.prompt.processor import ChatRole, ChatTurn, MediaPart, PromptProcessor, TextPart

MAX_CHOICES = 128  # prompts times n in one completion request
MAX_VARIABLE_BYTES = 16 << 10  # of chat_template_kwargs
MIN_TEMPERATURE = 1e-5  # below it logits would overflow: it counts as 0

Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Unsupported = Mapping[str, tuple[Any, ...]]
_ROLES: dict[str, ChatRole] = {  # as templates know them
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_PLAIN_ROLES = frozenset(("system", "developer", "user"))  # whose turns have at most a name


class MessageFunction(Struct, frozen=True):
    """The function of an earlier call, as the client got it or as another server wrote it."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Struct, frozen=True):
    function: MessageFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    """Unknown fields are ignored: clients send back what they got, from other servers too."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: MessageFunction | None = None  # the older form of one tool call
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk
    include_obfuscation: bool | None = None  # accepted and not used


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
        "metadata": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: Messages
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None  # the older form of tools
    function_call: FunctionChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None  # null: true, unless the last message is continued
    continue_final_message: bool | None = None
    max_thinking_tokens: Tokens | None = None


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
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


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
    names: dict[str, str] = {}  # of the functions that were called, by the id of the call
    return tuple(
        [
            ChatTurn(
                _ROLES[message.role],
                _content(message, i, slices, policy),
                None
                if message.name is None and message.role in _PLAIN_ROLES
                else _details(message, i, names),
            )
            for i, message in enumerate(messages)
        ]
    )


def answer_message(parts: ReplyParts) -> ChatMessage:
    """A reply as a message of a later request."""
    calls = [MessageToolCall(MessageFunction(c.name, c.arguments), c.id) for c in parts.calls]
    return ChatMessage(
        role="assistant",
        content=parts.content,
        tool_calls=calls or None,
        reasoning_content=parts.reasoning or None,
    )


def _details(message: ChatMessage, at: int, names: dict[str, str]) -> TurnDetails | None:
    """What a message has besides role and content; None if nothing."""
    match message.role:
        case "assistant":
            calls = _earlier_calls(message, at)
            names |= {call.id: call.name for call in calls}
            reasoning = message.reasoning_content or message.reasoning or ""
            if not (calls or reasoning or message.name):
                return None
            return TurnDetails(message.name or "", calls, reasoning=reasoning)
        case "tool" | "function":
            id = message.tool_call_id or ""
            if message.role == "function":  # it names no call: it answers the last one
                id = next(reversed(names), "")
            return TurnDetails(message.name or names.get(id, ""), call_id=id)
    return TurnDetails(message.name) if message.name else None


def _earlier_calls(message: ChatMessage, at: int) -> tuple[EarlierCall, ...]:
    if message.tool_calls is None and message.function_call is None:
        return ()
    if message.function_call is not None:
        place = f"messages[{at}].function_call"
        return (_earlier_call(message.function_call, f"call_{at}", place),)
    return tuple(
        _earlier_call(call.function, call.id or f"call_{at}_{i}", f"messages[{at}].tool_calls[{i}]")
        for i, call in enumerate(message.tool_calls or ())
    )


def _earlier_call(function: MessageFunction, id: str, param: str) -> EarlierCall:
    """A model may have written arguments that are no JSON object: these stay text."""
    given = function.arguments
    if isinstance(given, dict):
        parsed, text = given, msgspec.json.encode(given).decode()
    else:
        text = given or "{}"
        try:
            parsed = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            parsed = None
    if not isinstance(parsed, dict):
        return EarlierCall(id, function.name, text, None)
    check_depth(parsed, param)
    return EarlierCall(id, function.name, text, parsed)


def _content(
    message: ChatMessage, at: int, slices: MediaSlices, policy: MediaPolicy
) -> str | tuple[TextPart | MediaPart, ...]:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":  # one that only called tools
            return ""
        raise InvalidValue("The message has no content.", param=f"messages[{at}].content")
    return tuple(
        to_prompt_part(part, f"messages[{at}].content[{i}]", slices, policy)
        for i, part in enumerate(content)
    )


def tool_use(request: ChatRequest | TokenizeRequest, limits: Limits) -> ToolUse | None:
    """The tools that the model may use in this request; None: none."""
    if isinstance(request, TokenizeRequest):
        return to_tool_use(ToolRequest(tools=request.tools), limits) if request.tools else None
    if not (request.tools or request.functions or request.tool_choice or request.function_call):
        return None
    return to_tool_use(
        ToolRequest(
            tools=request.tools,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
            functions=request.functions,
            function_call=request.function_call,
        ),
        limits,
    )


def to_chat_options(
    request: ChatRequest | TokenizeRequest, tools: ToolUse | None, processor: PromptProcessor
) -> ChatOptions | None:
    """What the chat template gets besides the turns; None: nothing."""
    variables = request.chat_template_kwargs or {}
    if variables:
        _check_variables(variables)
        processor.check_variables(variables)
    effort = request.reasoning_effort if type(request) is ChatRequest else None
    if effort is not None and processor.uses_variable("reasoning_effort"):
        variables = {"reasoning_effort": effort, **variables}
    add, go_on = request.add_generation_prompt, request.continue_final_message is True
    if go_on:
        _check_continued(request)
    if tools is None and not variables and add is not False and not go_on:
        return None
    rendered = () if tools is None or not processor.describes_tools else tools.rendered()
    return ChatOptions(rendered, variables, add is not False, go_on)


def _check_variables(variables: dict[str, Any]) -> None:
    param = "chat_template_kwargs"
    check_depth(variables, param)
    if (size := len(msgspec.json.encode(variables))) > MAX_VARIABLE_BYTES:
        raise InvalidValue(
            f"'{param}' has {size} bytes as JSON; the limit is {MAX_VARIABLE_BYTES}.", param=param
        )
    for name in variables:
        if not name.isidentifier():
            raise InvalidValue("The keys are names of variables.", param=param)


def _check_continued(request: ChatRequest | TokenizeRequest) -> None:
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other.", param=param
        )
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        raise InvalidValue(
            "Only a last message of the assistant, without tool calls, can be continued.",
            param=param,
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
