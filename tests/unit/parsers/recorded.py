"""Outputs as the families write them, after their published chat templates, and what they hold.

Arguments are compared as JSON values, except where a test says otherwise.
"""

from typing import Any, NamedTuple

from triptych.parsers.base import KnownFunctions


class Recorded(NamedTuple):
    family: str
    tool: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str | None = None
    inside: bool = False  # the prompt opened the reasoning


FUNCTIONS: KnownFunctions = {
    "get_weather": frozenset({"city", "unit"}),
    "click": frozenset(),
    "write_file": frozenset({"path", "text"}),
    "now": frozenset(),
}
TEXT = 'a "quoted" <b>\\n</b>\n\tline two, 世界 \N{CAT FACE}\n'
WEATHER = ("get_weather", {"city": "Paris", "unit": "celsius"})
CLICK = ("click", {"x": 10, "y": -2.5e1, "keys": ["ctrl", None, True], "how": {"double": False}})

RECORDED = [
    Recorded(
        "hermes",
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris", "unit": "celsius"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "click", "arguments": {"x": 10, "y": -2.5e1, "keys": ["ctrl", null, true], '
        '"how": {"double": false}}}\n</tool_call>',
        [WEATHER, CLICK],
        "Let me look.\n",
    ),
    Recorded(
        "qwen3",
        "hermes",
        "<think>\nThe user asks\n\nabout the weather.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
        [WEATHER],
        reasoning="The user asks\n\nabout the weather.",
        reasoning_parser="think",
    ),
    Recorded(
        "qwen3-coder",
        "qwen-coder",
        "I write it.\n<tool_call>\n<function=write_file>\n<parameter=path>\n123\n</parameter>\n"
        f"<parameter=text>\n{TEXT}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=click>\n<parameter=x>\n10\n</parameter>\n<parameter=y>\n-2.5e1\n</parameter>\n"
        '<parameter=keys>\n["ctrl", null, true]\n</parameter>\n<parameter=how>\n'
        '{"double": false}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n'
        "</function>\n</tool_call>",
        [("write_file", {"path": "123", "text": TEXT}), CLICK, ("now", {})],
        "I write it.\n",
    ),
    Recorded(
        "llama-3.1",
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}'
        '; {"name": "now", "parameters": {}}',
        [WEATHER, ("now", {})],
    ),
    Recorded(
        "llama-3.2",
        "llama",
        '{"type": "function", "name": "click", "parameters": {"x": 10, "y": -2.5e1, '
        '"keys": ["ctrl", null, true], "how": {"double": false}}}',
        [CLICK],
    ),
    Recorded(
        "llama-4-json",
        "llama",
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
        [("now", {})],
    ),
    Recorded(
        "llama-4",
        "pythonic",
        "<|python_start|>[get_weather(city=\"Paris\", unit='celsius'), click(x=10, y=-2.5e1, "
        "keys=['ctrl', None, True,], how={'double': False}), now()]<|python_end|>",
        [WEATHER, CLICK, ("now", {})],
    ),
    Recorded(
        "lfm2",
        "pythonic",
        "<|tool_call_start|>[get_weather(city='Paris', unit='celsius')]<|tool_call_end|>"
        "Checking the weather.",
        [WEATHER],
        "Checking the weather.",
    ),
    Recorded(
        "llama-3.2-pythonic",
        "pythonic",
        "[write_file(path='123', text="
        "'a \"quoted\" <b>\\\\n</b>\\n\\tline two, \\u4e16界 \\U0001F431\\n')]",
        [("write_file", {"path": "123", "text": TEXT})],
    ),
    Recorded(
        "mistral-v3",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}, '
        '"id": "bbc5b7ede"}, {"name": "now", "arguments": {}, "id": "0UAqFzWsD"}]',
        [WEATHER, ("now", {})],
    ),
    Recorded(
        "mistral-v11",
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]bbc5b7ede[ARGS]{"city": "Paris", "unit": "celsius"}'
        "[TOOL_CALLS]now[ARGS]{}",
        [WEATHER, ("now", {})],
    ),
    Recorded(
        "magistral",
        "mistral",
        "[THINK]Weather is asked for.[/THINK]I ask.[TOOL_CALLS]get_weather[ARGS]"
        '{"city": "Paris", "unit": "celsius"}',
        [WEATHER],
        "I ask.",
        "Weather is asked for.",
        "mistral",
    ),
    Recorded(
        "deepseek-r1",
        "deepseek",
        "I need the weather.\n</think>\n\nOne moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris", "unit": "celsius"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("now", {})],
        "One moment.",
        "I need the weather.",
        "think",
        True,
    ),
    Recorded(
        "deepseek-v3.1",
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", '
        '"unit": "celsius"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("now", {})],
    ),
    Recorded(
        "glm-4.5",
        "glm",
        "\n<think>Write, then click.</think>\nDoing it.\n<tool_call>write_file\n"
        "<arg_key>path</arg_key>\n<arg_value>123</arg_value>\n<arg_key>text</arg_key>\n"
        f"<arg_value>{TEXT}</arg_value>\n</tool_call>\n<tool_call>click\n<arg_key>x</arg_key>\n"
        "<arg_value>10</arg_value>\n<arg_key>y</arg_key>\n<arg_value>-2.5e1</arg_value>\n"
        '<arg_key>keys</arg_key>\n<arg_value>["ctrl", null, true]</arg_value>\n'
        '<arg_key>how</arg_key>\n<arg_value>{"double": false}</arg_value>\n</tool_call>',
        [("write_file", {"path": "123", "text": TEXT}), CLICK],
        "Doing it.\n",
        "Write, then click.",
        "think",
    ),
    Recorded(
        "glm-4.7",
        "glm",
        "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value><arg_key>unit</arg_key><arg_value>celsius</arg_value>"
        "</tool_call>",
        [("now", {}), WEATHER],
    ),
    Recorded(
        "plain",
        "json",
        '[{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}},\n'
        ' {"arguments": {}, "name": "now"}]\n',
        [WEATHER, ("now", {})],
    ),
    Recorded(
        "kimi-vl",
        "json",
        '◁think▷Now?◁/think▷{"name": "now", "arguments": {}}',
        [("now", {})],
        reasoning="Now?",
        reasoning_parser="kimi",
    ),
]
