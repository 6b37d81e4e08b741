"""The official client of Anthropic for Python, over /v1/messages."""

from __future__ import annotations

import anthropic
import pytest

from support import client_scenes as scenes

WEATHER = {"name": "weather", "description": scenes.DESCRIPTION, "input_schema": scenes.CITY}


@pytest.fixture(autouse=True)
def _route(scripted):
    scripted.require("/v1/messages")


def connect(endpoint, **options):
    options = {"api_key": endpoint.key, "max_retries": 0} | options
    return anthropic.Anthropic(base_url=endpoint.root, **options)


def create(endpoint, *turns, **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    fields = {"model": endpoint.model, "max_tokens": 200} | fields
    with connect(endpoint) as client:
        return client.messages.create(messages=messages, **fields)


def test_text(scripted):
    message = create(scripted, scenes.HELLO)
    assert [block.text for block in message.content] == [scenes.HELLO_REPLY]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 1


def test_stream(scripted):
    with (
        connect(scripted) as client,
        client.messages.stream(
            model=scripted.model,
            max_tokens=200,
            messages=[{"role": "user", "content": scenes.HELLO}],
        ) as stream,
    ):
        assert "".join(stream.text_stream) == scenes.HELLO_REPLY
        assert stream.get_final_message().stop_reason == "end_turn"


def test_image(demo):
    data = scenes.encoded(scenes.PICTURE)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [
        {"type": "image", "source": source},
        {"type": "text", "text": scenes.PICTURE_QUESTION},
    ]
    assert create(demo, content).content[0].text == scenes.PICTURE_ANSWER


def test_multi_turn(scripted):
    first = create(scripted, scenes.HELLO)
    second = create(scripted, scenes.HELLO, first.content, scenes.AGAIN)
    assert second.content[0].text == scenes.AGAIN_REPLY


def test_tools(scripted):
    first = create(scripted, scenes.WEATHER, tools=[WEATHER])
    call = next(block for block in first.content if block.type == "tool_use")
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": scenes.RESULT}]
    second = create(scripted, scenes.WEATHER, first.content, result, tools=[WEATHER])
    assert second.content[0].text == scenes.WEATHER_REPLY


def test_streamed_tools(scripted):
    with (
        connect(scripted) as client,
        client.messages.stream(
            model=scripted.model,
            max_tokens=200,
            tools=[WEATHER],
            messages=[{"role": "user", "content": scenes.WEATHER}],
        ) as stream,
    ):
        message = stream.get_final_message()
    assert [(b.name, b.input) for b in message.content if b.type == "tool_use"] == [
        ("weather", {"city": "Rome"})
    ]


def test_tool_choice(demo):
    tool = {"name": "describe", "input_schema": scenes.SCENE}
    message = create(
        demo,
        scenes.PICTURE_QUESTION,
        tools=[tool],
        tool_choice={"type": "tool", "name": "describe"},
    )
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert set(call.input) == {"colour", "count"}


def test_count_tokens(scripted):
    with connect(scripted) as client:
        counted = client.messages.count_tokens(
            model=scripted.model, messages=[{"role": "user", "content": scenes.HELLO}]
        )
    assert counted.input_tokens == create(scripted, scenes.HELLO).usage.input_tokens


def test_errors(scripted):
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        create(scripted, "?", model="no-such")
    with (
        connect(scripted, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(
            model=scripted.model, max_tokens=9, messages=[{"role": "user", "content": "?"}]
        )
