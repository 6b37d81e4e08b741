"""Responses as structs: what every route answers, whole or as the chunks of a stream.

``routes`` names the struct of each route and ``/openapi.json`` is generated from them. ``encode``
turns one into JSON. A field that is UNSET is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from triptych.errors import TriptychError
from triptych.http.exchange import JSON
from triptych.messages import (
    FinishReason,
    ParameterCounts,
    PromptInfo,
    TokenLogprob,
    TopLogprob,
    WorkerReport,
)
from triptych.pipeline.unused_workers import UnusedWorker
from triptych.runtime.discovery import DiscoveryStatus

MAX_MESSAGE = 1000  # characters of an error message, whatever it quotes
MAX_PARAM = 200
PLAIN_TEXT = b"text/plain; charset=utf-8"

encode = msgspec.json.Encoder().encode
TokenBytes = Callable[[int], bytes]
Ids = Sequence[int] | UnsetType
ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]


# --- completions


class PromptTokensDetails(Struct, frozen=True):
    """Of media only the kinds that the request has, where the engine reports them."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # with a parser of it


class ChatTopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class RankedToken(Struct, frozen=True):
    """A candidate for a place in the prompt, as vLLM shows it."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt the candidates by id; null for the first, which follows nothing.
PromptLogprobs = list[dict[str, RankedToken] | None] | UnsetType


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(Struct, frozen=True):
    """``reasoning`` and ``reasoning_content`` are the same text, for clients of either name."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # for requests with ``functions``


class ChatChoice(Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: Ids = UNSET


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Ids = UNSET
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs = UNSET


class FunctionChunk(Struct, frozen=True):
    name: str | UnsetType = UNSET  # in the first chunk of a call
    arguments: str = ""


class ToolCallChunk(Struct, frozen=True):
    index: int
    id: str | UnsetType = UNSET  # in the first chunk of a call, as its type
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionChunk = FunctionChunk()


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET
    function_call: FunctionChunk | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: Ids = UNSET


class ChatCompletionChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: Ids = UNSET
    prompt_token_ids: Ids = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class TextCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    prompt_token_ids: Ids = UNSET
    object: Literal["text_completion"] = "text_completion"


class TextCompletionChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids = UNSET
    object: Literal["text_completion"] = "text_completion"


class GenerateChoice(Struct, frozen=True):
    index: int
    token_ids: Sequence[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class GenerateResponse(Struct, frozen=True):
    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = UNSET


class GenerateChunk(Struct, frozen=True):
    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET


# --- the other routes


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    modalities: list[Literal["text", "image", "video", "audio"]]
    root: str  # name of the checkpoint
    parent: None = None
    owned_by: str = "triptych"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class MediaUpload(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    object: Literal["media"] = "media"


class MediaDeleted(Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["media"] = "media"


class TokenizeResponse(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: Sequence[int]


class DetokenizeResponse(Struct, frozen=True):
    prompt: str


class VersionResponse(Struct, frozen=True):
    version: str


class HealthResponse(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class UnhealthyResponse(Struct, frozen=True):
    status: Literal["unready", "draining"]
    missing: Sequence[str] | UnsetType = UNSET  # roles without a ready worker


class ClusterParameters(ParameterCounts, frozen=True, array_like=False):
    """ParameterCounts as a JSON object."""


class ClusterWorker(WorkerReport, frozen=True, array_like=False, tag=False, kw_only=True):
    """A WorkerReport as a JSON object."""

    parameters: ClusterParameters
    endpoint: str


class FrontendReport(Struct, frozen=True):
    pid: int
    state: Literal["ready", "draining"]
    in_flight: int
    tensor_bytes: int
    tickets: int
    media: dict[str, float]
    routing: dict[str, str | float]


class ClusterResponse(Struct, frozen=True):
    topology: str
    discovery: DiscoveryStatus
    frontend: FrontendReport
    workers: list[ClusterWorker]
    unused: Sequence[UnusedWorker]


class OpenAPIDocument(Struct, frozen=True):
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]
    openapi: Literal["3.1.0"] = "3.1.0"


class ErrorDetail(Struct, frozen=True):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorResponse(Struct, frozen=True):
    error: ErrorDetail

    @classmethod
    def of(cls, error: TriptychError, request_id: str) -> ErrorResponse:
        """``request_id`` stands in the headers alone."""
        return cls(_error_detail(error))


def _error_detail(error: TriptychError) -> ErrorDetail:
    kind: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status < 500:
        kind = "invalid_request_error"
    return ErrorDetail(shown_message(error), kind, shown_param(error), error.code)


def shown_message(error: TriptychError) -> str:
    return _shorten(error.message, MAX_MESSAGE)


def shown_param(error: TriptychError) -> str | None:
    return None if error.param is None else _shorten(error.param, MAX_PARAM)


def _shorten(text: str, limit: int) -> str:
    """Errors quote clients, who may send long strings and halves of surrogate pairs."""
    return text[:limit].encode(errors="replace").decode()


# --- from the output of a choice to its structs


class ScoredToken(Struct, frozen=True):
    """A token with its log-probability."""

    id: int
    logprob: TokenLogprob


class ReplyCall(Struct, frozen=True):
    """A tool call, or a piece of one: then only the first has an id and a name."""

    index: int
    id: str
    name: str
    arguments: str


class ReplyParts(Struct, frozen=True):
    """A parsed output, whole or a piece."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    called: bool = False  # there is a call, in this piece or before it
    cut: bool = False  # a stop string stood inside of the last call

    @property
    def calls_functions(self) -> bool:
        """Whether the client is to run the calls, if the output did not end by its length."""
        return self.called and not self.cut


class ChoiceOutput(Struct, frozen=True):
    """New output of a choice: its text, and of its tokens what the client asked for."""

    text: str
    ids: Sequence[int] | UnsetType = UNSET
    logprobs: Sequence[ScoredToken] | None = None
    offset: int = 0  # characters of the choice before this text
    prompt_ids: Sequence[int] | UnsetType = UNSET  # with the first output of a choice
    reply: ReplyParts | None = None  # the text in parts, where it is parsed
    stop_string: str = ""  # with the last output: the one that ended the choice

    @property
    def parts(self) -> ReplyParts:
        return ReplyParts(self.text) if self.reply is None else self.reply

    @property
    def has_any(self) -> bool:
        """Whether there is anything in it that a chunk must carry."""
        reply = self.reply
        parts = reply is not None and (reply.content or reply.reasoning or reply.calls)
        return bool(self.text or self.ids or self.logprobs or parts)


class TranscriptionUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class Transcription(Struct, frozen=True):
    text: str
    usage: TranscriptionUsage


class PlainTranscription(Transcription, frozen=True):
    """Sent as its text alone."""


class ChoiceResult(Struct, frozen=True):
    """New output of the one choice, for formats that show it in a shape of their own."""

    output: ChoiceOutput
    finish: FinishReason | None


class CompletionFormat(Protocol):
    """Chat completions or text completions, as structs."""

    id_prefix: str

    @property
    def completion(self) -> Callable[..., Struct]:
        """The struct of a whole response: ChatCompletion, or TextCompletion with equal fields."""

    @property
    def chunk(self) -> Callable[..., Struct]:
        """The struct of one event of a stream."""

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason) -> Struct: ...

    def chunk_choice(
        self, index: int, output: ChoiceOutput, finish: FinishReason | None
    ) -> Struct: ...

    def first_chunk_choice(self, index: int) -> Struct | None:
        """What a stream sends before the first text of a choice."""

    def with_prompt_logprobs(self, response: Any, prompts: Sequence[PromptInfo | None]) -> Struct:
        """A whole response with the log-probabilities of the prompts of its choices."""


def rank_tokens(prompt: PromptInfo | None, text: Callable[[int], str]) -> PromptLogprobs:
    """The log-probabilities of a prompt as a response shows them."""
    if prompt is None:
        return UNSET
    ranked: list[dict[str, RankedToken] | None] = [None]
    for token in prompt.logprobs:
        best = {
            str(top.id): RankedToken(top.logprob, rank, text(top.id))
            for rank, top in enumerate(token.top, start=1)
        }
        ranked.append(
            {str(token.id): RankedToken(token.logprob, token.rank, text(token.id))} | best
        )
    return ranked


class ChatFormat:
    id_prefix = "chatcmpl-"
    completion = ChatCompletion
    chunk = ChatCompletionChunk

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason) -> ChatChoice:
        logprobs = self.logprobs(output.logprobs)
        if (reply := output.reply) is None:
            return ChatChoice(index, AssistantMessage(output.text), logprobs, finish, output.ids)
        message = AssistantMessage(
            None if reply.called and not reply.content else reply.content,
            "assistant",
            reply.reasoning or UNSET,
            reply.reasoning or UNSET,
            *self._calls(reply),
        )
        return ChatChoice(index, message, logprobs, self._finish(finish, reply), output.ids)

    def chunk_choice(
        self, index: int, output: ChoiceOutput, finish: FinishReason | None
    ) -> ChatChunkChoice:
        content = output.text if output.text or output.ids or output.logprobs else UNSET
        logprobs = self.logprobs(output.logprobs)
        if (reply := output.reply) is None:
            return ChatChunkChoice(index, ChatDelta(UNSET, content), logprobs, finish, output.ids)
        delta = ChatDelta(
            UNSET,
            reply.content or UNSET,
            reply.reasoning or UNSET,
            reply.reasoning or UNSET,
            *self._call_chunks(reply),
        )
        given = None if finish is None else self._finish(finish, reply)
        return ChatChunkChoice(index, delta, logprobs, given, output.ids)

    def _finish(self, finish: FinishReason, reply: ReplyParts) -> ChatFinish:
        return "tool_calls" if finish == "stop" and reply.calls_functions else finish

    def _calls(
        self, reply: ReplyParts
    ) -> tuple[list[ToolCall] | UnsetType, FunctionCall | UnsetType]:
        calls = [ToolCall(c.id, FunctionCall(c.name, c.arguments)) for c in reply.calls]
        return calls or UNSET, UNSET

    def _call_chunks(
        self, reply: ReplyParts
    ) -> tuple[list[ToolCallChunk] | UnsetType, FunctionChunk | UnsetType]:
        chunks = [
            ToolCallChunk(
                call.index,
                call.id or UNSET,
                "function" if call.id else UNSET,
                FunctionChunk(call.name or UNSET, call.arguments),
            )
            for call in reply.calls
        ]
        return chunks or UNSET, UNSET

    def first_chunk_choice(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)

    def with_prompt_logprobs(
        self, response: ChatCompletion, prompts: Sequence[PromptInfo | None]
    ) -> ChatCompletion:
        ranked = rank_tokens(prompts[0], lambda id: self._token_bytes(id).decode(errors="replace"))
        return msgspec.structs.replace(response, prompt_logprobs=ranked)

    def logprobs(self, tokens: Sequence[ScoredToken] | None) -> ChatLogprobs | None:
        if tokens is None:
            return None
        return ChatLogprobs([self._token(token) for token in tokens])

    def _token(self, token: ScoredToken) -> ChatTokenLogprob:
        top = [
            ChatTopLogprob(*self._text_and_bytes(top.id, top.logprob)) for top in token.logprob.top
        ]
        return ChatTokenLogprob(*self._text_and_bytes(token.id, token.logprob.logprob), top)

    def _text_and_bytes(self, id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = self._token_bytes(id)
        return raw.decode(errors="replace"), logprob, list(raw)


class FunctionChatFormat(ChatFormat):
    """For requests with ``functions``, the older form of tools: one call, without an id."""

    def _finish(self, finish: FinishReason, reply: ReplyParts) -> ChatFinish:
        return "function_call" if finish == "stop" and reply.calls_functions else finish

    def _calls(
        self, reply: ReplyParts
    ) -> tuple[list[ToolCall] | UnsetType, FunctionCall | UnsetType]:
        for call in reply.calls:
            return UNSET, FunctionCall(call.name, call.arguments)
        return UNSET, UNSET

    def _call_chunks(
        self, reply: ReplyParts
    ) -> tuple[list[ToolCallChunk] | UnsetType, FunctionChunk | UnsetType]:
        for call in reply.calls:
            return UNSET, FunctionChunk(call.name or UNSET, call.arguments)
        return UNSET, UNSET


class NoPromptLogprobs:
    """Part of formats whose requests have no field that asks for them."""

    def with_prompt_logprobs(
        self, response: Struct, prompts: Sequence[PromptInfo | None]
    ) -> Struct:
        return response


class TranscriptionFormat(NoPromptLogprobs):
    """The completion of a chat that transcribes, as its text. It is not streamed."""

    id_prefix = "transcription-"
    chunk = ChatCompletionChunk

    def __init__(self, kind: type[Transcription]) -> None:
        self._kind = kind

    def completion(self, *, choices: list[ChoiceOutput], usage: Usage, **_: object) -> Struct:
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        return self._kind(choices[0].text.strip(), TranscriptionUsage(*counts))

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason) -> ChoiceOutput:
        return output

    def chunk_choice(
        self, index: int, output: ChoiceOutput, finish: FinishReason | None
    ) -> ChoiceOutput:
        return output

    def first_chunk_choice(self, index: int) -> None:
        return None


def response_body(response: Struct) -> tuple[bytes, bytes]:
    """The body of a whole response, and its content type."""
    if isinstance(response, PlainTranscription):
        return response.text.encode(), PLAIN_TEXT
    return encode(response), JSON


class TextFormat:
    id_prefix = "cmpl-"
    completion = TextCompletion
    chunk = TextCompletionChunk

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason | None) -> TextChoice:
        logprobs = self._logprobs(output)
        return TextChoice(index, output.text, logprobs, finish, output.ids, output.prompt_ids)

    chunk_choice = choice

    def first_chunk_choice(self, index: int) -> None:
        return None

    def with_prompt_logprobs(
        self, response: TextCompletion, prompts: Sequence[PromptInfo | None]
    ) -> TextCompletion:
        choices = [
            msgspec.structs.replace(choice, prompt_logprobs=rank_tokens(prompt, self.text))
            for choice, prompt in zip(response.choices, prompts, strict=True)
        ]
        return msgspec.structs.replace(response, choices=choices)

    def text(self, id: int) -> str:
        return self._token_bytes(id).decode(errors="replace")

    def best(self, id: int, logprob: float, top: Sequence[TopLogprob]) -> dict[str, float]:
        """The best candidates and, whatever its rank, the token itself."""
        named: dict[str, float] = {self.text(one.id): one.logprob for one in top}
        if all(one.id != id for one in top):
            named[self.text(id)] = logprob
        return named

    def _logprobs(self, output: ChoiceOutput) -> TextLogprobs | None:
        if output.logprobs is None:
            return None
        tokens = [self.text(token.id) for token in output.logprobs]
        offsets, offset = [], output.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return TextLogprobs(
            tokens,
            [token.logprob.logprob for token in output.logprobs],
            [self.best(t.id, t.logprob.logprob, t.logprob.top) for t in output.logprobs],
            offsets,
        )
