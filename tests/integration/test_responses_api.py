"""The Responses API with the official client: against scripted replies of the fake engine, and the
demo model with a picture."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import openai
import pydantic
import pytest

from support.one_process import serving_in_one_process, serving_script
from support.requests64 import picture, png
from triptych.checkpoint import packaged_folder

ROME = '{"city": "Rome"}'
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINK = "<think>\nThe user wants it.\n</think>\n\n"
SCRIPT = [
    {"prompt": "<tool_response>sunny", "reply": "It is sunny in Rome."},
    {"prompt": "<tool_response>", "reply": "I see it."},
    {"prompt": "Which city", "reply": ROME},
    {"prompt": "Ask and say", "reply": THINK + "I look. " + CALL + "\n" + CLOCK, "split": True},
    {"prompt": "Count", "reply": "one two three four"},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": True},
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}},
     "strict": False},
]  # fmt: skip
SAMPLES = Path(__file__).parents[1] / "demo_samples"


class Place(pydantic.BaseModel):
    city: str


def connect(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    with serving_script(SCRIPT, folder) as server, connect(server) as client:
        yield client


def image(data, media_type="image/png"):
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def ask(client, what, **fields):
    """The same response, whole and streamed: both must say the same."""
    fields = {"model": "panel", "input": what, "max_output_tokens": 200, "tools": TOOLS} | fields
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"
    streamed = events[-1].response
    assert comparable(streamed) == comparable(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole, events


def comparable(response):
    ours = {"id", "call_id", "parsed_arguments"}
    items = [item.model_dump(exclude=ours) for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items, response.status


def test_reasoning_text_and_calls(client):
    response, events = ask(client, "Ask and say")
    thought, said, first, second = response.output
    assert thought.content[0].text == "The user wants it."
    assert response.output_text == said.content[0].text == "I look. "
    assert (first.name, first.arguments) == ("weather", ROME)
    assert (second.name, second.arguments) == ("clock", "{}")
    assert response.usage.output_tokens_details.reasoning_tokens > 3
    assert {
        "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done",
    } <= {event.type for event in events}  # fmt: skip


def test_a_conversation_with_tools(client):
    first = client.responses.create(model="panel", input="Ask and say", tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    second, _ = ask(client, outputs, previous_response_id=first.id)
    assert second.output_text == "It is sunny in Rome."
    stateless = [{"role": "user", "content": "Ask and say"}, *first.output, *outputs]
    assert ask(client, stateless)[0].output_text == "It is sunny in Rome."
    assert client.responses.retrieve(second.id).output_text == second.output_text
    shot = [{"type": "input_text", "text": "A screenshot:"}, image(png(picture(random.Random(3))))]
    third, _ = ask(client, [outputs[0] | {"output": shot}], previous_response_id=first.id)
    assert third.output_text == "I see it."


def test_structured_output(client):
    parsed = client.responses.parse(model="panel", input="Which city", text_format=Place)
    assert parsed.output_parsed == Place(city="Rome")


def test_an_answer_that_was_cut(client):
    response, _ = ask(client, "Count", max_output_tokens=1)
    assert response.incomplete_details.reason == "max_output_tokens"


def test_errors(client):
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, "Count", previous_response_id="resp_none")
    assert error.value.code == "response_not_found"
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "Count", tools=[{"type": "web_search"}])
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "tools[0].type")


def test_the_demo_model_sees_a_picture():
    flags = [str(packaged_folder("triptych-demo")), "--enable-multimodal", "--pattern=E/P/D",
             "--served-model-name=demo"]  # fmt: skip
    with serving_in_one_process(*flags) as server, connect(server) as client:
        question = {"type": "input_text", "text": "What colour is the oval, please?"}
        content = [image((SAMPLES / "colour-21-0.png").read_bytes()), question]
        fields = {"model": "demo", "temperature": 0, "max_output_tokens": 20, "tools": openai.omit}
        response, _ = ask(client, [{"role": "user", "content": content}], **fields)
        assert "purple" in response.output_text
        further = client.responses.create(
            model="demo",
            input=question["text"],
            previous_response_id=response.id,
            temperature=0,
            max_output_tokens=20,
        )
    assert "purple" in further.output_text
    assert further.usage.input_tokens_details.cached_tokens > 0
