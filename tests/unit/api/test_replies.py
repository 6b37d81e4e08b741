"""Replies in parts: tool calls and reasoning, whole and streamed, over a stub pipeline."""

import asyncio
import itertools

import pytest

from support.templates import template
from triptych.config import Limits
from triptych.errors import InvalidConfig
from triptych.messages import Delta, MediaSpan, PromptInfo

WEATHER = {"type": "function", "function": {"name": "weather"}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CALL2 = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
THINK = "<think>\nLet me see.\n</think>\n\n"
HERMES = {"chat_template": str(template("hermes"))}
MODEL = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def web(open_site):
    async with open_site(**HERMES) as running:
        yield running


def groups(ids, size):
    return [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]


def say(web, text, by=1, finish="stop"):
    """Let the model say this, ``by`` tokens at a time."""
    ids = web.pipeline.tokenizer.library.encode(text, add_special_tokens=False).ids

    async def tokens(work, deliver):
        info = PromptInfo(len(work.prompt), 1)
        for group in groups(ids, by or len(ids)):
            deliver(Delta(group, None, (), info))
            info = None
            await asyncio.sleep(0)
        deliver(Delta((), finish, (), info))
        return {}

    web.pipeline._tokens = tokens
    return ids


def put_together(events, index=0):
    """What a client makes of the chunks of one choice; checks their order and shape."""
    message = {"content": "", "reasoning": "", "calls": []}
    finish, order = None, []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "nothing follows the finish reason"
            finish, delta = choice["finish_reason"], choice["delta"]
            if not order:
                assert delta == {"role": "assistant", "content": ""}
                order.append("role")
                continue
            assert "role" not in delta
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for key in ("reasoning", "content"):
                if key in delta:
                    assert delta[key]
                    message[key] += delta[key]
                    order.append(key)
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["calls"]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                message["calls"][call["index"]][1] += call["function"]["arguments"]
                order.append("call")
    return message, finish, [name for name, _ in itertools.groupby(order)]


def parts_of(message):
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
    }


ROME = ["weather", '{"city": "Rome"}']
REPLIES = [  # text, content, reasoning, calls
    ("Hello", "Hello", "", []),
    (CALL, "", "", [ROME]),
    ("Wait. " + CALL, "Wait. ", "", [ROME]),
    (CALL + "\n" + CALL2, "", "", [ROME, ["clock", "{}"]]),
    (THINK + "Yes", "Yes", "Let me see.", []),
    (THINK + CALL, "", "Let me see.", [ROME]),
    (THINK + "Wait. " + CALL + CALL2, "Wait. ", "Let me see.", [ROME, ["clock", "{}"]]),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), REPLIES)
@pytest.mark.parametrize("by", [1, 3, 0])
async def test_parts_whole_and_streamed(web, text, content, reasoning, calls, by):
    say(web, text, by)
    fields = {"tools": [WEATHER, CLOCK]}
    reply = await web.chat(**fields)
    (choice,) = reply.json["choices"]
    expected = {"content": content, "reasoning": reasoning, "calls": calls}
    assert parts_of(choice["message"]) == expected
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    if calls and not content:
        assert choice["message"]["content"] is None
    streamed, finish, order = put_together((await web.chat(stream=True, **fields)).events)
    assert streamed == expected
    assert finish == choice["finish_reason"]
    kinds = {"reasoning": reasoning, "content": content, "call": calls}
    assert order == ["role", *(kind for kind, there in kinds.items() if there)]
    if len(calls) == 2:
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 2


async def test_every_choice_is_parsed(web):
    say(web, "Wait. " + CALL)
    reply = await web.chat(tools=[WEATHER], n=2)
    expected = {"content": "Wait. ", "reasoning": "", "calls": [ROME]}
    assert [parts_of(choice["message"]) for choice in reply.json["choices"]] == [expected] * 2
    events = (await web.chat(tools=[WEATHER], n=2, stream=True)).events
    for index in (0, 1):
        assert put_together(events, index)[:2] == (expected, "tool_calls")


@pytest.mark.parametrize(
    ("stop", "arguments", "finish"),
    [
        ("ome", '{"city": "R', "stop"),
        ("}}", '{"city": "Rome"', "stop"),
        ("</tool_call>", '{"city": "Rome"}', "tool_calls"),
    ],
)
async def test_a_call_that_a_stop_string_cut_is_not_one_to_run(web, stop, arguments, finish):
    say(web, THINK + CALL)
    (choice,) = (await web.chat(tools=[WEATHER], stop=stop)).json["choices"]
    assert parts_of(choice["message"])["calls"] == [["weather", arguments]]
    assert choice["finish_reason"] == finish
    events = (await web.chat(tools=[WEATHER], stop=stop, stream=True)).events
    assert put_together(events)[1] == finish


async def test_a_function_call_that_a_stop_string_cut_is_not_one_to_run(web):
    say(web, CALL)
    reply = await web.chat(functions=[WEATHER["function"]], stop="ome")
    assert reply.json["choices"][0]["finish_reason"] == "stop"


async def test_without_tools_calls_are_text(web):
    say(web, THINK + CALL)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = (await web.chat(**fields)).json["choices"]
        expected = {"content": CALL, "reasoning": "Let me see.", "calls": []}
        assert parts_of(choice["message"]) == expected
        assert choice["finish_reason"] == "stop"


async def test_unknown_functions_are_text(web):
    say(web, CALL)
    (choice,) = (await web.chat(tools=[CLOCK])).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_a_reply_that_is_cut_off(web):
    say(web, CALL[:-20], finish="length")
    (choice,) = (await web.chat(tools=[WEATHER])).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city')
    assert choice["finish_reason"] == "length"
    say(web, "<think>\nhm", finish="length")
    (choice,) = (await web.chat()).json["choices"]
    assert parts_of(choice["message"]) == {"content": "", "reasoning": "hm", "calls": []}


async def test_one_call_only(web):
    ids = say(web, CALL + "\n" + CALL2 + "\n" + CALL2)
    fields = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    reply = await web.chat(**fields)
    (choice,) = reply.json["choices"]
    assert parts_of(choice["message"])["calls"] == [ROME]
    assert choice["finish_reason"] == "tool_calls"
    assert reply.json["usage"]["completion_tokens"] < len(ids)
    assert len(web.pipeline.cancelled) == 1
    streamed, finish, _ = put_together((await web.chat(stream=True, **fields)).events)
    assert (streamed["calls"], finish) == ([ROME], "tool_calls")
    assert len(web.pipeline.cancelled) == 2


async def test_the_older_form_of_tools(web):
    say(web, "Wait. " + CALL + CALL2)
    fields = {"functions": [{"name": "weather"}, {"name": "clock"}]}
    (choice,) = (await web.chat(**fields)).json["choices"]
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["message"] == {"role": "assistant", "content": "Wait. ", "function_call": call}
    assert choice["finish_reason"] == "function_call"
    events = (await web.chat(stream=True, **fields)).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert pieces[0]["name"] == "weather"
    assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_calls_that_the_client_demands(web, choice, stream):
    arguments = '{"city": "Rome"}'
    calls = f'[{{"name": "weather", "parameters": {arguments}}}]'
    say(web, arguments if choice == "named" else calls)
    demanded = "required" if choice == "required" else WEATHER
    reply = await web.chat(tools=[WEATHER, CLOCK], tool_choice=demanded, stream=stream)
    assert web.pipeline.works[-1].sampling.grammar.kind == "json"
    if stream:
        message, finish, _ = put_together(reply.events)
    else:
        (only,) = reply.json["choices"]
        message, finish = parts_of(only["message"]), only["finish_reason"]
    assert message == {"content": "", "reasoning": "", "calls": [ROME]}
    assert finish == "tool_calls"


async def test_b54_a_format_of_the_client_excludes_tools(web):
    format = {"response_format": {"type": "json_object"}}
    reply = await web.chat(tools=[WEATHER], **format)
    assert (reply.status, reply.param) == (400, "response_format")
    assert (await web.chat(tools=[WEATHER], tool_choice="none", **format)).status == 200
    say(web, '{"a": 1}')
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    (choice,) = (await web.chat(**format, **thinking)).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}'}


async def test_schemas_of_tools_have_the_limit_of_grammars(open_site):
    async with open_site(Limits(grammar_bytes=200), **HERMES) as web:
        tools = [WEATHER | {"function": {"name": "weather", "parameters": {"title": "a" * 300}}}]
        reply = await web.chat(tools=tools, tool_choice="required")
        assert (reply.status, reply.code, reply.param) == (400, "invalid_schema", "tools")
        assert (await web.chat(tools=tools)).status == 200


# --- reasoning


async def test_reasoning_that_the_prompt_opens(web):
    say(web, "Let me see.\n</think>\n\nYes")
    for variables, reasoning, content in (
        ({"enable_thinking": True}, "Let me see.", "Yes"),
        ({}, "", "Let me see.\n</think>\n\nYes"),
    ):
        (choice,) = (await web.chat(chat_template_kwargs=variables)).json["choices"]
        assert parts_of(choice["message"]) == {
            "content": content, "reasoning": reasoning, "calls": [],
        }  # fmt: skip


@pytest.mark.parametrize("by", [1, 4, 0])
async def test_reasoning_tokens_are_counted(web, by):
    said = say(web, "Let me see.\n</think>\n\nYes, indeed", by)
    usage = (await web.chat(chat_template_kwargs={"enable_thinking": True})).json["usage"]
    assert usage["completion_tokens"] == len(said)
    decode = web.pipeline.tokenizer.library.decode
    counted = next(k for k in range(len(said)) if "</think>" in decode(said[:k]))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": counted}


async def test_no_reasoning_parser(open_site):
    async with open_site(**HERMES, reasoning_parser="none") as web:
        say(web, THINK + "Yes")
        reply = await web.chat()
        assert reply.json["choices"][0]["message"] == {
            "role": "assistant", "content": THINK + "Yes",
        }  # fmt: skip
        assert "completion_tokens_details" not in reply.json["usage"]
        reply = await web.chat(max_thinking_tokens=5)
        assert (reply.code, reply.param) == ("unsupported_parameter", "max_thinking_tokens")


async def test_names_of_parsers_are_checked(open_site):
    for name in ("tool_parser", "reasoning_parser"):
        with pytest.raises(InvalidConfig, match=name.replace("_", "-")):
            async with open_site(**{name: "nothing"}):
                pass


def think_long(web, seen):
    """A model that thinks for 40 tokens unless its prompt ends the reasoning."""
    tokenizer = web.pipeline.tokenizer
    thought = tokenizer.ids("one two three four " * 10)
    answer = tokenizer.ids("The answer.")

    async def tokens(work, deliver):
        seen.append(work)
        prompt = tokenizer.library.decode(work.prompt, skip_special_tokens=False)
        ids = answer if prompt.endswith("</think>\n\n") else thought
        for i, id in enumerate(ids[: work.sampling.max_tokens]):
            deliver(Delta((id,), None, (), PromptInfo(len(work.prompt), 0) if not i else None))
            await asyncio.sleep(0)
        deliver(Delta((), "stop"))
        return {}

    web.pipeline._tokens = tokens
    return thought, answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thinking_budget(web, stream):
    seen = []
    thought, answer = think_long(web, seen)
    fields = {
        "chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 6, "seed": 7,
        "return_token_ids": True, "max_tokens": 90, "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }  # fmt: skip
    reply = await web.chat(**fields)
    first, second = seen
    tokenizer = web.pipeline.tokenizer
    closing = tokenizer.ids("\n</think>\n\n")
    assert second.prompt == (*first.prompt, *thought[:6], *closing)
    assert second.sampling.max_tokens == 90 - 6 - len(closing)
    expected = {
        "content": "The answer.",
        "reasoning": tokenizer.library.decode(thought[:6]),
        "calls": [],
    }
    if stream:
        message, finish, _ = put_together(
            [e for e in reply.events if e == "[DONE]" or e["choices"]]
        )
        chunks = [c for e in reply.events[:-1] for c in e["choices"]]
        ids = [id for chunk in chunks for id in chunk.get("token_ids", [])]
        usage = reply.events[-2]["usage"]
    else:
        (choice,) = reply.json["choices"]
        message, finish = parts_of(choice["message"]), choice["finish_reason"]
        ids, usage = choice["token_ids"], reply.json["usage"]
    assert (message, finish) == (expected, "stop")
    assert ids == [*thought[:6], *closing, *answer]
    assert usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens"] == len(first.prompt)
    assert usage["completion_tokens_details"]["reasoning_tokens"] >= 6


async def test_a_thinking_budget_that_is_not_used_up(web):
    seen = []
    think_long(web, seen)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    (choice,) = (await web.chat(max_thinking_tokens=500, **thinking)).json["choices"]
    assert len(seen) == 1
    assert choice["finish_reason"] == "stop"
    (choice,) = (await web.chat(max_thinking_tokens=6, max_tokens=7, **thinking)).json["choices"]
    assert len(seen) == 2, "no tokens are left for an answer"
    assert choice["finish_reason"] == "length"
    reply = await web.chat(max_thinking_tokens=6, logprobs=True)
    assert (reply.code, reply.param) == ("unsupported_parameter", "max_thinking_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["max_tokens", "context"])
async def test_a_thinking_budget_with_no_room_for_an_answer(web, limit, stream):
    seen = []
    thought, _ = think_long(web, seen)
    tokenizer = web.pipeline.tokenizer
    closing = len(tokenizer.ids("\n</think>\n\n"))
    fields = {
        "chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 6,
        "return_token_ids": True, "stream": stream,
    }  # fmt: skip
    for room in (0, 1):  # for an answer
        words = "Hi"
        if limit == "max_tokens":
            fields["max_tokens"] = 6 + closing + room
        else:
            await web.chat(words, max_thinking_tokens=None, **thinking())
            short = len(seen[-1].prompt)
            words = "Hi" + "!" * (web.app.handlers._model.context - short - 6 - closing - room)
        seen.clear()
        reply = await web.chat(words, **fields)
        assert reply.status == 200
        assert len(seen) == 1 + room
        if stream:
            message, finish, _ = put_together(reply.events)
            chunks = [choice for event in reply.events[:-1] for choice in event["choices"]]
            ids = [id for chunk in chunks for id in chunk.get("token_ids", [])]
        else:
            (choice,) = reply.json["choices"]
            message, finish = parts_of(choice["message"]), choice["finish_reason"]
            ids = choice["token_ids"]
        assert message["reasoning"] == tokenizer.library.decode(thought[:6])
        assert bool(message["content"]) == bool(room)
        assert ids[:6] == thought[:6]
        if not room:
            assert (len(ids), finish) == (6, "length")
        elif limit == "max_tokens":
            assert len(ids) == fields["max_tokens"]


def thinking():
    return {"chat_template_kwargs": {"enable_thinking": True}}


async def test_after_the_reasoning_the_answer_needs_fewer_tokens_and_no_logprobs_of_the_prompt(web):
    seen = []
    think_long(web, seen)
    closing = len(web.pipeline.tokenizer.ids("\n</think>\n\n"))
    for least, left in ((6 + closing + 5, 5), (4, 0)):
        fields = {"min_tokens": least, "prompt_logprobs": 1, "max_thinking_tokens": 6}
        await web.chat(max_tokens=90, **fields, **thinking())
        first, second = (work.sampling for work in seen[-2:])
        assert (first.min_tokens, first.prompt_logprobs) == (least, 1)
        assert (second.min_tokens, second.prompt_logprobs) == (left, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_in_the_marker_that_ends_the_reasoning(web, stream):
    seen = []
    think_long(web, seen)
    reply = await web.chat(n=2, max_thinking_tokens=6, stop="\n\n", stream=stream, **thinking())
    assert reply.status == 200
    if stream:
        assert [put_together(reply.events, i)[1] for i in (0, 1)] == ["stop"] * 2
    else:
        assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["stop"] * 2
    assert len(seen) == 2, "no choice goes on"


async def test_a_thinking_budget_for_several_choices(web):
    seen = []
    think_long(web, seen)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 3}
    choices = (await web.chat(n=2, **thinking)).json["choices"]
    assert [parts_of(c["message"])["content"] for c in choices] == ["The answer."] * 2
    assert len(seen) == 4
    assert len({work.sampling.seed for work in seen}) == 4


# --- the shape of streams


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_finish_reason_is_on_the_last_text(open_site, path):
    async with open_site() as web:
        fields = {"model": "tiny", "stream": True, "max_tokens": 3}
        fields |= {"prompt": "Hi"} if "chat" not in path else {"messages": MODEL["messages"]}
        events = (await web.ask(path, fields)).events[:-1]
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
        last = events[-1]["choices"][0]
        assert last["finish_reason"] == "length"
        assert last["text"] if "text" in last else last["delta"]["content"]
        assert len(events) == 3 + ("chat" in path)
        say(web, "Hi")
        last = (await web.ask(path, fields)).events[-2]["choices"][0]
        assert last["finish_reason"] == "stop"
        assert last["text"] == "" if "text" in last else last["delta"] == {}


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"tools": [WEATHER]}])
async def test_usage_in_every_chunk(web, fields):
    said = say(web, "Hello there, world")
    n = fields.get("n", 1)
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = (await web.chat(stream=True, stream_options=options, **fields)).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] <= n
    assert counts[-1] == n * len(said)
    assert events[-1]["choices"] == []
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    options = {"continuous_usage_stats": True}
    events = (await web.chat(stream=True, stream_options=options, **fields)).events[:-1]
    assert events[-1]["choices"]
    assert all("usage" in event for event in events)


async def test_usage_by_kind_of_media(web, monkeypatch):
    def picture(n):
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,AAA{n}"}}

    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    spans = [MediaSpan(b"a", 1, 10), MediaSpan(b"b", 11, 30), MediaSpan(b"c", 41, 5)]

    async def tokens(work, deliver):
        told = tuple(spans[: len(work.media)]) if reported else ()
        deliver(Delta((5,), "stop", (), PromptInfo(60, 2, None, told)))
        return {}

    web.pipeline._tokens = tokens
    for reported in (True, False):
        reply = await web.chat([picture("A"), video, picture("B"), {"type": "text", "text": "?"}])
        details = reply.json["usage"]["prompt_tokens_details"]
        expected = {"image_tokens": 15, "video_tokens": 30} if reported else {}
        assert details == {"cached_tokens": 2} | expected
    assert (await web.chat("Hi")).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
