"""Anthropic's client: against scripted replies of the fake engine, and the demo model with a
picture."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import anthropic
import pytest

from support.one_process import serving_in_one_process, serving_script
from support.requests64 import picture, png
from triptych.checkpoint import packaged_folder

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINK = "<think>\nThe user wants it.\n</think>\n\n"
SCRIPT = [
    {"prompt": "<tool_response>sunny", "reply": "It is sunny in Rome."},
    {"prompt": "<tool_response>", "reply": "I see it."},
    {"prompt": "Ask and say", "reply": THINK + "I look. " + CALL + "\n" + CLOCK, "split": True},
    {"prompt": "Ask required", "reply": '[{"name": "weather", "parameters": {"city": "Rome"}}]'},
    {"prompt": "Count", "reply": "one two three four"},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "a", "input_schema": CITY},
    {"name": "clock", "description": "b", "input_schema": {"type": "object", "properties": {}}},
]
SAMPLES = Path(__file__).parents[1] / "demo_samples"


def connect(server):
    return anthropic.Anthropic(base_url=server.url, auth_token="none", api_key=None, max_retries=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    with serving_script(SCRIPT, folder) as server, connect(server) as client:
        yield client


def image(data, media_type="image/png"):
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def ask(client, what, **fields):
    """The same message, whole and streamed: both must say the same."""
    messages = what if isinstance(what, list) else [{"role": "user", "content": what}]
    fields = {"model": "panel", "max_tokens": 200, "messages": messages, "tools": TOOLS} | fields
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert comparable(message) == comparable(whole)
    assert message.usage.output_tokens == whole.usage.output_tokens
    return whole


def comparable(message):
    blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence


def test_thinking_text_and_calls(client):
    message = ask(client, "Ask and say", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("The user wants it.", "I look. ")
    assert (first.name, first.input) == ("weather", {"city": "Rome"})
    assert (second.name, second.input) == ("clock", {})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens > 3


def test_choices_of_tools(client):
    one = ask(client, "Ask required", tool_choice={"type": "any"})
    assert [block.name for block in one.content] == ["weather"]
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    single = ask(client, "Ask and say", tool_choice=auto)
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]


def conversation(client, result):
    asked = {"role": "user", "content": "Ask and say"}
    called = client.messages.create(model="panel", max_tokens=200, messages=[asked], tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": result}
        for block in called.content
        if block.type == "tool_use"
    ]
    return [asked, called.to_param(), {"role": "user", "content": results}]


def test_results_of_tools(client):
    message = ask(client, conversation(client, "sunny"))
    assert message.content[0].text == "It is sunny in Rome."
    assert message.stop_reason == "end_turn"


def test_pictures_and_counting(client):
    shot = image(png(picture(random.Random(3))))
    messages = conversation(client, [{"type": "text", "text": "A screenshot:"}, shot])
    assert ask(client, messages).content[0].text == "I see it."
    counted = client.messages.count_tokens(model="panel", messages=messages, tools=TOOLS)
    assert counted.input_tokens > 50


def test_stop_sequences_and_lengths(client):
    message = ask(client, "Count", stop_sequences=["three"], system="Count.")
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert message.content[0].text == "one two "
    assert ask(client, "Count", max_tokens=1).stop_reason == "max_tokens"


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, "Count", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert error.value.type == "invalid_request_error"
    assert error.value.error_code == "unsupported_parameter"
    assert "web_search_20250305" in error.value.api_message
    assert error.value.body["request_id"].startswith("req-")
    with pytest.raises(anthropic.NotFoundError):
        ask(client, "Count", model="other")


def test_the_demo_model_sees_a_picture():
    flags = [str(packaged_folder("triptych-demo")), "--enable-multimodal", "--pattern=E/P/D",
             "--served-model-name=demo"]  # fmt: skip
    with serving_in_one_process(*flags) as server, connect(server) as client:
        picture = image((SAMPLES / "colour-21-0.png").read_bytes())
        question = {"type": "text", "text": "What colour is the oval, please?"}
        messages = [{"role": "user", "content": [picture, question]}]
        message = ask(
            client,
            messages,
            model="demo",
            max_tokens=20,
            tools=anthropic.omit,
            extra_body={"temperature": 0},
        )
    assert "purple" in message.content[0].text
