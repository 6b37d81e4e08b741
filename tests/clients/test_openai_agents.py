"""openai-agents: the runner with tools, typed output and turns, over chats and over Responses."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

from support import client_scenes as scenes

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
PICTURE = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": scenes.picture_url(), "detail": "auto"},
            {"type": "input_text", "text": scenes.PICTURE_QUESTION},
        ],
    }
]
SOUND = [
    {
        "role": "user",
        "content": [
            {
                "type": "input_audio",
                "input_audio": {"data": scenes.encoded(scenes.SOUND), "format": "wav"},
            },
            {"type": "input_text", "text": scenes.SOUND_QUESTION},
        ],
    }
]


class Scene(BaseModel):
    colour: Literal["red", "green", "blue", "purple"]
    count: int = Field(ge=0, le=9)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return scenes.RESULT


def agent(endpoint, kind=OpenAIChatCompletionsModel, name=None, key=None, **options):
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=key or endpoint.key, max_retries=0)
    model = kind(model=name or endpoint.model, openai_client=client)
    return Agent("tester", model=model, model_settings=SETTINGS, **options)


async def test_text(scripted):
    assert (await Runner.run(agent(scripted), scenes.HELLO)).final_output == scenes.HELLO_REPLY


async def test_stream(scripted):
    result = Runner.run_streamed(agent(scripted), scenes.HELLO)
    events = [event async for event in result.stream_events()]
    deltas = [e.data for e in events if e.type == "raw_response_event"]
    text = "".join(d.delta for d in deltas if d.type == "response.output_text.delta")
    assert text == result.final_output == scenes.HELLO_REPLY


async def test_image(demo):
    assert (await Runner.run(agent(demo), PICTURE)).final_output == scenes.PICTURE_ANSWER


async def test_audio(demo):
    assert (await Runner.run(agent(demo), SOUND)).final_output == scenes.SOUND_ANSWER


async def test_multi_turn(scripted):
    first = await Runner.run(agent(scripted), scenes.HELLO)
    turns = [*first.to_input_list(), {"role": "user", "content": scenes.AGAIN}]
    assert (await Runner.run(agent(scripted), turns)).final_output == scenes.AGAIN_REPLY


async def test_tools(scripted):
    result = await Runner.run(agent(scripted, tools=[weather]), scenes.WEATHER)
    assert result.final_output == scenes.WEATHER_REPLY


async def test_streamed_tools(scripted):
    result = Runner.run_streamed(agent(scripted, tools=[weather]), scenes.WEATHER)
    names = [event.name async for event in result.stream_events() if hasattr(event, "name")]
    assert names[:2] == ["tool_called", "tool_output"]
    assert result.final_output == scenes.WEATHER_REPLY


async def test_json_schema(demo):
    result = await Runner.run(agent(demo, output_type=Scene), PICTURE)
    assert isinstance(result.final_output, Scene)


async def test_errors(scripted):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        await Runner.run(agent(scripted, name="no-such"), "?")
    with pytest.raises(openai.AuthenticationError):
        await Runner.run(agent(scripted, key="wrong"), "?")


async def test_responses(scripted):
    """Its default."""
    scripted.require("/v1/responses")
    made = agent(scripted, OpenAIResponsesModel, tools=[weather])
    assert (await Runner.run(made, scenes.WEATHER)).final_output == scenes.WEATHER_REPLY
