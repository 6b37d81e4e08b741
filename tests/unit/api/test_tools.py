"""Tools in requests: what is accepted, what is refused and where, and the grammar of a call."""

import json
import sys

import msgspec
import pytest

from support.templates import template
from triptych.api import requests
from triptych.api.content import MediaPolicy
from triptych.api.requests import (
    MAX_CALL_VALUES,
    MAX_VARIABLE_BYTES,
    ChatMessage,
    ChatRequest,
    to_turns,
    tool_use,
)
from triptych.api.tools import FunctionDefinition, ToolUse, check_depth, json_size
from triptych.config import Limits
from triptych.errors import InvalidValue

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def web(open_site):
    async with open_site(chat_template=str(template("hermes")), limits=Limits(tools=3)) as running:
        yield running


def prompt_of(web):
    decode = web.pipeline.tokenizer.library.decode
    return decode(web.pipeline.works[-1].prompt, skip_special_tokens=False)


def function(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


BAD = [
    ({"tools": [{}]}, "tools[0].function"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [function(name=None)]}, "tools[0].function.name"),
    ({"tools": [function(name="")]}, "tools[0].function.name"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name"),
    ({"tools": [function(name="a" * 129)]}, "tools[0].function.name"),
    ({"tools": [CLOCK, WEATHER, CLOCK]}, "tools[2].function.name"),
    ({"tools": [function(name=f"f{i}") for i in range(4)]}, "tools"),
    ({"tools": [function(description="a" * (600 << 10))]}, "tools"),
    ({"tools": [function(description=3)]}, "tools[0].function.description"),
    ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
    (
        {"tools": [function(parameters={"properties": []})]},
        "tools[0].function.parameters.properties",
    ),
    (
        {"tools": [function(parameters={"properties": {"a": 1}})]},
        "tools[0].function.parameters.properties",
    ),
    ({"tools": [function(parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
    ({"tools": [function(parameters=deep(40))]}, "tools[0].function.parameters"),
    ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [CLOCK], "functions": [{"name": "f"}]}, "functions"),
    ({"functions": [{}]}, "functions[0].name"),
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "b" * 20000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": deep(40)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"max_thinking_tokens": 0}, "max_thinking_tokens"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}},
     "stream_options.continuous_usage_stats"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]},
     "messages[1].tool_calls[0].function"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"type": "x", "function": {}}]}]},
     "messages[1].tool_calls[0].type"),
    ({"messages": [*HI, {"role": "tool"}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "tool", "content": "a", "tool_call_id": 1}]},
     "messages[1].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[json.dumps(f)[:60] for f, _ in BAD])
async def test_b53_bad_fields_are_named(web, fields, param):
    reply = await web.chat(**fields)
    assert (reply.status, reply.code, reply.param) == (400, "invalid_value", param)
    assert "`" not in reply.json["error"]["message"]
    assert web.pipeline.works == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"functions": [], "function_call": "auto"},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"reasoning_effort": "high"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
async def test_without_tools_the_prompt_is_plain(web, fields):
    await web.chat(max_tokens=1)
    plain = prompt_of(web)
    assert (await web.chat(max_tokens=1, **fields)).status == 200
    assert prompt_of(web) == plain
    assert web.pipeline.works[-1].sampling.grammar is None


async def test_tools_are_rendered(web):
    extra = WEATHER | {"cache_control": {"type": "ephemeral"}}
    assert (await web.chat(max_tokens=1, tools=[extra, CLOCK])).status == 200
    text = prompt_of(web)
    assert json.dumps(WEATHER) in text
    assert '{"name": "clock", "parameters": {"type": "object", "properties": {}}}' in text
    older = {"functions": [WEATHER["function"]], "function_call": "auto"}
    assert (await web.chat(max_tokens=1, **older)).status == 200
    assert json.dumps(WEATHER) in prompt_of(web)


async def test_tool_turns_are_rendered(web):
    call = {"id": "call_9", "type": "function", "function": {"name": "weather"}}
    call["function"]["arguments"] = '{"city": "Rome"}'
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "call_9"},
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "weather", "content": "cloudy"},
    ]
    assert (await web.chat(max_tokens=1, messages=messages)).status == 200
    text = prompt_of(web)
    assert text.count('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}') == 2
    assert "<tool_response>sunny</tool_response>" in text
    assert "<tool_response>cloudy</tool_response>" in text


async def test_what_clients_send_back_is_ignored(web):
    answer = {
        "role": "assistant", "content": "Yes", "refusal": None, "annotations": [{"type": "x"}],
        "provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "id": "msg_1",
        "tool_calls": [], "function_call": None, "audio": None, "cache_control": {"type": "x"},
        "name": "bot", "colour": "red",
    }  # fmt: skip
    assert (await web.chat(max_tokens=1, messages=[*HI, answer, *HI])).status == 200
    seen = prompt_of(web)
    plain = {"role": "assistant", "content": "Yes"}
    assert (await web.chat(max_tokens=1, messages=[*HI, plain, *HI])).status == 200
    assert prompt_of(web) == seen


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_reasoning_of_earlier_turns(web, key):
    answer = {"role": "assistant", "content": "Yes", key: "I think"}
    assert (await web.chat(max_tokens=1, messages=[*HI, answer, *HI])).status == 200
    assert "<think>\nI think\n</think>\n\nYes" in prompt_of(web)


async def test_the_last_message_is_continued(web):
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    reply = await web.chat(messages=messages, **both)
    assert reply.param == "continue_final_message"
    for add in (None, False):
        both["add_generation_prompt"] = add
        assert (await web.chat(max_tokens=1, messages=messages, **both)).status == 200
        assert prompt_of(web).endswith("assistant\nOnce upon")
    reply = await web.ask("/tokenize", {"messages": messages, "continue_final_message": True})
    assert tuple(reply.json["tokens"]) == web.pipeline.works[-1].prompt


async def test_tokenize_counts_tools(web):
    fields = {"messages": HI, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    tokens = (await web.ask("/tokenize", fields)).json["tokens"]
    assert (await web.chat(max_tokens=1, **fields)).status == 200
    assert tuple(tokens) == web.pipeline.works[-1].prompt


async def test_reasoning_effort_reaches_templates_that_use_it(open_site, tmp_path):
    file = tmp_path / "effort.jinja"
    file.write_text("{{ reasoning_effort }} {{ messages[0].content }}")
    async with open_site(chat_template=str(file)) as web:
        await web.chat(max_tokens=1, reasoning_effort="low")
        assert prompt_of(web) == "low Hi"
        await web.chat(max_tokens=1, chat_template_kwargs={"reasoning_effort": "high"})
        assert prompt_of(web) == "high Hi"


async def test_b53_a_template_without_tools(open_site):
    async with open_site() as web:
        reply = await web.chat(tools=[WEATHER])
        assert (reply.status, reply.code, reply.param) == (400, "unsupported_parameter", "tools")
        assert "--chat-template" in reply.json["error"]["message"]
        for choice in ("required", NAMED):
            assert (await web.chat(max_tokens=1, tools=[WEATHER], tool_choice=choice)).status == 200
            assert web.pipeline.works[-1].sampling.grammar is not None


async def test_a_server_without_a_tool_parser(open_site):
    file = str(template("hermes"))
    async with open_site(chat_template=file, tool_parser="none") as web:
        reply = await web.chat(tools=[WEATHER])
        assert (reply.code, reply.param) == ("unsupported_parameter", "tools")
        assert "--tool-parser" in reply.json["error"]["message"]


# --- grammars


def use_of(**fields):
    request = msgspec.convert({"model": "m", "messages": HI} | fields, ChatRequest)
    return tool_use(request, Limits())


def schema_of(use):
    assert use.grammar.kind == "json"
    return json.loads(use.grammar.text)


def test_a_named_tool_is_held_by_its_schema():
    use = use_of(tools=[WEATHER, CLOCK], tool_choice=NAMED)
    assert schema_of(use) == CITY
    named = {"type": "function", "function": {"name": "clock"}}
    assert schema_of(use_of(tools=[WEATHER, CLOCK], tool_choice=named)) == {
        "type": "object",
        "properties": {},
    }
    older = use_of(functions=[WEATHER["function"]], function_call={"name": "weather"})
    assert schema_of(older) == CITY
    assert older.older


def test_a_required_call_is_held_by_a_list_of_calls():
    schema = schema_of(use_of(tools=[WEATHER, CLOCK], tool_choice="required"))
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["weather", "clock"]
    assert schema["$defs"]["0"] == CITY
    one = schema_of(use_of(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False))
    assert one["maxItems"] == 1
    assert one["items"]["properties"]["parameters"] == {"$ref": "#/$defs/0"}


def test_arguments_are_an_object_though_their_schema_has_no_type():
    """Without a type, true and null would follow the schema too."""
    parameters = {"properties": {"city": {"type": "string"}}}
    function = FunctionDefinition("weather", None, parameters)
    held = {"type": "object"} | parameters
    assert schema_of(ToolUse((function,), named="weather")) == held
    assert schema_of(ToolUse((function,), required=True))["$defs"]["0"] == held
    assert ToolUse((function,)).rendered()[0]["function"]["parameters"] == parameters


def test_references_in_schemas_still_hold_in_a_list_of_calls():
    tree = {
        "type": "object",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
    }
    use = ToolUse((FunctionDefinition("tree", None, tree),), required=True)
    moved = schema_of(use)["$defs"]["0"]
    assert moved["properties"]["root"] == {"$ref": "#/$defs/0/$defs/node"}
    assert moved["properties"]["self"] == {"$ref": "#/$defs/0"}
    assert moved["$defs"]["node"]["properties"]["next"] == {"$ref": "#/$defs/0/$defs/node"}
    assert tree["properties"]["self"] == {"$ref": "#"}, "the request's own is unchanged"


def test_no_grammar_where_the_model_decides():
    assert use_of(tools=[WEATHER]).grammar is None
    assert use_of(functions=[WEATHER["function"]]).grammar is None


# --- earlier turns


def turns_of(*messages):
    typed = msgspec.convert(list(messages), list[ChatMessage])
    return to_turns(typed, {}, MediaPolicy(True, 4))


@pytest.mark.parametrize(
    ("arguments", "text", "parsed"),
    [
        ('{"a": 1}', '{"a": 1}', {"a": 1}),
        ({"a": 1}, '{"a":1}', {"a": 1}),
        (None, "{}", {}),
        ("", "{}", {}),
        ("{broken", "{broken", None),
        ("[1]", "[1]", None),
        ("[" * 3000, "[" * 3000, None),
    ],
)
def test_arguments_of_earlier_calls(arguments, text, parsed):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    (turn,) = turns_of({"role": "assistant", "tool_calls": [call]})
    (earlier,) = turn.details.calls
    assert (earlier.id, earlier.name, earlier.arguments) == ("c", "f", text)
    assert earlier.parsed == parsed
    assert turn.content == ""


def test_b53_arguments_that_are_nested_too_deep():
    call = {"function": {"name": "f", "arguments": json.dumps(deep(40))}}
    with pytest.raises(InvalidValue) as error:
        turns_of({"role": "assistant", "tool_calls": [call]})
    assert error.value.param == "messages[0].tool_calls[0]"


@pytest.mark.parametrize("form", [json.dumps, lambda arguments: arguments])
def test_the_values_of_all_earlier_calls_are_counted(form):
    """Each is visited several times while other requests wait."""

    def turns_with(values):
        call = {"function": {"name": "f", "arguments": form({"a": values})}}
        return turns_of(*[{"role": "assistant", "tool_calls": [call]}] * 2)

    assert len(turns_with([0] * (MAX_CALL_VALUES // 2 - 2))) == 2
    assert len(turns_with([[]] * (MAX_CALL_VALUES // 2 - 2))) == 2
    with pytest.raises(InvalidValue, match="more than 50000 values") as error:
        turns_with([0] * (MAX_CALL_VALUES // 2 - 1))
    assert error.value.param == "messages[1].tool_calls[0]"


def test_arguments_with_many_values_are_not_decoded(monkeypatch):
    monkeypatch.setattr(msgspec.json, "decode", None)
    call = {"function": {"name": "f", "arguments": '{"a": [' + "[]," * MAX_CALL_VALUES + "1]}"}}
    with pytest.raises(InvalidValue, match="more than 50000 values"):
        turns_of({"role": "assistant", "tool_calls": [call]})


def test_a_long_string_is_one_value():
    code = 'f([{"a": 1}, {"b": "\\"}])\n' * MAX_CALL_VALUES
    call = {"function": {"name": "f", "arguments": json.dumps({code: [code]})}}
    (turn,) = turns_of({"role": "assistant", "tool_calls": [call]})
    assert turn.details.calls[0].parsed == {code: [code]}


def test_calls_count_though_their_arguments_are_no_object():
    call = {"function": {"name": "f", "arguments": "[1]"}}
    with pytest.raises(InvalidValue, match="more than 50000 values"):
        turns_of({"role": "assistant", "tool_calls": [call] * (MAX_CALL_VALUES + 1)})


def test_the_visit_ends_where_there_are_too_many_values():
    assert check_depth({"a": [0] * 9, "b": deep(40)}, "x", most=1) == 3
    with pytest.raises(InvalidValue, match="nested"):
        check_depth({"a": [0] * 9, "b": deep(40)}, "x", most=100)


def test_sizes_are_checked_before_each_value_is_visited():
    large = {"a": deep(40), "b": "c" * MAX_VARIABLE_BYTES}
    with pytest.raises(InvalidValue, match="bytes as JSON"):
        requests._check_variables(large)


def test_a_value_that_is_too_deep_for_the_encoder():
    with pytest.raises(InvalidValue, match="nested") as error:
        json_size(deep(sys.getrecursionlimit()), "x")
    assert error.value.param == "x"


def test_results_get_the_name_of_their_function():
    calls = [{"id": id, "function": {"name": f"f{id}"}} for id in "ab"]
    turns = turns_of(
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b", "name": "mine"},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "4", "name": "Ada"},
        {"role": "user", "content": "5"},
    )
    names = [turn.details and turn.details.name for turn in turns[1:]]
    assert names == ["fa", "mine", "", "Ada", None]
