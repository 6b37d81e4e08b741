"""Answers in the shape of Anthropic's API, over a pipeline that is a stub."""

import pytest

from triptych.api.anthropic_responses import ChoiceResult, MessagesError, MessagesFormat
from triptych.api.responses import (
    ChoiceOutput,
    CompletionTokensDetails,
    PromptTokensDetails,
    ReplyCall,
    ReplyParts,
    Usage,
)
from triptych.config import Limits
from triptych.errors import (
    Draining,
    EngineFailed,
    Forbidden,
    InvalidAPIKey,
    InvalidValue,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    WorkerLost,
)

BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/messages"
USAGE = Usage(10, 4, 14, PromptTokensDetails(7), CompletionTokensDetails(2))


def completion(output, finish="stop", **options):
    format = MessagesFormat(**options)
    choices = [format.choice(0, output, finish)]
    return format.completion(id="i", model="m", choices=choices, usage=USAGE, created=1)


def test_blocks_and_usage():
    calls = (ReplyCall(0, "c1", "look", '{"a": 1}'), ReplyCall(1, "c2", "cut", '{"a": "ha'))
    output = ChoiceOutput("", reply=ReplyParts("I look.", "Hm.", calls, True))
    message = completion(output)
    assert [block.__struct_config__.tag for block in message.content] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert [block.input for block in message.content[2:]] == [{"a": 1}, {}]
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 7, 4)
    assert usage.output_tokens_details.thinking_tokens == 2
    assert len(completion(output, shows_thinking=False).content) == 3


@pytest.mark.parametrize(
    ("output", "finish", "expected"),
    [
        (ChoiceOutput("a"), "stop", ("end_turn", None)),
        (ChoiceOutput("a"), "length", ("max_tokens", None)),
        (ChoiceOutput("a", stop_string="x"), "stop", ("stop_sequence", "x")),
    ],
)
def test_stop_reasons(output, finish, expected):
    message = completion(output, finish)
    assert (message.stop_reason, message.stop_sequence) == expected


async def test_whole_and_streamed_are_the_same(web):
    whole = (await web.ask(PATH, BODY)).json
    assert whole["id"].startswith("msg_")
    events = (await web.ask(PATH, BODY | {"stream": True})).named_events
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [e["delta"]["text"] for n, e in events if n == "content_block_delta"]
    assert whole["content"] == [{"type": "text", "text": "".join(texts)}]
    assert len(texts) > 3
    started, ended = events[0][1]["message"], events[-2][1]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"] == whole["usage"]


async def test_a_stop_sequence_is_named(web):
    fields = BODY | {"max_tokens": 50, "stop_sequences": ["xyz", "there"]}
    whole = (await web.ask(PATH, fields)).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "there")
    assert whole["content"][0]["text"] == "Hello "
    *_, ended, _ = (await web.ask(PATH, fields | {"stream": True})).named_events
    assert ended[1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "there"}


async def test_an_error_in_a_stream_is_an_event(web):
    web.pipeline.error, web.pipeline.fail_after = WorkerLost("w-1 at 10.0.0.1"), 3
    reply = await web.ask(PATH, BODY | {"stream": True})
    name, event = reply.named_events[-1]
    assert (name, event["type"], event["error"]["type"]) == ("error", "error", "overloaded_error")
    assert event["error"]["details"]["error_code"] == "worker_lost"
    assert "10.0.0.1" not in event["error"]["message"]
    assert event["request_id"] == reply.headers["x-request-id"]


async def test_count_tokens(web):
    chat = {key: BODY[key] for key in ("model", "messages")}
    counted = (await web.ask(f"{PATH}/count_tokens", chat)).json
    usage = (await web.ask(PATH, BODY)).json["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": total}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidValue(""), "invalid_request_error"),
        (RequestTimeout(""), "invalid_request_error"),
        (InvalidAPIKey(""), "authentication_error"),
        (Forbidden(""), "permission_error"),
        (PayloadTooLarge(""), "request_too_large"),
        (Overloaded(""), "rate_limit_error"),
        (Draining(""), "overloaded_error"),
        (EngineFailed(""), "api_error"),
    ],
)
def test_error_types(error, kind):
    shown = MessagesError.of(error, "req-1")
    assert (shown.error.type, shown.error.details.error_code) == (kind, error.code)


async def test_errors_have_their_shape_wherever_they_are_raised(open_site):
    async with open_site(Limits(body_bytes=2000), api_key="user") as web:
        key = {"Authorization": "Bearer user"}
        replies = {
            "authentication_error": await web.ask(PATH, BODY),
            "request_too_large": await web.ask(PATH, b"x" * 3000, headers=key),
            "not_found_error": await web.ask(PATH, BODY | {"model": "other"}, headers=key),
            "invalid_request_error": await web.ask(PATH, b"{", headers=key),
        }
        for kind, reply in replies.items():
            assert (reply.json["type"], reply.json["error"]["type"]) == ("error", kind)
            assert reply.json["request_id"] == reply.headers["x-request-id"]
        other = await web.ask("/v1/chat/completions", BODY)
        assert other.json["error"]["code"] == "invalid_api_key"


async def test_media_errors_name_the_block(web):
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a*"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, bad]}]
    reply = await web.ask(PATH, BODY | {"system": "S", "messages": messages})
    assert (reply.status, reply.code) == (400, "invalid_data_url")
    assert reply.param == "messages[0].content[1]"
    bad["source"]["media_type"] = "audio/wav"
    reply = await web.ask(PATH, BODY | {"system": "S", "messages": messages})
    assert (reply.code, reply.param) == ("unsupported_media_type", "messages[0].content[1]")


async def test_a_wrong_tool_is_named(web):
    tools = [{"name": "a b", "input_schema": {"type": "object"}}]
    reply = await web.ask(PATH, BODY | {"tools": tools})
    assert (reply.code, reply.param) == ("invalid_value", "tools[0].name")
    tools = [{"name": "a", "input_schema": {"type": "string"}}]
    reply = await web.ask(PATH, BODY | {"tools": tools})
    assert (reply.code, reply.param) == ("invalid_value", "tools[0].input_schema.type")


def test_results_are_kept_as_they_are():
    output = ChoiceOutput("a")
    assert MessagesFormat().chunk_choice(0, output, None) == ChoiceResult(output, None)
