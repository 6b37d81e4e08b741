"""Requests of Anthropic's API as chats, and how wrong ones are refused."""

import base64
import json

import msgspec
import pytest

from triptych.api import requests
from triptych.api.anthropic_requests import MessagesRequest, messages_to_chat
from triptych.api.content import MediaPolicy
from triptych.api.request_body import decode_request
from triptych.errors import TriptychError
from triptych.prompt.processor import MediaPart, TextPart

PNG = b"\x89PNG" + bytes(6000)  # long enough to be taken out of the body
SMALL = b"\x89PNG"
DECODER = msgspec.json.Decoder(MessagesRequest)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


def image(data):
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    return {"type": "image", "source": source}


def text(words):
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def translate(messages, *, variables=(), reasons=True, **fields):
    body = {"model": "m", "max_tokens": 9, "messages": messages} | fields
    raw = json.dumps(body).encode()
    request, slices = decode_request(raw, DECODER, len(raw), 1 << 20, 100)
    chat = messages_to_chat(request, variables.__contains__, reasons=reasons)
    return chat, slices


def turns(messages, **fields):
    chat, slices = translate(messages, **fields)
    return requests.to_turns(chat.request.messages, slices, MediaPolicy(True, 9))


def user(content):
    return [{"role": "user", "content": content}]


def test_text_and_system():
    system, said = turns(user("Hi"), system=[text("One."), text("Two.")])
    assert (system.role, system.content) == ("system", "One.\nTwo.")
    assert (said.role, said.content) == ("user", "Hi")


@pytest.mark.parametrize("data", [PNG, SMALL])
def test_base64_is_decoded_whether_it_was_taken_out_or_not(data):
    chat, slices = translate(user([image(data), text("What?")]))
    assert len(slices) == (data is PNG)
    (turn,) = requests.to_turns(chat.request.messages, slices, MediaPolicy(True, 9))
    assert turn.content == (MediaPart("image", "file", data), TextPart("What?"))


def test_other_media_and_urls():
    blocks = [
        {"type": kind, "source": {"type": "url", "url": "https://x/y"}}
        for kind in ("image", "video", "audio")
    ]
    (turn,) = turns(user(blocks))
    assert [(part.kind, part.source) for part in turn.content] == [
        ("image", "https://x/y"), ("video", "https://x/y"), ("audio", "https://x/y"),
    ]  # fmt: skip


def test_calls_and_results():
    long = "a" * 5000  # named as base64 would be
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"data": long}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x" * 5000}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("Seen:"), image(PNG)]}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
    asked, called, first, second, last = turns(
        [
            *user("Look"),
            {"role": "assistant", "content": [thinking, hidden, text("I look."), call]},
            *user([result, failed, text("And?")]),
        ]
    )
    assert called.content == "I look."
    assert called.details.reasoning == "Hm."
    (earlier,) = called.details.calls
    assert (earlier.id, earlier.name, earlier.parsed) == ("t1", "look", {"data": long})
    assert (first.role, first.details.name, first.details.call_id) == ("tool", "look", "t1")
    assert first.content == (TextPart("Seen:"), MediaPart("image", "file", PNG))
    assert second.content == "Error: no"
    assert (last.role, last.content) == ("user", (TextPart("And?"),))
    assert asked.content == "Look"


def test_places_are_those_of_the_original():
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("Seen:"), image(PNG)],
              "is_error": True}  # fmt: skip
    chat, _ = translate([*user("A"), *user([result, text("B"), image(PNG)])], system="S")
    assert chat.place("messages[0]") == "system"
    assert chat.place("messages[1].content") == "messages[0]"
    assert chat.place("messages[2].content[2]") == "messages[1].content[0].content[1]"
    assert chat.place("messages[2].role") == "messages[1].content[0]"
    assert chat.place("messages[3].content[1]") == "messages[1].content[2]"
    assert chat.place("tools[3].function.parameters.type") == "tools[3].input_schema.type"
    assert chat.place("tools[3].function.name") == "tools[3].name"
    assert chat.place("response_format") == "output_config.format"
    assert chat.place("tool_choice.function.name") == "tool_choice.name"
    assert chat.place("stop_token_ids") == "stop_token_ids"
    assert chat.place("messages") == "messages"
    assert chat.place(None) is None


def test_sampling():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x"], "stream": True}
    chat = translate(user("Hi"), metadata={"user_id": "u"}, service_tier="auto", **fields)[
        0
    ].request
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.top_k) == (9, 0.5, 0.9, 3)
    assert (chat.stop, chat.stream, chat.continue_final_message) == (["x"], True, None)
    last = {"role": "assistant", "content": "The answer is ("}
    assert translate([*user("Hi"), last])[0].request.continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
    ],
)
def test_tool_choice(choice, expected, parallel):
    tools = [{"name": "look", "description": "d", "input_schema": CITY, "type": "custom"}]
    chat = translate(user("Hi"), tools=tools, tool_choice=choice)[0].request
    assert chat.tools[0].function == requests.FunctionDefinition("look", "d", CITY)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)
    named = translate(user("Hi"), tools=tools, tool_choice={"type": "tool", "name": "look"})[0]
    assert named.request.tool_choice.function.name == "look"


def test_thinking_reaches_templates_and_parsers_that_know_it():
    enabled, disabled = {"type": "enabled", "budget_tokens": 7}, {"type": "disabled"}
    chat = translate(user("Hi"), thinking=enabled, variables=("enable_thinking",))[0].request
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.max_thinking_tokens == 7
    chat = translate(user("Hi"), thinking=disabled, variables=("enable_thinking",))[0].request
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    chat = translate(user("Hi"), thinking=enabled, reasons=False)[0].request
    assert (chat.chat_template_kwargs, chat.max_thinking_tokens) == (None, None)


def test_output_config():
    config = {"effort": "low", "format": {"type": "json_schema", "schema": CITY}}
    chat = translate(user("Hi"), output_config=config)[0].request
    assert chat.reasoning_effort == "low"
    assert chat.response_format.json_schema.schema == CITY


SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": "9"}, "max_tokens", "an integer"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_k": 1.5}, "top_k", "an integer"),
        ({"stop_sequences": "x"}, "stop_sequences", "a list"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "length"),
        ({"stream": 1}, "stream", "a boolean"),
        ({"messages": []}, "messages", "length"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "assistant"),
        ({"messages": user(None)}, "messages[0].content", "a string"),
        ({"messages": user([])}, "messages[0].content", "no content"),
        ({"messages": user([{"type": "document"}])}, "messages[0].content[0].type", "tool_result"),
        ({"messages": user([{"text": "x"}])}, "messages[0].content[0].type", "missing"),
        ({"messages": user([{"type": "image"}])}, "messages[0].content[0].source", "missing"),
        ({"messages": user([{"type": "image", "source": {"type": "file"}}])},
         "messages[0].content[0].source.type", "base64 or url"),
        ({"messages": user([{"type": "image", "source": {"type": "base64"}}])},
         "messages[0].content[0].source.data", "missing"),
        ({"messages": user([{"type": "image", "source": {"type": "url"}}])},
         "messages[0].content[0].source.url", "missing"),
        ({"messages": user([{"type": "image", "source": {"type": "base64", "data": "AA==",
                             "media_type": "png"}}])},
         "messages[0].content[0].source.media_type", "image/png"),
        ({"messages": user([{"type": "tool_use", "id": "a", "name": "b", "input": {}}])},
         "messages[0].content[0]", "assistant"),
        ({"messages": [{"role": "assistant", "content": [image(SMALL)]}]},
         "messages[0].content[0]", "assistant"),
        ({"system": 3}, "system", "a string"),
        ({"system": [image(SMALL)]}, "system[0].type", "text"),
        ({"tools": [SEARCH]}, "tools[0].type", "'web_search_20250305'"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "missing"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "auto, any"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ({"thinking": {"type": "on"}}, "thinking.type", "enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", ">= 1"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "low"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "json_s"),
        ({"container": "c"}, "container", "not supported"),
        ({"model": 3}, "model", "a string"),
    ],
)  # fmt: skip
def test_b58_wrong_fields_are_named(fields, param, words):
    with pytest.raises(TriptychError) as error:
        translate(**{"messages": user("Hi")} | fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert words in error.value.message
