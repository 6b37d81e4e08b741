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
import re
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
from triptych.api.media_options import MediaLoadKwargs, ProcessorKwargs
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
    json_size,
    to_tool_use,
)
from triptych.config import Limits
from triptych.errors import InvalidValue
from triptych.messages import Sampling
from triptych.prompt.chat_options import ChatOptions, EarlierCall, TurnDetails
from triptych.prompt.processor import ChatRole, ChatTurn, MediaPart, PromptProcessor, TextPart
from triptych.prompt.tokenizer import Tokenizer

MAX_CHOICES = 128  # prompts times n in one completion request
MAX_VARIABLE_BYTES = 16 << 10  # of chat_template_kwargs
MAX_CALL_VALUES = 50_000  # JSON values in the arguments of all earlier calls: each is visited
TRANSCRIBE = "Transcribe the speech word for word. Answer with the transcript alone."
MAX_SEED = (1 << 63) - 1
MIN_TEMPERATURE = 1e-5  # below it logits would overflow: it counts as 0

DEFAULT_MAX_TOKENS = 16  # of text completions, as with OpenAI and others
MAX_BAD_WORDS = 256
MAX_PROMPT_LOGPROBS = 1 << 18  # in one answer: to encode more would block the event loop too long

Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
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


class SamplingOptions(StructuredOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of all routes that generate: how to sample, and when to stop."""

    n: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool | None = None  # null: true
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: TopLogprobs | None = None


class CompletionOptions(SamplingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of both chat and text completions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    # Hints: accepted and not used.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None


# Parameters of other servers, with the values that change nothing.
OTHER_SERVERS: Unsupported = {
    "best_of": (1,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}


class ChatRequest(CompletionOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    UNSUPPORTED: ClassVar[Unsupported] = {
        **OTHER_SERVERS,
        "audio": (),
        "echo": (False,),
        "modalities": (["text"],),
        "web_search_options": (),
    }
    messages: Messages
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: MediaLoadKwargs | None = None
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
    UNSUPPORTED: ClassVar[Unsupported] = {
        **OTHER_SERVERS,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }
    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    )
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None  # 0: with echo only


class GenerateSampling(SamplingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sampling_params`` of vLLM's route from tokens to tokens."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "detokenize": (False, True),
        "flat_logprobs": (False,),
        "skip_reading_prefix_cache": (False,),
        "spaces_between_special_tokens": (True,),
    }
    logprobs: TopLogprobs | None = None


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From token ids to token ids, without media, as vLLM has it."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "content_parts": (),
        "features": (),
        "kv_transfer_params": (),
        "priority": (0,),
    }
    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None  # null: the server's own
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


class TranscriptionRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a form besides its file."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "stream": ("false", "False", "0"),
        "chunking_strategy": (),
        "include[]": (),
        "timestamp_granularities[]": (),
    }
    ALLOWED: ClassVar[Mapping[str, tuple[str, ...]]] = {"response_format": ("json", "text")}
    model: str
    prompt: str | None = None  # the instruction, in place of the server's own
    language: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    seed: Seed | None = None
    max_completion_tokens: Tokens | None = None
    response_format: Literal["json", "text"] | None = None


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
        check_media_count(itertools.chain.from_iterable(contents), slices, policy)
    history = _CallHistory()
    return tuple(
        [
            ChatTurn(
                _ROLES[message.role],
                _content(message, i, slices, policy),
                None
                if message.name is None and message.role in _PLAIN_ROLES
                else _details(message, i, history),
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


class _CallHistory:
    """The calls in the messages so far."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # of the functions, by the id of the call
        self._values = 0

    def count(self, values: int, param: str) -> None:
        self._values += values
        if self._values > MAX_CALL_VALUES:
            raise InvalidValue(
                f"The earlier calls have more than {MAX_CALL_VALUES} values in their arguments, "
                "together. Leave out the oldest.",
                param=param,
            )


def _details(message: ChatMessage, at: int, history: _CallHistory) -> TurnDetails | None:
    """What a message has besides role and content; None if nothing."""
    names = history.names
    match message.role:
        case "assistant":
            calls = _earlier_calls(message, at, history)
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


def _earlier_calls(message: ChatMessage, at: int, history: _CallHistory) -> tuple[EarlierCall, ...]:
    if message.tool_calls is None and message.function_call is None:
        return ()
    if message.function_call is not None:
        place = f"messages[{at}].function_call"
        return (_earlier_call(message.function_call, f"call_{at}", place, history),)
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        id, place = call.id or f"call_{at}_{i}", f"messages[{at}].tool_calls[{i}]"
        calls.append(_earlier_call(call.function, id, place, history))
    return tuple(calls)


def _earlier_call(
    function: MessageFunction, id: str, param: str, history: _CallHistory
) -> EarlierCall:
    """A model may have written arguments that are no JSON object: these stay text."""
    given = function.arguments
    parsed: Any = given
    if not isinstance(given, dict):
        if given and _has_many_values(given):
            history.count(MAX_CALL_VALUES + 1, param)
        try:
            parsed = msgspec.json.decode(given or "{}")
        except (msgspec.DecodeError, RecursionError):
            parsed = None
    if isinstance(parsed, dict):
        history.count(check_depth(parsed, param, MAX_CALL_VALUES), param)
    else:
        history.count(1, param)
        parsed = None
    text = msgspec.json.encode(given).decode() if isinstance(given, dict) else given or "{}"
    return EarlierCall(id, function.name, text, parsed)


_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BETWEEN = rf'[^"\[{{,]*+(?:{_STRING}[^"\[{{,]*+)*+'
_MANY_VALUES = re.compile(rf"(?:{_BETWEEN}[\[{{,]){{{2 * MAX_CALL_VALUES}}}+", re.DOTALL)


def _has_many_values(text: str) -> bool:
    """Whether JSON has far more than MAX_CALL_VALUES values: to decode millions takes seconds.

    A value has at most two of "[{," outside of strings: one before it, and its own bracket.
    """
    most = 2 * MAX_CALL_VALUES
    if len(text) < most or sum(map(text.count, "[{,")) < most:
        return False
    return _MANY_VALUES.match(text) is not None  # the others may be in strings


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


def to_transcription_turn(request: TranscriptionRequest, sound: bytes) -> ChatTurn:
    """One turn of a chat that asks for the words of a recording."""
    text = request.prompt or TRANSCRIBE
    if request.language is not None:
        text += f" The language is {request.language}."
    return ChatTurn("user", (MediaPart("audio", "file", sound), TextPart(text)))


def to_transcription_chat(request: TranscriptionRequest) -> ChatRequest:
    """How the transcript is generated; the messages are in the turn."""
    return ChatRequest(
        model=request.model,
        messages=[],
        temperature=request.temperature or 0.0,
        seed=request.seed,
        max_completion_tokens=request.max_completion_tokens,
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
    if (size := json_size(variables, param)) > MAX_VARIABLE_BYTES:
        raise InvalidValue(
            f"'{param}' has {size} bytes as JSON; the limit is {MAX_VARIABLE_BYTES}.", param=param
        )
    check_depth(variables, param)
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


def to_completion(request: GenerateRequest, model: str) -> CompletionRequest:
    """The text completion that generates the same tokens."""
    sampling = request.sampling_params
    return CompletionRequest(
        model=model,
        prompt=list(request.token_ids),
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        return_token_ids=True,
        **{name: getattr(sampling, name) for name in GenerateSampling.__struct_fields__},
    )


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
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidValue("prompt_logprobs is for stream=false only.", param="prompt_logprobs")
    if request.max_tokens == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise InvalidValue("max_tokens may be 0 with echo=true only.", param="max_tokens")


def check_prompt_logprobs(request: ChatRequest | CompletionRequest, top: int, tokens: int) -> None:
    """Refuse an answer with too many of them. ``top``: candidates. ``tokens``: of all prompts."""
    # Only text completions have those of the prompt in every choice.
    choices = request.n or 1 if isinstance(request, CompletionRequest) else 1
    total = tokens * choices * (top + 1)
    if total > MAX_PROMPT_LOGPROBS:
        raise InvalidValue(
            f"The answer would have {total} log-probabilities of prompt tokens (tokens, times n in "
            f"text completions, times candidates and one); the limit is {MAX_PROMPT_LOGPROBS}.",
            param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )


def stop_strings(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    given = request.stop
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def to_sampling(
    request: ChatRequest | CompletionRequest,
    size: int,
    room: int,
    grammar_bytes: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """The sampling of the first choice.

    ``size``: of the vocabulary. ``room``: tokens that the context holds beside the prompt.
    ``grammar_bytes``: the limit of a grammar. ``bad_words``: as token ids.
    """
    bias = request.logit_bias or {}
    ids = tuple(request.stop_token_ids or ())
    check_token_ids(tuple(bias), size, "logit_bias")
    check_token_ids(ids, size, "stop_token_ids")
    temperature = _default(request.temperature, 1.0)
    sampling = Sampling(
        # Negative seeds are as good as others, but engines take none.
        seed=_random.getrandbits(63) if request.seed is None else request.seed & MAX_SEED,
        max_tokens=_max_tokens(request, room),
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=_default(request.top_p, 1.0),
        top_k=0 if request.top_k is None or request.top_k < 0 else request.top_k,  # -1: all
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
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and isinstance(request, CompletionRequest) and request.echo:
        prompt_logprobs = request.logprobs
    allowed = request.allowed_token_ids
    if not (request.min_tokens or bad_words or allowed) and prompt_logprobs is None:
        return sampling  # most requests use none of these
    check_token_ids(allowed or (), size, "allowed_token_ids")
    return msgspec.structs.replace(
        sampling,
        min_tokens=request.min_tokens or 0,
        bad_words=bad_words,
        allowed_token_ids=tuple(dict.fromkeys(allowed or ())),
        prompt_logprobs=prompt_logprobs,
    )


def find_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of words that must not come, at the start of a text and within it.

    As vLLM: the second form has a space before the word, and counts if it is as many tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise InvalidValue("'bad_words' has a word of spaces alone.", param="bad_words")
        start, within = tuple(tokenizer.ids(bare)), tuple(tokenizer.ids(f" {bare}"))
        found.append(start)
        if within[0] != start[0] and len(within) == len(start):
            found.append(within)
    return tuple(dict.fromkeys(found))


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ChatRequest | CompletionRequest, room: int) -> int | None:
    if isinstance(request, ChatRequest):
        asked = request.max_completion_tokens or request.max_tokens
    elif request.max_tokens is None:
        asked = min(DEFAULT_MAX_TOKENS, room) if room > 0 else None  # too long: refused later
    else:
        asked = request.max_tokens or 1  # engines generate one token at least
    if request.min_tokens and asked is not None and request.min_tokens > asked:
        raise InvalidValue(
            f"min_tokens is {request.min_tokens}, but max_tokens is {asked}.", param="min_tokens"
        )
    return asked


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
