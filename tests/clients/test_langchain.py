"""langchain-openai: ``ChatOpenAI`` with messages, tools and structured output."""

from __future__ import annotations

import functools
import operator
from typing import Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

from support import client_scenes as scenes


class Scene(BaseModel):
    """What is in the picture."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue", "purple"]
    count: int = Field(ge=0, le=9)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return scenes.RESULT


def model(endpoint, **options):
    options = {"model": endpoint.model, "api_key": endpoint.key, "temperature": 0} | options
    return ChatOpenAI(base_url=endpoint.url, max_retries=0, max_tokens=200, **options)


def test_text(scripted):
    answer = model(scripted).invoke(scenes.HELLO)
    assert answer.content == scenes.HELLO_REPLY
    assert answer.usage_metadata["output_tokens"] > 1


def test_stream(scripted):
    chunks = list(model(scripted, stream_usage=True).stream(scenes.HELLO))
    whole = functools.reduce(operator.add, chunks)
    assert whole.content == scenes.HELLO_REPLY
    assert len(chunks) > 2
    assert whole.usage_metadata["output_tokens"] > 1


def test_image(demo):
    content = [
        {"type": "text", "text": scenes.PICTURE_QUESTION},
        {"type": "image", "base64": scenes.encoded(scenes.PICTURE), "mime_type": "image/png"},
    ]
    answer = model(demo).invoke([HumanMessage(content)])
    assert "purple" in answer.content


def test_audio(demo):
    content = [
        {"type": "audio", "base64": scenes.encoded(scenes.SOUND), "mime_type": "audio/wav"},
        {"type": "text", "text": scenes.SOUND_QUESTION},
    ]
    assert model(demo).invoke([HumanMessage(content)]).content == scenes.SOUND_ANSWER


def test_multi_turn(scripted):
    """With names, which LangChain puts beside the content."""
    first = HumanMessage(scenes.HELLO, name="ada")
    reply = model(scripted).invoke([first])
    answer = model(scripted).invoke([first, reply, HumanMessage(scenes.AGAIN, name="ada")])
    assert answer.content == scenes.AGAIN_REPLY


def test_tools(scripted):
    bound = model(scripted).bind_tools([weather])
    asked = HumanMessage(scenes.WEATHER)
    reply = bound.invoke([asked])
    (call,) = reply.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([asked, reply, result]).content == scenes.WEATHER_REPLY


def test_streamed_tools(scripted):
    chunks = list(model(scripted).bind_tools([weather]).stream(scenes.WEATHER))
    whole = functools.reduce(operator.add, chunks)
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        ("weather", {"city": "Rome"})
    ]


def test_tool_choice(demo):
    bound = model(demo).bind_tools([Scene], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke([HumanMessage(scenes.picture_content())]).tool_calls
    Scene.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_json_schema(demo, method):
    structured = model(demo).with_structured_output(Scene, method=method)
    assert isinstance(structured.invoke([HumanMessage(scenes.picture_content())]), Scene)


def test_json_mode(scripted):
    structured = model(scripted).with_structured_output(Scene, method="json_mode")
    assert structured.invoke(scenes.JSON) == Scene(colour="red", count=3)


def test_errors(scripted):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        model(scripted, model="no-such").invoke("?")
    with pytest.raises(openai.AuthenticationError):
        model(scripted, api_key="wrong").invoke("?")
