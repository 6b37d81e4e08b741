"""Answers of /v1/responses, OpenAI's Responses API: whole, and as the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from triptych.api.response_requests import ResponseRequest
from triptych.api.responses import (
    ChatFormat,
    ChatTokenLogprob,
    ChoiceOutput,
    ChoiceResult,
    NoPromptLogprobs,
    ReplyCall,
    ReplyParts,
    TokenBytes,
    Usage,
    shown_message,
)
from triptych.api.stream import EventStream, encode_event
from triptych.errors import TriptychError
from triptych.http.exchange import StreamingResponse, new_id
from triptych.messages import FinishReason

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Keep = Callable[["ResponseObject", ReplyParts], None]


# --- whole


class OutputTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextPart(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputTextPart]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningTextPart]
    status: ItemStatus
    summary: list[dict[str, Any]] = []


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputUsage(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputUsage(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputUsage
    output_tokens: int
    output_tokens_details: OutputUsage
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct, frozen=True):
    code: str
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The answer, with the parameters of its request."""

    id: str
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    background: bool = False
    object: Literal["response"] = "response"


class ResponsesFormat(NoPromptLogprobs):
    """``keep`` gets the answer when it is complete, before the client does; None: not stored."""

    chunk = ResponseObject  # streams are ResponseEvents

    def __init__(
        self, request: ResponseRequest, token_bytes: TokenBytes, keep: Keep | None
    ) -> None:
        # An id is also the right to continue the answer: nobody must guess it.
        self.id_prefix = f"resp_{secrets.token_hex(12)}"
        self._request = request
        self._chat = ChatFormat(token_bytes)
        self._keep = keep

    def completion(
        self,
        *,
        id: str,
        created: int,
        model: str,
        choices: list[ChoiceResult],
        usage: Usage,
        **unused: Any,  # what other formats show besides
    ) -> ResponseObject:
        (choice,) = choices
        parts = choice.output.parts
        items: list[OutputItem] = []
        if parts.reasoning:
            reasoning = [ReasoningTextPart(parts.reasoning)]
            items.append(ReasoningItem(new_id("rs_"), reasoning, "completed"))
        if parts.content or not parts.calls:
            text = OutputTextPart(parts.content, [], self.logprobs(choice.output))
            items.append(MessageItem(new_id("msg_"), [text], "completed"))
        items += [
            FunctionCallItem(new_id("fc_"), call.id, call.name, call.arguments, "completed")
            for call in parts.calls
        ]
        if choice.finish == "length":
            items[-1] = msgspec.structs.replace(items[-1], status="incomplete")
        return self.ended(id, created, model, items, usage, choice.finish, parts)

    def ended(
        self,
        id: str,
        created: int,
        model: str,
        items: list[OutputItem],
        usage: Usage,
        finish: FinishReason | None,
        parts: ReplyParts,
    ) -> ResponseObject:
        """The complete answer; it is stored here."""
        shape = self.response(id, created, model, items)
        cut = finish == "length"
        response = msgspec.structs.replace(
            shape,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            usage=_usage(usage),
        )
        if self._keep is not None:
            self._keep(response, parts)
        return response

    def response(
        self, id: str, created: int, model: str, items: list[OutputItem]
    ) -> ResponseObject:
        """The answer while it is generated."""
        request = self._request
        text = {"format": {"type": "text"}}
        if request.text is not None and request.text.format is not None:
            text = {"format": _shown(request.text.format)}
        choice = request.tool_choice or "auto"
        effort = None if request.reasoning is None else request.reasoning.effort
        return ResponseObject(
            id=id,
            created_at=created,
            status="in_progress",
            model=model,
            output=items,
            usage=None,
            error=None,
            incomplete_details=None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning={"effort": effort, "summary": None},
            store=self._keep is not None,
            temperature=1.0 if request.temperature is None else request.temperature,
            text=text,
            tool_choice=choice if isinstance(choice, str) else _shown(choice),
            tools=[_shown(tool) for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            user=request.user,
        )

    def logprobs(self, output: ChoiceOutput) -> list[ChatTokenLogprob]:
        found = self._chat.logprobs(output.logprobs)
        return [] if found is None else found.content

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason | None) -> ChoiceResult:
        return ChoiceResult(output, finish)

    chunk_choice = choice

    def first_chunk_choice(self, index: int) -> None:
        return None


def _shown(parameter: Struct) -> dict[str, Any]:
    """A parameter as the client gave it."""
    given: dict[str, Any] = msgspec.to_builtins(parameter)
    return {name: value for name, value in given.items() if value is not None}


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputUsage(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputUsage(0 if details is UNSET else details.reasoning_tokens),
        usage.total_tokens,
    )


# --- streamed


class ResponseEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed"):
    response: ResponseObject


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _PartEvent(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputTextPart | ReasoningTextPart


class PartDone(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputTextPart | ReasoningTextPart


class OutputTextDelta(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(
    _PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"
):
    delta: str


class ReasoningTextDone(_PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(
    ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseStreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


class ResponseEvents(EventStream):
    """The events of one answer. Each item is open until another kind of output comes."""

    __slots__ = (
        "_began",
        "_finish",
        "_item",
        "_items",
        "_logprobs",
        "_said",
        "_sequence",
        "_text",
        "_unsent",
    )
    format: ResponsesFormat
    has_text_template = False  # every event has its number

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._began = False
        self._sequence = 0
        self._finish: FinishReason | None = None
        self._items: list[OutputItem] = []  # those that are done
        self._item: OutputItem | None = None  # the open one, as it began
        self._text = ""  # of the open one
        self._logprobs: list[ChatTokenLogprob] = []  # of the open one
        self._unsent: list[ChatTokenLogprob] = []
        self._said: list[ReplyParts] = []  # all of the reply

    def encode_chunk(
        self, choices: Sequence[Struct], prompt_ids: Sequence[int] | UnsetType = UNSET
    ) -> bytes:
        events = b""
        if not self._began:
            self._began = True
            response = self._response()
            events += self._event(ResponseCreated, response=response)
            events += self._event(ResponseInProgress, response=response)
        for choice in choices:
            assert isinstance(choice, ChoiceResult), "as ResponsesFormat makes them"
            events += self._add(choice)
        return events

    def _response(self) -> ResponseObject:
        return self.format.response(self._exchange.id, self._created, self._model, self._items)

    def _event(self, kind: Callable[..., ResponseEvent], **fields: Any) -> bytes:
        event = kind(sequence_number=self._sequence, **fields)
        self._sequence += 1
        return encode_event(event)

    def _add(self, choice: ChoiceResult) -> bytes:
        parts, events = choice.output.parts, b""
        self._said.append(parts)
        self._unsent += self.format.logprobs(choice.output)
        if parts.reasoning:
            events += self._open(ReasoningItem) + self._add_reasoning(parts.reasoning)
        if parts.content:
            events += self._open(MessageItem) + self._add_text(parts.content)
        for call in parts.calls:
            events += self._add_call(call)
        if choice.finish is not None:
            self._finish = choice.finish
            if not self._items and self._item is None:
                events += self._open(MessageItem)  # an empty one
            events += self._close("incomplete" if choice.finish == "length" else "completed")
        return events

    def _open(self, kind: type[OutputItem], call: ReplyCall | None = None) -> bytes:
        """Begin an item, unless one of this kind is open."""
        if call is None and isinstance(self._item, kind):
            return b""
        events = self._close("completed")
        item: OutputItem
        part: OutputTextPart | ReasoningTextPart = OutputTextPart("")
        if call is not None:
            item = FunctionCallItem(new_id("fc_"), call.id, call.name, "", "in_progress")
        elif kind is ReasoningItem:
            item, part = ReasoningItem(new_id("rs_"), [], "in_progress"), ReasoningTextPart("")
        else:
            item = MessageItem(new_id("msg_"), [], "in_progress")
        self._item, self._text, self._logprobs = item, "", []
        index = len(self._items)
        events += self._event(ItemAdded, output_index=index, item=item)
        if call is None:
            events += self._event(PartAdded, item_id=item.id, output_index=index, part=part)
        return events

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None, "an item is open"
        return {"item_id": self._item.id, "output_index": len(self._items)}

    def _add_reasoning(self, text: str) -> bytes:
        self._text += text
        return self._event(ReasoningTextDelta, delta=text, **self._place)

    def _add_text(self, text: str) -> bytes:
        self._text += text
        logprobs = self._take_logprobs()
        return self._event(OutputTextDelta, delta=text, logprobs=logprobs, **self._place)

    def _take_logprobs(self) -> list[ChatTokenLogprob]:
        """Those of this text, and of tokens before it that had none: half a character."""
        logprobs, self._unsent = self._unsent, []
        self._logprobs += logprobs
        return logprobs

    def _add_call(self, call: ReplyCall) -> bytes:
        events = self._open(FunctionCallItem, call) if call.id else b""
        if call.arguments:
            self._text += call.arguments
            events += self._event(ArgumentsDelta, delta=call.arguments, **self._place)
        return events

    def _close(self, status: ItemStatus) -> bytes:
        """End the open item, if there is one."""
        item, text, place = self._item, self._text, {} if self._item is None else self._place
        match item:
            case None:
                return b""
            case ReasoningItem():
                thought = ReasoningTextPart(text)
                events = self._event(ReasoningTextDone, text=text, **place)
                events += self._event(PartDone, part=thought, **place)
                item = msgspec.structs.replace(item, content=[thought], status=status)
            case MessageItem():
                self._take_logprobs()
                part = OutputTextPart(text, [], self._logprobs)
                events = self._event(OutputTextDone, text=text, logprobs=self._logprobs, **place)
                events += self._event(PartDone, part=part, **place)
                item = msgspec.structs.replace(item, content=[part], status=status)
            case FunctionCallItem():
                events = self._event(ArgumentsDone, name=item.name, arguments=text, **place)
                item = msgspec.structs.replace(item, arguments=text, status=status)
        events += self._event(ItemDone, output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return events

    def _start(self, events: bytes) -> StreamingResponse:
        response = super()._start(events)
        response.error_event = self._encode_failure
        return response

    def _encode_failure(self, error: TriptychError) -> bytes:
        response = msgspec.structs.replace(
            self._response(),
            status="failed",
            error=ResponseFailure(error.code, shown_message(error)),
        )
        return self._event(ResponseFailed, response=response)

    def end(self, usage: Usage | None = None, timing: bytes = b"") -> None:
        assert usage is not None, "the translated request asks for it"
        response = self.format.ended(
            self._exchange.id,
            self._created,
            self._model,
            self._items,
            usage,
            self._finish,
            _joined(self._said),
        )
        kind = ResponseIncomplete if self._finish == "length" else ResponseCompleted
        self._end_with(self._event(kind, response=response), timing)


def _joined(pieces: Sequence[ReplyParts]) -> ReplyParts:
    calls: dict[int, ReplyCall] = {}
    for call in (call for piece in pieces for call in piece.calls):
        known = calls.get(call.index, ReplyCall(call.index, call.id, call.name, ""))
        arguments = known.arguments + call.arguments
        calls[call.index] = ReplyCall(call.index, known.id, known.name, arguments)
    return ReplyParts(
        "".join([piece.content for piece in pieces]),
        "".join([piece.reasoning for piece in pieces]),
        tuple(calls.values()),
        bool(calls),
    )
