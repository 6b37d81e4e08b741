"""Requests of the Responses API as chats, and how wrong ones are refused."""

import base64
import json

import msgspec
import pytest

from triptych.api import requests
from triptych.api.content import MediaPolicy
from triptych.api.request_body import decode_request
from triptych.api.response_requests import ResponseRequest, response_to_chat
from triptych.errors import TriptychError
from triptych.prompt.processor import MediaPart, TextPart

PNG = b"\x89PNG" + bytes(6000)  # long enough to be taken out of the body
DECODER = msgspec.json.Decoder(ResponseRequest)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
LOOK = {"type": "function", "name": "look", "description": "d", "parameters": CITY, "strict": True}
CUT = {"type": "function", "name": "cut"}


def data_url(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def translate(input="Hi", *, called=(), **fields):
    raw = json.dumps({"model": "m", "input": input} | fields).encode()
    request, slices = decode_request(raw, DECODER, len(raw), 1 << 20, 100)
    return response_to_chat(request, slices, dict(called)), slices


def turns(input, **fields):
    chat, slices = translate(input, **fields)
    return requests.to_turns(chat.request.messages, slices, MediaPolicy(True, 9))


def user(content):
    return [{"role": "user", "content": content}]


def test_text_and_instructions():
    system, said = turns("Hi", instructions="Be brief.")
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (said.role, said.content) == ("user", "Hi")


def test_parts():
    parts = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"},
        {"type": "input_image", "image_url": "https://x/y", "file_id": None},
        {"type": "input_file", "file_data": data_url(PNG, "video/mp4"), "filename": "a.mp4"},
        {"type": "input_file", "file_data": data_url(b"abc", "audio/wav")},
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}},
    ]
    chat, slices = translate([{"type": "message", "role": "user", "content": parts}])
    assert len(slices) == 2  # the others are short
    (turn,) = requests.to_turns(chat.request.messages, slices, MediaPolicy(True, 9))
    assert turn.content == (
        TextPart("What?"),
        MediaPart("image", "file", PNG),
        MediaPart("image", "file", "https://x/y"),
        MediaPart("video", "file", PNG),
        MediaPart("audio", "file", b"abc"),
        MediaPart("audio", "file", b"abc"),
    )


def call(number, name="look"):
    return {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": "{}",
            "id": "fc_1", "status": "completed"}  # fmt: skip


def test_the_items_of_an_answer_are_one_turn():
    seen = [{"type": "input_text", "text": "Seen:"},
            {"type": "input_image", "image_url": data_url(PNG)}]  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": [],
               "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}]}  # fmt: skip
    asked, answer, first, second, later = turns(
        [
            *user("Look"), thought, said, call(1), call(2, "cut"),
            {"type": "function_call_output", "call_id": "c1", "output": seen},
            {"type": "function_call_output", "call_id": "c2", "output": "done"},
            {"role": "assistant", "content": "Well."},
        ]
    )  # fmt: skip
    assert asked.content == "Look"
    assert (answer.role, answer.content, answer.details.reasoning) == (
        "assistant",
        "I look.",
        "Hm.",
    )
    assert [(c.id, c.name) for c in answer.details.calls] == [("c1", "look"), ("c2", "cut")]
    assert (first.role, first.details.name) == ("tool", "look")
    assert first.content == (TextPart("Seen:"), MediaPart("image", "file", PNG))
    assert (second.details.name, second.content) == ("cut", "done")
    assert later.content == "Well."


def test_results_of_earlier_calls_know_the_function():
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    (turn,) = turns([output], called={"c1": "look"})
    assert turn.details.name == "look"


def test_places_are_those_of_the_original():
    output = {"type": "function_call_output", "call_id": "c1",
              "output": [{"type": "input_image", "image_url": "https://x/y"}]}  # fmt: skip
    chat, _ = translate([*user("A"), call(1), output], instructions="I")
    assert chat.place("messages[0]") == "instructions"
    assert chat.place("messages[1].content") == "input[0]"
    assert chat.place("messages[2].tool_calls[0]") == "input[1]"
    assert chat.place("messages[3].content[0]") == "input[2].output[0]"
    assert chat.place("messages") == "input"
    assert chat.place("tools[1].function.parameters.type") == "tools[1].parameters.type"
    assert chat.place("response_format") == "text.format"
    assert chat.place("response_format.json_schema") == "text.format"


def test_options():
    fields = {
        "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 2, "stream": True,
        "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto", "user": "u",
        "include": ["reasoning.encrypted_content"], "background": False, "service_tier": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": CITY, "strict": True},
                 "verbosity": "low"},
    }  # fmt: skip
    chat = translate(**fields)[0].request
    assert (chat.max_tokens, chat.temperature, chat.top_p) == (9, 0.5, 0.9)
    assert (chat.logprobs, chat.top_logprobs, chat.stream) == (True, 2, True)
    assert (chat.reasoning_effort, chat.response_format.json_schema.schema) == ("low", CITY)
    assert translate()[0].request.logprobs is None
    assert translate(include=["message.output_text.logprobs"])[0].request.logprobs


def test_tools():
    chat = translate(tools=[LOOK, CUT], parallel_tool_calls=False)[0].request
    assert chat.tools[0].function == requests.FunctionDefinition("look", "d", CITY, True)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (None, False)
    named = translate(tools=[LOOK, CUT], tool_choice={"type": "function", "name": "cut"})[0].request
    assert named.tool_choice.function.name == "cut"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [CUT]}
    chat = translate(tools=[LOOK, CUT], tool_choice=allowed)[0].request
    assert [tool.function.name for tool in chat.tools] == ["cut"]
    assert chat.tool_choice == "required"


def part(**members):
    return user([members])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "length"),
        ({"input": 3}, "input", "a string"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": part(type="image_url")}, "input[0].content[0].type", "input_image"),
        ({"input": part(type="input_text")}, "input[0].content[0].text", "missing"),
        ({"input": part(type="input_image", file_id="f")}, "input[0].content[0].image_url", "URL"),
        ({"input": part(type="input_image", image_url="x", detail="huge")},
         "input[0].content[0].detail", "low"),
        ({"input": part(type="input_file", file_id="f")}, "input[0].content[0]", "file_data"),
        ({"input": part(type="input_file", file_data="AAAA")}, "input[0].content[0]", "data:"),
        ({"input": part(type="input_file", file_data=data_url(b"", "application/pdf"))},
         "input[0].content[0]", "application/pdf"),
        ({"input": part(type="reasoning_text", text="x")}, "input[0].content[0]", "assistant"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]", "output_text"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]},
         "input[0].call_id", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]},
         "input[0].output", "missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 2}, "top_p", "<= 1"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
        ({"stream": "yes"}, "stream", "a boolean"),
        ({"store": 1}, "store", "a boolean"),
        ({"previous_response_id": 3}, "previous_response_id", "a string"),
        ({"instructions": []}, "instructions", "a string"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "missing"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": [CUT]}},
         "tool_choice.tools", "'cut'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "minimal"),
        ({"metadata": {"a": 1}}, "metadata", "a string"),
        ({"truncation": "some"}, "truncation", "disabled"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
    ],
)  # fmt: skip
def test_b59_wrong_fields_are_named(fields, param, words):
    with pytest.raises(TriptychError) as error:
        translate(**fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert words in error.value.message
