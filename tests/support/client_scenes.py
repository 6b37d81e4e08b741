"""What tests of clients ask, and what servers answer: scripted replies, and the demo's samples."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[1] / "demo_samples"
PICTURE = SAMPLES / "colour-21-0.png"
PICTURE_QUESTION, PICTURE_ANSWER = "What colour is the oval, please?", "The oval is purple."
SOUND = SAMPLES / "spoken_digit-12-0.wav"
SOUND_QUESTION, SOUND_ANSWER = next(
    (sample["question"], sample["answer"])
    for sample in json.loads((SAMPLES / "samples.json").read_text())
    if SOUND.name in sample["files"]
)

HELLO, HELLO_REPLY = "Say hello", "Hello there."
AGAIN, AGAIN_REPLY = "Once more", "Hello again."
THINK, THOUGHT, THINK_REPLY = "Think first", "I greet.", "Good day."
WEATHER, WEATHER_REPLY = "How is the weather in Rome?", "It is sunny in Rome."
REQUIRED = "Which weather has Rome?"  # with tool_choice required
RESULT = "sunny"
ROME = '{"city": "Rome"}'
JSON, JSON_REPLY = "Answer in JSON", '{"colour": "red", "count": 3}'
DESCRIPTION = "The weather of a city."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": DESCRIPTION, "parameters": CITY},
}
SCENE = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue", "purple"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def script() -> list[dict[str, Any]]:
    """Lines of --fake-replies; the first that is part of the prompt gives the reply.

    The second turn is answered only if the client sent the first reply back word for word.
    """
    call = f'<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
    final = {"name": "final_answer", "parameters": {"answer": WEATHER_REPLY}}
    return [
        {"prompt": f"{HELLO_REPLY}<|im_end|>\n<|im_start|>user\n{AGAIN}", "reply": AGAIN_REPLY},
        {"prompt": f"<tool_response>{RESULT}", "reply": WEATHER_REPLY},
        {"prompt": f"Observation:\n{RESULT}", "reply": json.dumps([final])},
        {"prompt": REQUIRED, "reply": f'[{{"name": "weather", "parameters": {ROME}}}]'},
        {"prompt": WEATHER, "reply": call},
        {"prompt": THINK, "reply": f"<think>\n{THOUGHT}\n</think>\n\n{THINK_REPLY}"},
        {"prompt": JSON, "reply": JSON_REPLY},
        {"prompt": HELLO, "reply": HELLO_REPLY},
    ]


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def picture_url() -> str:
    return f"data:image/png;base64,{encoded(PICTURE)}"


def picture_content() -> list[dict[str, Any]]:
    """As OpenAI's chats have it."""
    return [
        {"type": "image_url", "image_url": {"url": picture_url()}},
        {"type": "text", "text": PICTURE_QUESTION},
    ]


def sound_content() -> list[dict[str, Any]]:
    return [
        {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}},
        {"type": "text", "text": SOUND_QUESTION},
    ]
