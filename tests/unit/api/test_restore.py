"""Strings that look like media stay as they are in arguments, schemas and variables."""

import base64
import contextlib
import json
import sys

import msgspec
import pytest

from triptych.api import requests
from triptych.api.anthropic_requests import MessagesRequest
from triptych.api.content import MIN_BASE64, MediaPolicy
from triptych.api.request_body import decode_request
from triptych.api.response_requests import ResponseRequest
from triptych.api.restore import _free_fields
from triptych.errors import InvalidJSON, PayloadTooLarge

URL = "data:image/png;base64," + base64.b64encode(bytes(300)).decode()
BARE = base64.b64encode(bytes(MIN_BASE64)).decode()
OBJECT = {"url": URL, "deep": [{"data": BARE, "é": [1, None, 2.5]}], "image_url": URL}
PART = {"type": "image_url", "image_url": {"url": URL}}


def read(struct, max_bytes=1 << 20, **body):
    raw = json.dumps(body).encode()
    return decode_request(raw, msgspec.json.Decoder(struct), len(raw), max_bytes, 32)


def test_a_chat_has_its_objects_as_the_client_wrote_them():
    function = {"name": "f", "parameters": OBJECT}
    call = {"function": {"name": "f", "arguments": OBJECT}}
    chat, slices = read(
        requests.ChatRequest,
        model="m",
        messages=[
            {"role": "user", "content": [PART]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "assistant", "function_call": call["function"]},
        ],
        tools=[{"type": "function", "function": function}],
        functions=[function],
        chat_template_kwargs=OBJECT,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": OBJECT}},
        structured_outputs={"json": OBJECT},
        metadata=OBJECT,
    )
    assert chat.tools[0].function.parameters == chat.functions[0].parameters == OBJECT
    assert chat.chat_template_kwargs == chat.metadata == OBJECT
    assert chat.response_format.json_schema.schema == chat.structured_outputs.json == OBJECT
    seen, *called = requests.to_turns(chat.messages, slices, MediaPolicy(True, 9))
    assert seen.content[0].source == bytes(300)
    assert [turn.details.calls[0].parsed for turn in called] == [OBJECT, OBJECT]


def test_so_have_requests_of_other_apis():
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}
    turn["content"][0]["input"] = OBJECT
    tool = {"name": "f", "input_schema": OBJECT}
    message, _ = read(MessagesRequest, model="m", max_tokens=9, messages=[turn], tools=[tool])
    assert message.messages[0].content[0].input == message.tools[0].input_schema == OBJECT
    tool = {"type": "function", "name": "f", "parameters": OBJECT}
    metadata = {"url": URL}
    response, _ = read(ResponseRequest, model="m", input="Hi", tools=[tool], metadata=metadata)
    assert (response.tools[0].parameters, response.metadata) == (OBJECT, metadata)


def test_what_is_put_back_counts_as_json():
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    large = "data:," + "A" * 5000
    read(requests.ChatRequest, 6000, **body, metadata={"url": large})
    with pytest.raises(PayloadTooLarge):
        read(requests.ChatRequest, 4000, **body, metadata={"url": large})


@pytest.mark.parametrize("wrong", [b"\xff", b"\n", b"\0"])
def test_what_is_put_back_must_be_json(wrong):
    raw = b'{"model": "m", "prompt": "Hi", "metadata": {"url": "data:%b"}}' % wrong
    with pytest.raises(InvalidJSON):
        decode_request(raw, msgspec.json.Decoder(requests.CompletionRequest), len(raw), 1 << 20, 32)


def test_no_depth_is_too_much():
    """Objects that could just be decoded may be too deep to be encoded."""
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        raw = b'{"any": {"url": "%b", "a": %b}}' % (URL.encode(), nested)
        with contextlib.suppress(InvalidJSON):
            tree, _ = decode_request(raw, msgspec.json.Decoder(Tree), len(raw), 1 << 20, 32)
            assert tree.any["url"] == URL


def test_content_is_not_searched():
    assert _free_fields(requests.ChatMessage) == ("tool_calls", "function_call")


class Tree(msgspec.Struct):
    inner: list["Tree"] = []
    any: dict[str, object] = {}


def test_structs_may_contain_themselves():
    tree, _ = read(Tree, inner=[{"inner": [{"any": {"url": URL}}]}])
    assert tree.inner[0].inner[0].any == {"url": URL}


def test_a_marker_of_another_request_is_a_string():
    body = {"model": "m", "messages": [{"role": "user", "content": [PART]}]}
    chat, _ = read(requests.ChatRequest, **body)
    marker = chat.messages[0].content[0].image_url.url
    assert marker != URL
    again = PART | {"image_url": {"url": marker}}
    body["messages"][0]["content"] = [PART, again]
    chat, slices = read(requests.ChatRequest, **body, metadata={"url": marker, "data": BARE})
    assert chat.metadata == {"url": marker, "data": BARE}
    (turn,) = requests.to_turns(chat.messages, slices, MediaPolicy(True, 9))
    assert [part.source for part in turn.content] == [bytes(300), marker]
