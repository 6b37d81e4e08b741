"""Tools and reasoning with the official client, in every pattern: the fake engine says what a file
tells it to say."""

from __future__ import annotations

import random

import openai
import pytest

from support.one_process import serving_script
from support.requests64 import picture, png
from support.servers import image_part, text_part

ROME = '{"city": "Rome"}'
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINK = "<think>\nThe user wants it.\n</think>\n\n"
SCRIPT = [
    {"prompt": "<think>\none two", "reply": "Enough."},
    {"prompt": "<tool_response>sunny", "reply": "It is sunny in Rome."},
    {"prompt": "<tool_response>", "reply": THINK + "I see it."},
    {"prompt": "Ask one", "reply": CALL},
    {"prompt": "Ask letter by letter", "reply": THINK + CALLS, "split": True},
    {"prompt": "Ask twice", "reply": CALLS},
    {"prompt": "Ask and say", "reply": THINK + "I look. " + CALL},
    {"prompt": "Ask required", "reply": f'[{{"name": "weather", "parameters": {ROME}}}]'},
    {"prompt": "Ask named", "reply": ROME},
    {"prompt": "Think long", "reply": "<think>\n" + "one two three four five " * 20},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "a", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "description": "It says <|im_end|>."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["EPD", "E/PD", "E/P/D", "EP/D"])
def client(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    with (
        serving_script(SCRIPT, folder, request.param) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


class Said:
    """A choice, whole or put together from its chunks."""

    def __init__(self, content, reasoning, calls, finish):
        self.content = content
        self.reasoning = reasoning
        self.calls = calls  # (name, arguments)
        self.finish = finish

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None

    def __repr__(self):
        return f"Said({vars(self)})"


def whole(choice):
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", "")
    return Said(message.content or "", reasoning, calls, choice.finish_reason)


def streamed(chunks, index=0):
    said = Said("", "", [], None)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        if choice.index != index:
            continue
        said.content += choice.delta.content or ""
        said.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                said.calls.append((call.function.name, ""))
            name, arguments = said.calls[call.index]
            said.calls[call.index] = (name, arguments + call.function.arguments)
        said.finish = choice.finish_reason or said.finish
    return said


def ask(client, what, **fields):
    """The same choice, whole and streamed: both must say the same."""
    messages = what if isinstance(what, list) else [{"role": "user", "content": what}]
    fields = {"model": "panel", "messages": messages, "tools": TOOLS} | fields
    answer = client.chat.completions.create(**fields)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    said = whole(answer.choices[0])
    assert streamed(chunks) == said
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    return said, answer


def test_one_call(client):
    said, answer = ask(client, "Ask one")
    assert said == Said("", "", [("weather", ROME)], "tool_calls")
    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.tool_calls[0].id.startswith("call_")


def test_parallel_calls(client):
    calls = [("weather", ROME), ("clock", "{}")]
    assert ask(client, "Ask twice")[0] == Said("", "", calls, "tool_calls")
    first = Said("", "", calls[:1], "tool_calls")
    assert ask(client, "Ask twice", parallel_tool_calls=False)[0] == first


def test_a_token_for_each_character(client):
    calls = [("weather", ROME), ("clock", "{}")]
    said, answer = ask(client, "Ask letter by letter")
    assert said == Said("", "The user wants it.", calls, "tool_calls")
    assert answer.usage.completion_tokens == len(THINK + CALLS) + 1


def test_reasoning_text_and_a_call(client):
    said, answer = ask(client, "Ask and say")
    assert said == Said("I look. ", "The user wants it.", [("weather", ROME)], "tool_calls")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    assert answer.choices[0].message.reasoning == said.reasoning


def test_required_and_named(client):
    said = Said("", "", [("weather", ROME)], "tool_calls")
    assert ask(client, "Ask required", tool_choice="required")[0] == said
    assert ask(client, "Ask named", tool_choice=NAMED)[0] == said


def test_none(client):
    said, _ = ask(client, "Ask one", tool_choice="none")
    assert said == Said(CALL, "", [], "stop")


def test_several_choices(client):
    messages = [{"role": "user", "content": "Ask and say"}]
    fields = {"model": "panel", "messages": messages, "tools": TOOLS, "n": 2}
    answer = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    expected = Said("I look. ", "The user wants it.", [("weather", ROME)], "tool_calls")
    assert [whole(choice) for choice in answer.choices] == [expected] * 2
    assert [streamed(chunks, index) for index in (0, 1)] == [expected] * 2


def test_the_streaming_helper_of_the_client(client):
    messages = [{"role": "user", "content": "Ask twice"}]
    fields = {"model": "panel", "messages": messages, "tools": TOOLS}
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "clock"]


def conversation(result):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
    return [
        {"role": "user", "content": "Ask one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


def test_a_tool_turn(client):
    said, _ = ask(client, conversation("sunny"))
    assert said == Said("It is sunny in Rome.", "", [], "stop")


def test_an_image_in_the_result_of_a_tool(client):
    image = image_part(png(picture(random.Random(3))))
    said, answer = ask(client, conversation([text_part("A screenshot:"), image]))
    assert said == Said("I see it.", "The user wants it.", [], "stop")
    assert answer.usage.prompt_tokens_details.image_tokens >= 16


def test_a_thinking_budget(client):
    tokens = 3 + len("<think>")  # however the vocabulary divides the marker
    said, answer = ask(client, "Think long", extra_body={"max_thinking_tokens": tokens})
    assert (said.content, said.finish) == ("Enough.", "stop")
    assert said.reasoning.startswith("one two")
    assert len(said.reasoning) < len("one two three four five " * 20)
    assert answer.usage.completion_tokens_details.reasoning_tokens >= tokens


@pytest.mark.parametrize("room", [14, 17, 20])
def test_a_thinking_budget_keeps_within_max_tokens_and_the_context(client, room):
    budget = {"extra_body": {"max_thinking_tokens": 10}}
    limited = ask(client, "Think long", max_tokens=room, **budget)
    (model,) = client.models.list().data
    _, short = ask(client, "Think long", max_tokens=1)
    filler = "!" * (model.max_model_len - room - short.usage.prompt_tokens)
    for said, answer in (limited, ask(client, f"Think long{filler}", **budget)):
        assert said.reasoning.startswith("one")
        assert answer.usage.completion_tokens <= room
        assert said.finish == "length"
    assert answer.usage.prompt_tokens == model.max_model_len - room


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}},
         "tool_choice.function.name"),
        ({"messages": conversation(3)}, "messages[2].content"),
    ],
)  # fmt: skip
def test_errors_are_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "Ask one", **fields)
    assert (error.value.code, error.value.param) == ("invalid_value", param)
