"""pydantic-ai: agents with tools, and typed output in its three ways."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, PromptedOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from support import client_scenes as scenes

SETTINGS = {"temperature": 0, "max_tokens": 200}
PICTURE = BinaryContent(scenes.PICTURE.read_bytes(), media_type="image/png")
SOUND = BinaryContent(scenes.SOUND.read_bytes(), media_type="audio/wav")


class Scene(BaseModel):
    """What is in the picture."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue", "purple"]
    count: int = Field(ge=0, le=9)


def agent(endpoint, name=None, **options):
    provider = OpenAIProvider(base_url=endpoint.url, api_key=endpoint.key)
    model = OpenAIChatModel(name or endpoint.model, provider=provider)
    return Agent(model, model_settings=SETTINGS, retries=0, **options)


def with_weather(endpoint):
    asked = []
    made = agent(endpoint)

    @made.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return scenes.RESULT

    return made, asked


async def test_text(scripted):
    assert (await agent(scripted).run(scenes.HELLO)).output == scenes.HELLO_REPLY


async def test_stream(scripted):
    async with agent(scripted).run_stream(scenes.HELLO) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == scenes.HELLO_REPLY
    assert len(pieces) > 1


async def test_image(demo):
    answer = await agent(demo).run([PICTURE, scenes.PICTURE_QUESTION])
    assert answer.output == scenes.PICTURE_ANSWER


async def test_audio(demo):
    answer = await agent(demo).run([SOUND, scenes.SOUND_QUESTION])
    assert answer.output == scenes.SOUND_ANSWER


async def test_multi_turn(scripted):
    first = await agent(scripted).run(scenes.HELLO)
    second = await agent(scripted).run(scenes.AGAIN, message_history=first.all_messages())
    assert second.output == scenes.AGAIN_REPLY


async def test_tools(scripted):
    made, asked = with_weather(scripted)
    assert (await made.run(scenes.WEATHER)).output == scenes.WEATHER_REPLY
    assert asked == ["Rome"]


async def test_streamed_tools(scripted):
    made, asked = with_weather(scripted)
    async with made.run_stream(scenes.WEATHER) as stream:
        assert await stream.get_output() == scenes.WEATHER_REPLY
    assert asked == ["Rome"]


async def test_typed_output(demo):
    """By a tool that the model must call."""
    made = agent(demo, output_type=Scene)
    assert isinstance((await made.run([PICTURE, scenes.PICTURE_QUESTION])).output, Scene)


async def test_json_schema(demo):
    made = agent(demo, output_type=NativeOutput(Scene))
    assert isinstance((await made.run([PICTURE, scenes.PICTURE_QUESTION])).output, Scene)


async def test_json_mode(scripted):
    made = agent(scripted, output_type=PromptedOutput(Scene))
    assert (await made.run(scenes.JSON)).output == Scene(colour="red", count=3)


async def test_reasoning(scripted):
    answer = await agent(scripted).run(scenes.THINK)
    parts = answer.all_messages()[-1].parts
    assert [part.content for part in parts if isinstance(part, ThinkingPart)] == [scenes.THOUGHT]
    assert answer.output == scenes.THINK_REPLY


async def test_errors(scripted):
    with pytest.raises(ModelHTTPError, match="no such model") as error:
        await agent(scripted, "no-such").run("?")
    assert error.value.status_code == 404
