"""Answers of /v1/messages, Anthropic's API: whole, as the events of a stream, and as errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from triptych.api.anthropic_requests import TextBlock, ThinkingBlock, ToolUseBlock
from triptych.api.responses import (
    ChoiceOutput,
    ChoiceResult,
    NoPromptLogprobs,
    ReplyParts,
    Usage,
    encode,
    shown_message,
    shown_param,
)
from triptych.api.stream import TEXT_MARK, EventStream, encode_event
from triptych.errors import TriptychError
from triptych.http.exchange import StreamingResponse
from triptych.messages import FinishReason

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_ERROR_TYPES: dict[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# --- whole


class ThinkingUsage(Struct, frozen=True):
    thinking_tokens: int


class MessagesUsage(Struct, frozen=True):
    """``input_tokens`` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingUsage | UnsetType = UNSET  # with a parser of it


class MessagesResponse(Struct, frozen=True):
    id: str
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CountTokensResponse(Struct, frozen=True):
    input_tokens: int


class MessagesFormat(NoPromptLogprobs):
    """``shows_thinking``: reasoning becomes thinking blocks, else it is left out."""

    id_prefix = "msg_"
    chunk = MessagesResponse  # streams are MessageEvents

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self.shows_thinking = shows_thinking

    def completion(
        self,
        *,
        id: str,
        model: str,
        choices: list[ChoiceResult],
        usage: Usage,
        **unused: Any,  # what other formats show besides
    ) -> MessagesResponse:
        (choice,) = choices
        parts = choice.output.parts
        blocks: list[OutputBlock] = []
        if parts.reasoning and self.shows_thinking:
            blocks.append(ThinkingBlock(parts.reasoning))
        if parts.content:
            blocks.append(TextBlock(parts.content))
        blocks += [ToolUseBlock(c.id, c.name, _arguments(c.arguments)) for c in parts.calls]
        return MessagesResponse(id, model, blocks, *stop_reason(choice), messages_usage(usage))

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason | None) -> ChoiceResult:
        return ChoiceResult(output, finish)

    chunk_choice = choice

    def first_chunk_choice(self, index: int) -> None:
        return None


def stop_reason(choice: ChoiceResult) -> tuple[StopReason, str | None]:
    if choice.finish == "length":
        return "max_tokens", None
    if choice.output.stop_string:
        return "stop_sequence", choice.output.stop_string
    return ("tool_use" if choice.output.parts.called else "end_turn"), None


def messages_usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    return MessagesUsage(
        usage.prompt_tokens - cached,
        usage.completion_tokens,
        cached,
        output_tokens_details=UNSET
        if details is UNSET
        else ThinkingUsage(details.reasoning_tokens),
    )


def _arguments(text: str) -> dict[str, Any]:
    """The input of a call. What the model wrote may be incomplete: then there is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


# --- streamed


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessagesResponse


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageEvents(EventStream):
    """The events of one answer. Each block is open until another kind of output comes."""

    __slots__ = ("_began", "_end", "_index", "_open")
    format: MessagesFormat
    has_text_template = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._began = False
        self._index = 0  # of the open block, or of the next
        self._open = ""  # the kind of the open block; of a call with its number
        self._end = MessageEnd("end_turn", None)

    def encode_chunk(
        self, choices: Sequence[Struct], prompt_ids: Sequence[int] | UnsetType = UNSET
    ) -> bytes:
        events: list[Struct] = []
        if not self._began:
            self._began = True
            events.append(MessageStart(self._empty_message()))
        for choice in choices:
            assert isinstance(choice, ChoiceResult), "as MessagesFormat makes them"
            self._add_parts(events, choice.output.parts)
            if choice.finish is not None:
                self._end = MessageEnd(*stop_reason(choice))
                self._close(events)
        return b"".join(map(encode_event, events))

    def _empty_message(self) -> MessagesResponse:
        assert self.usage_so_far is not None, "the translated request asks for it"
        usage = messages_usage(self.usage_so_far())
        return MessagesResponse(self._exchange.id, self._model, [], None, None, usage)

    def _add_parts(self, events: list[Struct], parts: ReplyParts) -> None:
        if parts.reasoning and self.format.shows_thinking:
            self._open_block(events, "thinking", ThinkingBlock(""))
            events.append(BlockDelta(self._index, ThinkingDelta(parts.reasoning)))
        if parts.content:
            self._open_block(events, "text", TextBlock(""))
            events.append(BlockDelta(self._index, TextDelta(parts.content)))
        for call in parts.calls:
            block = ToolUseBlock(call.id, call.name, {})
            self._open_block(events, f"call {call.index}", block)
            if call.arguments:
                events.append(BlockDelta(self._index, InputDelta(call.arguments)))

    def _open_block(self, events: list[Struct], kind: str, block: OutputBlock) -> None:
        if self._open != kind:
            self._close(events)
            self._open = kind
            events.append(BlockStart(self._index, block))

    def _close(self, events: list[Struct]) -> None:
        if self._open:
            events.append(BlockStop(self._index))
            self._open = ""
            self._index += 1

    def text_template(self, index: int) -> tuple[bytes, bytes]:
        event = encode_event(BlockDelta(self._index, TextDelta(TEXT_MARK)))
        before, after = event.split(encode(TEXT_MARK), 1)
        return before, after

    def _start(self, events: bytes) -> StreamingResponse:
        response = super()._start(events)
        response.error_event = self._encode_error
        return response

    def _encode_error(self, error: TriptychError) -> bytes:
        return encode_event(MessagesError.of(error, self._exchange.id))

    def end(self, usage: Usage | None = None, timing: bytes = b"") -> None:
        assert usage is not None, "the translated request asks for it"
        last = encode_event(MessageDelta(self._end, messages_usage(usage)))
        self._end_with(last + encode_event(MessageStop()), timing)


# --- errors


class MessagesErrorCause(Struct, frozen=True):
    """The stable code, and the place in the request."""

    error_code: str
    param: str | None


class MessagesErrorDetail(Struct, frozen=True):
    type: MessagesErrorType
    message: str
    details: MessagesErrorCause


class MessagesError(Struct, frozen=True, tag_field="type", tag="error"):
    error: MessagesErrorDetail
    request_id: str

    @classmethod
    def of(cls, error: TriptychError, request_id: str) -> MessagesError:
        other: MessagesErrorType = "invalid_request_error" if error.status < 500 else "api_error"
        cause = MessagesErrorCause(error.code, shown_param(error))
        kind = _ERROR_TYPES.get(error.status, other)
        return cls(MessagesErrorDetail(kind, shown_message(error), cause), request_id)
