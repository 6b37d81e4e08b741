"""smolagents: its model class, and an agent that calls tools."""

from __future__ import annotations

import json

import openai
import pytest
from PIL import Image
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

from support import client_scenes as scenes


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    assert city == "Rome"
    return scenes.RESULT


def model(endpoint, **options):
    options = {"model_id": endpoint.model, "api_key": endpoint.key} | options
    client = {"max_retries": 0}
    return OpenAIModel(
        api_base=endpoint.url, client_kwargs=client, temperature=0, max_tokens=200, **options
    )


def turn(*content, role=MessageRole.USER):
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return ChatMessage(role=role, content=parts)


def test_text(scripted):
    assert model(scripted).generate([turn(scenes.HELLO)]).content == scenes.HELLO_REPLY


def test_stream(scripted):
    deltas = list(model(scripted).generate_stream([turn(scenes.HELLO)]))
    assert "".join(delta.content or "" for delta in deltas) == scenes.HELLO_REPLY


def test_image(demo):
    with Image.open(scenes.PICTURE) as picture:
        part = {"type": "image", "image": picture.convert("RGB")}
        answer = model(demo).generate([turn(part, scenes.PICTURE_QUESTION)])
    assert answer.content == scenes.PICTURE_ANSWER


def test_multi_turn(scripted):
    made = model(scripted)
    first = made.generate([turn(scenes.HELLO)])
    reply = turn(first.content, role=MessageRole.ASSISTANT)
    answer = made.generate([turn(scenes.HELLO), reply, turn(scenes.AGAIN)])
    assert answer.content == scenes.AGAIN_REPLY


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools(scripted, stream):
    """The agent demands a call in every step (tool_choice required), and ends with one."""
    agent = ToolCallingAgent(
        tools=[weather],
        model=model(scripted),
        max_steps=3,
        stream_outputs=stream,
        verbosity_level=LogLevel.OFF,
    )
    assert agent.run(scenes.REQUIRED) == scenes.WEATHER_REPLY


def test_json_schema(demo):
    schema = {"name": "scene", "schema": scenes.SCENE, "strict": True}
    answer = model(demo).generate(
        [turn(scenes.PICTURE_QUESTION)],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert set(json.loads(answer.content)) == {"colour", "count"}


def test_errors(scripted):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        model(scripted, model_id="no-such").generate([turn("?")])
