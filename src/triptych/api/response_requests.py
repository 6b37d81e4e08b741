"""Requests of /v1/responses, OpenAI's Responses API, as chats.

Unknown fields of items, parts and tools are ignored, as in chats. ``response_objects`` has the
answers, ``response_store`` the turns of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct

from triptych.api.content import (
    AudioContent,
    ChatContentPart,
    ContentURL,
    ImageContent,
    ImageURL,
    InputAudio,
    InputAudioContent,
    MediaSlices,
    TextContent,
    VideoContent,
    data_url_type,
)
from triptych.api.requests import (
    ChatMessage,
    ChatRequest,
    MessageFunction,
    MessageToolCall,
    ReasoningEffort,
    StreamOptions,
    Tokens,
    TopLogprobs,
    Unsupported,
)
from triptych.api.structured import FormatType, JsonSchema, JsonSchemaFormat, ResponseFormat
from triptych.api.tools import (
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ToolChoice,
    ToolDefinition,
)
from triptych.api.translation import ChatBuilder, TranslatedChat
from triptych.errors import InvalidDataURL, InvalidValue, UnsupportedMediaType, UnsupportedParameter

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # the second changes nothing
MAX_METADATA = 16

T = TypeVar("T")
_NAMES = {  # of chats, and of this API
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
}


class InputTextPart(Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class InputImagePart(Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None  # refused


class InputFilePart(Struct, frozen=True, tag_field="type", tag="input_file"):
    """A media file of any kind, which the media type of its data URL tells."""

    file_data: str | None = None
    filename: str | None = None  # not used
    file_id: str | None = None  # refused
    file_url: str | None = None  # refused


class InputAudioPart(Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class EarlierTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class EarlierReasoningPart(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryPart(Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


MediaInputPart = InputImagePart | InputFilePart | InputAudioPart
ResponsePart = InputTextPart | MediaInputPart | EarlierTextPart | RefusalPart | EarlierReasoningPart


class ResponseItem(Struct, frozen=True):
    """A message, a function call, its output, or reasoning. Without a type it is a message."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None  # of a message
    content: str | list[ResponsePart] | None = None  # of a message, or of reasoning
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsePart] | None = None
    summary: list[SummaryPart] | None = None


class ResponseTool(Struct, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(Struct, frozen=True):
    type: str
    name: str | None = None


class ResponseToolChoice(Struct, frozen=True):
    """The function that must be called, or those that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class ResponseTextFormat(Struct, frozen=True):
    type: FormatType
    name: str | None = None
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseTextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: ResponseTextFormat | None = None
    verbosity: str | None = None  # accepted and not used


class ResponseReasoning(Struct, frozen=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None  # accepted and not used: answers have the reasoning itself


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # accepted and not used


class ResponseRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    UNSUPPORTED: ClassVar[Unsupported] = {"background": (False,)}
    ALLOWED: ClassVar[Mapping[str, tuple[str, ...]]] = {  # values, by place
        "input.type": ("message", "function_call", "function_call_output", "reasoning"),
        "input.role": ("user", "assistant", "system", "developer"),
        "input.content.type": (
            "input_text", "input_image", "input_file", "input_audio", "output_text", "refusal",
            "reasoning_text",
        ),
        "input.content.detail": ("auto", "low", "high", "original"),
        "input.output.type": ("input_text", "input_image", "input_file", "input_audio"),
        "text.format.type": ("text", "json_object", "json_schema"),
        "tool_choice": ("none", "auto", "required", "an object"),
        "tool_choice.mode": ("auto", "required"),
        "reasoning.effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "truncation": ("auto", "disabled"),
    }  # fmt: skip
    model: str
    input: str | Annotated[list[ResponseItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # null: true
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    reasoning: ResponseReasoning | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # what is too long is refused always
    # Hints: accepted and not used.
    max_tool_calls: int | None = None  # of tools that the server would run
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


def response_to_chat(
    request: ResponseRequest, slices: MediaSlices, called: Mapping[str, str]
) -> TranslatedChat:
    """``called``: the functions that were called in earlier turns, by the id of the call."""
    builder = _ItemBuilder(slices, called)
    if request.instructions:
        message = ChatMessage(role="system", content=request.instructions)
        builder.add(message, "instructions")
    if isinstance(request.input, str):
        builder.add(ChatMessage(role="user", content=request.input), "input")
    else:
        for i, item in enumerate(request.input):
            builder.add_item(item, f"input[{i}]")
        builder.flush()
    tools, choice = _tools(request)
    text = request.text or ResponseTextOptions()
    chat = ChatRequest(
        model=request.model,
        messages=builder.messages,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=_wants_logprobs(request),
        top_logprobs=request.top_logprobs,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if text.format is None else _format(text.format),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )
    return TranslatedChat(chat, builder.places, _NAMES)


class _ItemBuilder(ChatBuilder):
    """Items to messages: reasoning, a message and calls of the assistant are one message."""

    def __init__(self, slices: MediaSlices, called: Mapping[str, str]) -> None:
        super().__init__()
        self._slices = slices
        self._called = called
        self._place = ""  # of the assistant's message that is being built; empty: there is none
        self._reasoning = self._text = ""
        self._calls: list[MessageToolCall] = []

    def add_item(self, item: ResponseItem, place: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, place)
            case "reasoning":
                self._begin(place, anew=bool(self._text or self._calls))
                self._reasoning += _reasoning_text(item)
            case "function_call":
                self._begin(place)
                id, name = _given(item.call_id, place, "call_id"), _given(item.name, place, "name")
                function = MessageFunction(name, _given(item.arguments, place, "arguments"))
                self._calls.append(MessageToolCall(function, id))
            case "function_call_output":
                self.flush()
                self._add_output(item, place)

    def _add_message(self, item: ResponseItem, place: str) -> None:
        role, content = item.role, item.content
        if role is None:
            raise _missing(f"{place}.role")
        if content is None:
            raise _missing(f"{place}.content")
        if role == "assistant":
            self._begin(place, anew=bool(self._text or self._calls))
            self._text += content if isinstance(content, str) else _said(content, place)
            return
        self.flush()
        if isinstance(content, str):
            self.add(ChatMessage(role=role, content=content), place)
        else:
            parts, places = self._parts(content, f"{place}.content")
            self.add(ChatMessage(role=role, content=parts), place, places)

    def _add_output(self, item: ResponseItem, place: str) -> None:
        id, output = _given(item.call_id, place, "call_id"), item.output
        if output is None:
            raise _missing(f"{place}.output")
        name = item.name or self._called.get(id)
        if isinstance(output, str):
            message = ChatMessage(role="tool", content=output, tool_call_id=id, name=name)
            self.add(message, place)
        else:
            parts, places = self._parts(output, f"{place}.output")
            message = ChatMessage(role="tool", content=parts, tool_call_id=id, name=name)
            self.add(message, place, places)

    def _parts(
        self, parts: Sequence[ResponsePart], place: str
    ) -> tuple[list[ChatContentPart], list[str]]:
        places = [f"{place}[{i}]" for i in range(len(parts))]
        pairs = zip(parts, places, strict=True)
        return [_content_part(part, at, self._slices) for part, at in pairs], places

    def _begin(self, place: str, *, anew: bool = False) -> None:
        if anew:
            self.flush()
        self._place = self._place or place

    def flush(self) -> None:
        """End the assistant's message."""
        if self._place:
            message = ChatMessage(
                role="assistant",
                content=self._text,
                tool_calls=self._calls or None,
                reasoning_content=self._reasoning or None,
            )
            self.add(message, self._place)
            self._place = self._reasoning = self._text = ""
            self._calls = []


def _given(value: T | None, place: str, name: str) -> T:
    if value is None:
        raise _missing(f"{place}.{name}")
    return value


def _missing(param: str) -> InvalidValue:
    return InvalidValue(f"The parameter '{param}' is missing.", param=param)


def _reasoning_text(item: ResponseItem) -> str:
    if isinstance(item.content, list):
        texts = [part.text for part in item.content if isinstance(part, EarlierReasoningPart)]
        return "\n".join(texts)
    return "\n".join([part.text for part in item.summary or ()])


def _said(parts: Sequence[ResponsePart], place: str) -> str:
    """The text of an earlier message of the assistant."""
    text = ""
    for i, part in enumerate(parts):
        match part:
            case EarlierTextPart() | InputTextPart():
                text += part.text
            case RefusalPart():
                text += part.refusal
            case _:
                raise InvalidValue(
                    "An assistant's message has output_text.", param=f"{place}.content[{i}]"
                )
    return text


def _content_part(part: ResponsePart, place: str, slices: MediaSlices) -> ChatContentPart:
    match part:
        case InputTextPart() | EarlierTextPart():
            return TextContent(part.text)
        case InputImagePart():
            if part.image_url is None:
                raise UnsupportedParameter(
                    "There are no files here: give the image's URL or data URL in image_url.",
                    param=f"{place}.image_url",
                )
            return ImageContent(ImageURL(part.image_url, part.detail))
        case InputFilePart():
            return _file_part(part, place, slices)
        case InputAudioPart():
            return InputAudioContent(part.input_audio)
        case _:
            raise InvalidValue("This part is for messages of the assistant.", param=place)


def _file_part(part: InputFilePart, place: str, slices: MediaSlices) -> ChatContentPart:
    if part.file_data is None:
        raise UnsupportedParameter(
            "A file stands in file_data, as a data URL. For a URL write an input_image.",
            param=place,
        )
    media_type = data_url_type(part.file_data, slices)
    match (media_type or "").partition("/")[0]:
        case "image":
            return ImageContent(ImageURL(part.file_data))
        case "video":
            return VideoContent(ContentURL(part.file_data))
        case "audio":
            return AudioContent(ContentURL(part.file_data))
        case "":
            raise InvalidDataURL(
                "Write file_data as data:image/png;base64,... with the file's media type.",
                param=place,
            )
        case _:
            raise UnsupportedMediaType(
                f"The file is {media_type}, but models here take images, videos and audio.",
                param=place,
            )


def _tools(request: ResponseRequest) -> tuple[list[ToolDefinition] | None, ToolChoice | None]:
    functions: list[FunctionDefinition] = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise UnsupportedParameter(
                f"The tool '{tool.type}' is not supported: the server runs no tools. Give "
                "functions, which you run yourself.",
                param=f"tools[{i}].type",
            )
        name = _given(tool.name, f"tools[{i}]", "name")
        functions.append(FunctionDefinition(name, tool.description, tool.parameters, tool.strict))
    choice: ToolChoice | None
    if isinstance(request.tool_choice, ResponseToolChoice):
        functions, choice = _choose(request.tool_choice, functions)
    else:
        choice = request.tool_choice
    return [ToolDefinition(function) for function in functions] or None, choice


def _choose(
    choice: ResponseToolChoice, functions: list[FunctionDefinition]
) -> tuple[list[FunctionDefinition], ToolChoice]:
    if choice.type == "function":
        return functions, NamedTool(FunctionName(_given(choice.name, "tool_choice", "name")))
    if choice.type != "allowed_tools":
        raise UnsupportedParameter(
            f"The tool choice '{choice.type}' is not supported: it is function or allowed_tools.",
            param="tool_choice.type",
        )
    names = {tool.name for tool in _given(choice.tools, "tool_choice", "tools")}
    if unknown := names - {function.name for function in functions}:
        raise InvalidValue(
            f"There is no function '{unknown.pop()}' among the tools.", param="tool_choice.tools"
        )
    return [f for f in functions if f.name in names], choice.mode or "auto"


def _wants_logprobs(request: ResponseRequest) -> bool | None:
    for i, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise UnsupportedParameter(
                f"An answer can include {' and '.join(INCLUDABLE)}.", param=f"include[{i}]"
            )
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs) or None


def _format(format: ResponseTextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(format.type)
    schema = JsonSchemaFormat(format.name or "", format.schema, format.description, format.strict)
    return ResponseFormat("json_schema", schema)
