"""The tools of a chat request: functions that the model may call, and whether it must.

``ToolUse`` is what the rest needs to know of them: how they are rendered, which calls are known,
and the grammar of a call that the client demands. No function runs here: clients run them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from triptych.config import Limits
from triptych.errors import InvalidValue
from triptych.messages import Grammar
from triptych.parsers.base import KnownFunctions, string_parameters

MAX_DEPTH = 32  # of a schema, of the arguments of a call, of variables of a template
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class FunctionDefinition(Struct, frozen=True):
    """A function that the model may call. ``strict`` changes nothing: a call that the client
    demands always follows the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    """The one tool that the model must call."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool
FunctionChoice = Literal["none", "auto"] | FunctionName  # older, for ``functions``


class ToolRequest(Struct, frozen=True, kw_only=True):
    """The parameters of a chat that are about tools."""

    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: FunctionChoice | None = None


class ToolUse(Struct, frozen=True):
    """The functions that a model may call in one request."""

    functions: tuple[FunctionDefinition, ...]
    required: bool = False  # it must call one of them
    named: str = ""  # it must call this one
    parallel: bool = True  # it may call several
    older: bool = False  # the client asked with ``functions``, and is answered in that form

    @property
    def grammar(self) -> Grammar | None:
        """What the output must be where the client demands a call; None: any text."""
        if self.named:
            (schema,) = (_arguments_schema(f) for f in self.functions if f.name == self.named)
        elif self.required:
            schema = _calls_schema(self.functions, self.parallel)
        else:
            return None
        return Grammar("json", msgspec.json.encode(schema).decode())

    @property
    def known(self) -> KnownFunctions:
        """As parsers take them."""
        return {f.name: string_parameters(f.parameters or {}) for f in self.functions}

    def rendered(self) -> tuple[dict[str, Any], ...]:
        """The tools as chat templates take them."""
        return tuple({"type": "function", "function": _described(f)} for f in self.functions)


def to_tool_use(request: ToolRequest, limits: Limits) -> ToolUse | None:
    """The tools of a request, checked. None: it has none, or the model must not use them."""
    if request.functions:
        if request.tools:
            raise InvalidValue("'tools' replaces 'functions': give one.", param="functions")
        places = [f"functions[{i}]" for i in range(len(request.functions))]
        check_functions(request.functions, places, limits)
        return _by_function_call(request)
    functions = [tool.function for tool in request.tools or ()]
    check_functions(functions, [f"tools[{i}].function" for i in range(len(functions))], limits)
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        _check_known(choice.function.name, functions, "tool_choice.function.name")
        return ToolUse(tuple(functions), named=choice.function.name, parallel=False)
    if choice == "required" and not functions:
        raise InvalidValue(
            "tool_choice is 'required', but there are no tools.", param="tool_choice"
        )
    if not functions or choice == "none":
        return None
    parallel = request.parallel_tool_calls is not False
    return ToolUse(tuple(functions), required=choice == "required", parallel=parallel)


def _by_function_call(request: ToolRequest) -> ToolUse | None:
    """The older form: one call at most."""
    functions, choice = tuple(request.functions or ()), request.function_call
    if choice == "none":
        return None
    named = choice.name if isinstance(choice, FunctionName) else ""
    if named:
        _check_known(named, functions, "function_call.name")
    return ToolUse(functions, named=named, parallel=False, older=True)


def _check_known(name: str, functions: Sequence[FunctionDefinition], param: str) -> None:
    if not any(function.name == name for function in functions):
        raise InvalidValue("There is no tool of this name in the request.", param=param)


def check_functions(
    functions: Sequence[FunctionDefinition], params: Sequence[str], limits: Limits
) -> None:
    """Refuse what no model could call. ``params``: where each stands in the request."""
    if not functions:
        return
    param = params[0].partition("[")[0]
    if len(functions) > limits.tools:
        raise InvalidValue(
            f"The request has {len(functions)} tools; the limit is {limits.tools}.", param=param
        )
    if (size := json_size(functions, param)) > limits.tool_bytes:
        raise InvalidValue(
            f"The tools have {size} bytes as JSON; the limit is {limits.tool_bytes}.", param=param
        )
    names: set[str] = set()
    for function, place in zip(functions, params, strict=True):
        if not _NAME.fullmatch(function.name):
            raise InvalidValue(
                "The name of a function has 1 to 128 letters, digits, '_', '-' and '.'.",
                param=f"{place}.name",
            )
        if function.name in names:
            raise InvalidValue("Two tools have the same name.", param=f"{place}.name")
        names.add(function.name)
        if function.parameters is not None:
            _check_parameters(function.parameters, f"{place}.parameters")


def _check_parameters(schema: dict[str, Any], param: str) -> None:
    """A call has one argument, an object: the schema must describe one. Whether the rest is a valid
    schema shows where a grammar is made of it."""
    check_depth(schema, param)
    if schema.get("type", "object") != "object":
        raise InvalidValue(
            'The parameters of a function are an object: write "type": "object".',
            param=f"{param}.type",
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(inner, dict | bool) for inner in properties.values()
    ):
        raise InvalidValue(
            "'properties' is an object with a JSON schema for each name.",
            param=f"{param}.properties",
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidValue("'required' is a list of names.", param=f"{param}.required")


def json_size(value: Any, param: str) -> int:
    """The bytes of a value as JSON. Fast: it comes before checks that visit each value in it."""
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        raise _too_deep(param) from None


def check_depth(value: Any, param: str, most: int | None = None) -> int:
    """Refuse deeply nested values: templates and grammars read them recursively.

    Returns how many values there are, or where there are more than ``most``, a number above it.
    """
    stack = [(value, 1)]
    count = 1
    while stack:
        inner, depth = stack.pop()
        if isinstance(inner, dict | list):
            if depth > MAX_DEPTH:
                raise _too_deep(param)
            count += len(inner)
            if most is not None and count > most:
                return count
            inner = inner.values() if isinstance(inner, dict) else inner
            stack += [(one, depth + 1) for one in inner]
    return count


def _too_deep(param: str) -> InvalidValue:
    return InvalidValue(f"This is nested more than {MAX_DEPTH} deep.", param=param)


def _described(function: FunctionDefinition) -> dict[str, Any]:
    """In the order in which models have read them in training; what is absent stays absent."""
    written: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        written["description"] = function.description
    written["parameters"] = _schema(function)
    return written


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Of a grammar: a schema without a type would permit true or null, which are no arguments."""
    return {"type": "object"} | _schema(function)


def _calls_schema(functions: Sequence[FunctionDefinition], parallel: bool) -> dict[str, Any]:
    """A list of calls. Each function's schema stands among the definitions, where its own
    references can point to."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "parameters": {"$ref": f"#/$defs/{i}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {
            str(i): _moved(_arguments_schema(function), f"#/$defs/{i}")
            for i, function in enumerate(functions)
        },
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, root: str) -> Any:
    """The schema with references to itself that hold where it stands now."""
    if isinstance(schema, list):
        return [_moved(inner, root) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + inner[1:]
        if name == "$ref" and isinstance(inner, str) and inner.startswith("#")
        else _moved(inner, root)
        for name, inner in schema.items()
    }
