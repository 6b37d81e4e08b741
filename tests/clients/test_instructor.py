"""instructor: answers as Pydantic models, by tools and by structured output."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

from support import client_scenes as scenes


class Scene(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue", "purple"]
    count: int = Field(ge=0, le=9)


def connect(endpoint, mode):
    client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def describe(endpoint, mode, **fields):
    client = connect(endpoint, mode)
    messages = [{"role": "user", "content": scenes.picture_content()}]
    fields = {"max_tokens": 200, "max_retries": 1, "temperature": 0} | fields
    return client.create(model=endpoint.model, messages=messages, response_model=Scene, **fields)


def test_tools(demo):
    """It names the tool that the model must call."""
    assert isinstance(describe(demo, instructor.Mode.TOOLS), Scene)


def test_json_schema(demo):
    assert isinstance(describe(demo, instructor.Mode.JSON_SCHEMA), Scene)


def test_json_mode(scripted):
    client = connect(scripted, instructor.Mode.JSON)
    messages = [{"role": "user", "content": scenes.JSON}]
    scene = client.create(
        model=scripted.model, messages=messages, response_model=Scene, max_retries=1
    )
    assert (scene.colour, scene.count) == ("red", 3)


def test_streamed_tools(demo):
    client = connect(demo, instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": scenes.picture_content()}]
    *_, last = client.create_partial(
        model=demo.model, messages=messages, response_model=Scene, max_tokens=200
    )
    assert last.colour in {"red", "green", "blue", "purple"}
    assert 0 <= last.count <= 9


def test_image(demo):
    """Its own type for pictures."""
    client = connect(demo, instructor.Mode.JSON_SCHEMA)
    picture = instructor.Image.from_path(scenes.PICTURE)
    scene = client.create(
        model=demo.model,
        messages=[{"role": "user", "content": [scenes.PICTURE_QUESTION, picture]}],
        response_model=Scene,
        max_tokens=200,
    )
    assert isinstance(scene, Scene)


def test_audio(demo):
    client = connect(demo, instructor.Mode.JSON_SCHEMA)
    sound = instructor.Audio.from_path(scenes.SOUND)
    scene = client.create(
        model=demo.model,
        messages=[{"role": "user", "content": [scenes.SOUND_QUESTION, sound]}],
        response_model=Scene,
        max_tokens=200,
    )
    assert isinstance(scene, Scene)


def test_errors(demo):
    with pytest.raises((InstructorRetryException, openai.NotFoundError), match="no such model"):
        connect(demo, instructor.Mode.TOOLS).create(
            model="no-such",
            messages=[{"role": "user", "content": "?"}],
            response_model=Scene,
            max_retries=1,
        )
