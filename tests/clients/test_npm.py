"""Clients from npm: OpenAI's own and Vercel's ``ai``. Each runs once; its cases are judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support import client_scenes as scenes

HERE = Path(__file__).parent / "npm"
SECONDS = 120
CALL = {"name": "weather", "arguments": scenes.ROME}


def found(request, scripted, demo, client):
    folder = Path(request.config.getoption("--npm-folder")).absolute()
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (folder / "node_modules").is_dir():
        pytest.skip("the npm clients are not installed: make setup-clients")
    for file in HERE.glob("*.mjs"):  # modules are looked for beside the file that imports them
        shutil.copy(file, folder)
    servers = {
        name: {"url": one.url, "key": one.key, "model": one.model}
        for name, one in (("scripted", scripted), ("demo", demo))
    }
    settings = json.dumps(servers | {"scenes": asked()})
    done = subprocess.run(
        ["node", folder / f"{client}.mjs", settings],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def asked():
    return {
        "hello": scenes.HELLO,
        "again": scenes.AGAIN,
        "weather": scenes.WEATHER,
        "result": scenes.RESULT,
        "think": scenes.THINK,
        "json": scenes.JSON,
        "tool": scenes.WEATHER_TOOL,
        "picture": scenes.picture_content(),
        "picture_data": scenes.encoded(scenes.PICTURE),
        "picture_question": scenes.PICTURE_QUESTION,
        "sound": scenes.sound_content(),
        "sound_data": scenes.encoded(scenes.SOUND),
        "sound_question": scenes.SOUND_QUESTION,
    }


@pytest.fixture(scope="module")
def openai(request, scripted, demo):
    return found(request, scripted, demo, "openai")


@pytest.fixture(scope="module")
def vercel(request, scripted, demo):
    return found(request, scripted, demo, "vercel")


def is_scene(value):
    return value["colour"] in scenes.SCENE["properties"]["colour"]["enum"] and (
        0 <= value["count"] <= 9
    )


def test_openai_text(openai):
    assert openai["text"] == scenes.HELLO_REPLY


def test_openai_stream(openai):
    assert openai["stream"] == scenes.HELLO_REPLY


def test_openai_image(openai):
    assert openai["image"] == scenes.PICTURE_ANSWER


def test_openai_audio(openai):
    assert openai["audio"] == scenes.SOUND_ANSWER


def test_openai_multi_turn(openai):
    assert openai["multi_turn"] == scenes.AGAIN_REPLY


def test_openai_tools(openai):
    assert openai["tools"] == [CALL, scenes.WEATHER_REPLY]


def test_openai_streamed_tools(openai):
    assert openai["streamed_tools"].items() >= CALL.items()


def test_openai_json_schema(openai):
    assert is_scene(openai["json_schema"])


def test_openai_json_mode(openai):
    assert openai["json_mode"] == json.loads(scenes.JSON_REPLY)


def test_openai_errors(openai):
    assert openai["not_found"]["status"] == 404
    assert openai["wrong_key"]["status"] == 401
    assert openai["types"] is True


def test_vercel_text(vercel):
    assert vercel["text"] == scenes.HELLO_REPLY


def test_vercel_stream(vercel):
    assert vercel["stream"] == scenes.HELLO_REPLY


def test_vercel_image(vercel):
    assert vercel["image"] == scenes.PICTURE_ANSWER


def test_vercel_audio(vercel):
    assert vercel["audio"] == scenes.SOUND_ANSWER


def test_vercel_multi_turn(vercel):
    assert vercel["multi_turn"] == scenes.AGAIN_REPLY


def test_vercel_tools(vercel):
    assert vercel["tools"] == scenes.WEATHER_REPLY


def test_vercel_streamed_tools(vercel):
    assert vercel["streamed_tools"] == scenes.WEATHER_REPLY


def test_vercel_json_schema(vercel):
    assert is_scene(vercel["json_schema"])


def test_vercel_reasoning(vercel):
    assert vercel["reasoning"] == scenes.THOUGHT


def test_vercel_errors(vercel):
    assert vercel["not_found"]["status"] == 404
    assert vercel["types"] is True


def test_vercel_responses(scripted, vercel):
    scripted.require("/v1/responses")
    assert vercel["responses"] == scenes.WEATHER_REPLY
