"""Requests of /v1/messages and /v1/messages/count_tokens, Anthropic's API, as chats.

Unknown fields of messages, blocks and tools are ignored, as in chats; ``cache_control`` is one of
them, since prompts are cached anyway. ``anthropic_responses`` has the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from triptych.api.content import (
    AudioContent,
    ChatContentPart,
    ContentURL,
    ImageContent,
    ImageURL,
    TextContent,
    VideoContent,
    to_data_url,
)
from triptych.api.requests import (
    ChatMessage,
    ChatRequest,
    MessageFunction,
    MessageToolCall,
    StopString,
    StreamOptions,
    Tokens,
)
from triptych.api.structured import JsonSchema, JsonSchemaFormat, ResponseFormat
from triptych.api.tools import (
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ToolChoice,
    ToolDefinition,
)
from triptych.api.translation import ChatBuilder, TranslatedChat
from triptych.errors import InvalidValue, UnsupportedParameter

THINKING_VARIABLE = "enable_thinking"  # of chat templates that can switch it
FAILED_RESULT = "Error:"  # written before the result of a tool that failed
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+")
_NAMES = {  # of chats, and of this API
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "max_thinking_tokens": "thinking.budget_tokens",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
    "stop": "stop_sequences",
    "parameters": "input_schema",
}
_STREAM_OPTIONS = StreamOptions(include_usage=True, continuous_usage_stats=True)


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class BlockSource(Struct, frozen=True):
    """Base64 with its media type, or a URL."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Struct, frozen=True, tag_field="type", tag="image"):
    source: BlockSource


class VideoBlock(Struct, frozen=True, tag_field="type", tag="video"):
    """An extension, as is AudioBlock: Anthropic's API has images only."""

    source: BlockSource


class AudioBlock(Struct, frozen=True, tag_field="type", tag="audio"):
    source: BlockSource


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call, in an answer or in an earlier turn of the assistant."""

    id: str
    name: str
    input: dict[str, Any]


MediaBlock = ImageBlock | VideoBlock | AudioBlock
InputBlock = TextBlock | MediaBlock


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nothing is signed, and nothing is checked


class RedactedThinkingBlock(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Of another server: it is ignored, since only that can read it."""


MessageBlock = InputBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class MessagesTurn(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessagesTool(Struct, frozen=True):
    """A function that the client runs. Tools that Anthropic's servers run have another type."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "omitted"] | None = None  # summarized: all of it, as it is


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: JsonSchema


class OutputOptions(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesInput(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What makes the prompt."""

    ALLOWED: ClassVar[Mapping[str, tuple[str, ...]]] = {  # values, by place
        "messages.role": ("user", "assistant", "system"),
        "messages.content.type": (
            "text", "image", "video", "audio", "tool_use", "tool_result", "thinking",
            "redacted_thinking",
        ),
        "messages.content.source.type": ("base64", "url"),
        "messages.content.content.type": ("text", "image", "video", "audio"),
        "messages.content.content.source.type": ("base64", "url"),
        "system.type": ("text",),
        "tool_choice.type": ("auto", "any", "tool", "none"),
        "thinking.type": ("enabled", "disabled", "adaptive"),
        "thinking.display": ("summarized", "omitted"),
        "output_config.format.type": ("json_schema",),
        "output_config.effort": ("low", "medium", "high", "xhigh", "max"),
    }  # fmt: skip
    model: str
    messages: Annotated[list[MessagesTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    cache_control: dict[str, Any] | None = None  # accepted and not used


class CountTokensRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class MessagesRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: dict[str, Any] | None = None  # accepted and not used, as is service_tier
    service_tier: str | None = None


def messages_to_chat(
    request: MessagesInput,
    uses_variable: Callable[[str], bool],
    *,
    reasons: bool,
) -> TranslatedChat:
    """``uses_variable``: of the model's chat template. ``reasons``: the model marks reasoning."""
    builder = ChatBuilder()
    if request.system:
        builder.add(ChatMessage(role="system", content=_system_text(request.system)), "system")
    for i, turn in enumerate(request.messages):
        _add_turn(builder, turn, f"messages[{i}]")
    choice = request.tool_choice
    output = request.output_config or OutputOptions()
    chat = ChatRequest(
        model=request.model,
        messages=builder.messages,
        tools=_tools(request.tools),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        chat_template_kwargs=_variables(request.thinking, uses_variable),
        reasoning_effort=output.effort,
        response_format=None if output.format is None else _format(output.format),
        continue_final_message=True if request.messages[-1].role == "assistant" else None,
        **(_sampling(request, reasons) if isinstance(request, MessagesRequest) else {}),
    )
    return TranslatedChat(chat, builder.places, _NAMES)


def _sampling(request: MessagesRequest, reasons: bool) -> dict[str, Any]:
    thinking = request.thinking
    return {
        "max_tokens": request.max_tokens,
        "max_thinking_tokens": thinking.budget_tokens if thinking and reasons else None,
        "stream": request.stream,
        "stream_options": _STREAM_OPTIONS if request.stream else None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }


def _system_text(system: str | list[TextBlock]) -> str:
    return system if isinstance(system, str) else "\n".join([block.text for block in system])


def _add_turn(builder: ChatBuilder, turn: MessagesTurn, place: str) -> None:
    content = turn.content
    if isinstance(content, str):
        builder.add(ChatMessage(role=turn.role, content=content), place)
    elif turn.role == "user":
        _add_user_blocks(builder, content, place)
    elif turn.role == "assistant":
        builder.add(_assistant_message(content, place), place)
    else:
        texts = [_text(block, f"{place}.content[{i}]") for i, block in enumerate(content)]
        builder.add(ChatMessage(role="system", content="\n".join(texts)), place)


def _text(block: MessageBlock, place: str) -> str:
    if not isinstance(block, TextBlock):
        raise InvalidValue("A system message has blocks of text only.", param=place)
    return block.text


def _add_user_blocks(builder: ChatBuilder, blocks: list[MessageBlock], place: str) -> None:
    """Results of tools are messages of their own in a chat."""
    parts: list[ChatContentPart] = []
    places: list[str] = []

    def flush() -> None:
        if parts:
            builder.add(ChatMessage(role="user", content=parts.copy()), place, tuple(places))
            parts.clear()
            places.clear()

    if not blocks:
        raise InvalidValue("The message has no content.", param=f"{place}.content")
    for i, block in enumerate(blocks):
        at = f"{place}.content[{i}]"
        match block:
            case ToolResultBlock():
                flush()
                _add_result(builder, block, at)
            case TextBlock() | ImageBlock() | VideoBlock() | AudioBlock():
                parts.append(_part(block, at))
                places.append(at)
            case _:
                raise InvalidValue("Only the assistant calls tools and thinks.", param=at)
    flush()


def _add_result(builder: ChatBuilder, block: ToolResultBlock, place: str) -> None:
    content = block.content or ""
    if isinstance(content, str):
        text = f"{FAILED_RESULT} {content}" if block.is_error else content
        message = ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)
        builder.add(message, place)
        return
    parts: list[ChatContentPart] = [TextContent(FAILED_RESULT)] if block.is_error else []
    places = [place] * len(parts)
    for i, inner in enumerate(content):
        places.append(f"{place}.content[{i}]")
        parts.append(_part(inner, places[-1]))
    message = ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id)
    builder.add(message, place, places)


def _assistant_message(blocks: list[MessageBlock], place: str) -> ChatMessage:
    text, thinking = "", ""
    calls: list[MessageToolCall] = []
    for i, block in enumerate(blocks):
        at = f"{place}.content[{i}]"
        match block:
            case TextBlock():
                text += block.text
            case ThinkingBlock():
                thinking += block.thinking
            case ToolUseBlock():
                calls.append(MessageToolCall(MessageFunction(block.name, block.input), block.id))
            case RedactedThinkingBlock():
                pass
            case _:
                raise InvalidValue(
                    "An assistant's message has text, tool_use and thinking.", param=at
                )
    return ChatMessage(
        role="assistant",
        content=text,
        tool_calls=calls or None,
        reasoning_content=thinking or None,
    )


def _part(block: InputBlock, place: str) -> ChatContentPart:
    match block:
        case TextBlock():
            return TextContent(block.text)
        case ImageBlock():
            return ImageContent(ImageURL(_url(block.source, place)))
        case VideoBlock():
            return VideoContent(ContentURL(_url(block.source, place)))
        case AudioBlock():
            return AudioContent(ContentURL(_url(block.source, place)))


def _url(source: BlockSource, place: str) -> str:
    if source.type == "url":
        if source.url is None:
            raise _missing(f"{place}.source.url")
        return source.url
    if source.data is None:
        raise _missing(f"{place}.source.data")
    if source.media_type is None:
        raise _missing(f"{place}.source.media_type")
    if not _MEDIA_TYPE.fullmatch(source.media_type):
        raise InvalidValue("A media type looks like image/png.", param=f"{place}.source.media_type")
    return to_data_url(source.media_type, source.data)


def _missing(param: str) -> InvalidValue:
    return InvalidValue(f"The parameter '{param}' is missing.", param=param)


def _tools(tools: list[MessagesTool] | None) -> list[ToolDefinition] | None:
    if tools is None:
        return None
    found: list[ToolDefinition] = []
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise UnsupportedParameter(
                f"The tool '{tool.type}' runs on Anthropic's servers or is known to its models "
                "alone. Give tools with a name and an input_schema, which you run yourself.",
                param=f"tools[{i}].type",
            )
        if tool.input_schema is None:
            raise _missing(f"tools[{i}].input_schema")
        function = FunctionDefinition(tool.name, tool.description, tool.input_schema)
        found.append(ToolDefinition(function))
    return found


def _tool_choice(choice: MessagesToolChoice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise _missing("tool_choice.name")
            return NamedTool(FunctionName(choice.name))
        case "auto" | "none":
            return choice.type


def _variables(
    thinking: ThinkingOptions | None, uses_variable: Callable[[str], bool]
) -> dict[str, Any] | None:
    """Thinking is switched where the chat template can; elsewhere the model decides."""
    if thinking is None or not uses_variable(THINKING_VARIABLE):
        return None
    return {THINKING_VARIABLE: thinking.type != "disabled"}


def _format(format: OutputFormat) -> ResponseFormat:
    return ResponseFormat("json_schema", JsonSchemaFormat("output", format.schema))
