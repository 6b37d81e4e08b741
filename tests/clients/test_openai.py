"""The official client of OpenAI for Python."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from support import client_scenes as scenes


class Scene(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue", "purple"]
    count: int = Field(ge=0, le=9)


def connect(endpoint, **options):
    options = {"api_key": endpoint.key, "max_retries": 0} | options
    return openai.OpenAI(base_url=endpoint.url, **options)


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def create(endpoint, what, **fields):
    messages = what if isinstance(what, list) and "role" in what[0] else turns(what)
    with connect(endpoint) as client:
        return client.chat.completions.create(
            model=endpoint.model, messages=messages, temperature=0, **fields
        )


def test_text(scripted):
    assert create(scripted, scenes.HELLO).choices[0].message.content == scenes.HELLO_REPLY


def test_stream(scripted):
    with connect(scripted) as client:
        chunks = list(
            client.chat.completions.create(
                model=scripted.model,
                messages=turns(scenes.HELLO),
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == scenes.HELLO_REPLY
    assert chunks[-1].usage.completion_tokens > 1


async def test_async(scripted):
    async with openai.AsyncOpenAI(base_url=scripted.url, api_key=scripted.key) as client:
        answer = await client.chat.completions.create(
            model=scripted.model, messages=turns(scenes.HELLO)
        )
    assert answer.choices[0].message.content == scenes.HELLO_REPLY


def test_image(demo):
    answer = create(demo, scenes.picture_content())
    assert answer.choices[0].message.content == scenes.PICTURE_ANSWER


def test_audio(demo):
    answer = create(demo, scenes.sound_content())
    assert answer.choices[0].message.content == scenes.SOUND_ANSWER


def test_multi_turn(scripted):
    """The client's own object of the first reply is sent back, with every field that it has."""
    first = create(scripted, scenes.HELLO).choices[0].message
    messages = [*turns(scenes.HELLO), first, *turns(scenes.AGAIN)]
    assert create(scripted, messages).choices[0].message.content == scenes.AGAIN_REPLY


def test_tools(scripted):
    message = create(scripted, scenes.WEATHER, tools=[scenes.WEATHER_TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Rome"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": scenes.RESULT}
    messages = [*turns(scenes.WEATHER), message, result]
    answer = create(scripted, messages, tools=[scenes.WEATHER_TOOL])
    assert answer.choices[0].message.content == scenes.WEATHER_REPLY


def test_streamed_tools(scripted):
    with (
        connect(scripted) as client,
        client.chat.completions.stream(
            model=scripted.model, messages=turns(scenes.WEATHER), tools=[scenes.WEATHER_TOOL]
        ) as stream,
    ):
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    assert [(event.name, event.arguments) for event in done] == [("weather", scenes.ROME)]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == scenes.ROME


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "describe"}}], ids=str
)
def test_tool_choice(demo, choice):
    """Held by a grammar: the demo's model has never seen a tool."""
    function = {"name": "describe", "parameters": scenes.SCENE}
    answer = create(
        demo,
        scenes.picture_content(),
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "describe"
    Scene.model_validate_json(call.function.arguments)


def test_json_schema(demo):
    with connect(demo) as client:
        answer = client.chat.completions.parse(
            model=demo.model,
            messages=turns(scenes.picture_content()),
            response_format=Scene,
            max_tokens=200,
        )
    assert isinstance(answer.choices[0].message.parsed, Scene)


def test_streamed_json_schema(demo):
    with (
        connect(demo) as client,
        client.chat.completions.stream(
            model=demo.model,
            messages=turns(scenes.picture_content()),
            response_format=Scene,
            max_tokens=200,
        ) as stream,
    ):
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Scene)


def test_json_mode(scripted):
    answer = create(scripted, scenes.JSON, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"colour": "red", "count": 3}


def test_reasoning(scripted):
    message = create(scripted, scenes.THINK).choices[0].message
    assert (message.content, message.reasoning_content) == (scenes.THINK_REPLY, scenes.THOUGHT)


def test_errors(scripted, demo):
    with connect(scripted) as client, pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="no-such", messages=turns("?"))
    with connect(scripted, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    bad = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError) as error:
        create(demo, bad)
    assert error.value.code == "invalid_media"


def test_responses(scripted):
    scripted.require("/v1/responses")
    with connect(scripted) as client:
        first = client.responses.create(model=scripted.model, input=scenes.HELLO)
        assert first.output_text == scenes.HELLO_REPLY
        second = client.responses.create(
            model=scripted.model, input=scenes.AGAIN, previous_response_id=first.id
        )
    assert second.output_text == scenes.AGAIN_REPLY


def test_streamed_responses(scripted):
    scripted.require("/v1/responses")
    with (
        connect(scripted) as client,
        client.responses.stream(model=scripted.model, input=scenes.HELLO) as stream,
    ):
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == scenes.HELLO_REPLY
