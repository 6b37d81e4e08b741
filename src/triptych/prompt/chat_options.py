"""What a chat has besides roles and contents: tools, calls, names, and variables of the template.

Plain values. ``processor`` gives them to the model's chat template, in which they stay text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from triptych.prompt.template import TemplateMessage
from triptych.prompt.tool_forms import ToolForms

Safe = Callable[[str], str]  # keeps a text from becoming a control token


class EarlierCall(Struct, frozen=True):
    """A tool call of an earlier turn of the assistant."""

    id: str
    name: str
    arguments: str  # JSON
    parsed: dict[str, Any] | None  # None: what the model wrote is not an object


class TurnDetails(Struct, frozen=True):
    """What a turn has besides its role and content."""

    name: str = ""  # of the speaker, or of the function whose result this is
    calls: tuple[EarlierCall, ...] = ()
    call_id: str = ""  # of the call whose result this is
    reasoning: str = ""  # of an earlier turn

    def strings(self) -> Iterator[str]:
        """All that the client wrote."""
        yield from (self.name, self.call_id, self.reasoning)
        for call in self.calls:
            yield from (call.id, call.name, call.arguments)
            yield from strings_in(call.parsed)

    def write(self, message: TemplateMessage, forms: ToolForms, safe: Safe) -> None:
        """Add the details to a message of the template. ``safe`` is called for every string."""
        if self.name:
            message["name"] = safe(self.name)
        if self.calls:
            message["tool_calls"] = [_call(call, forms, safe) for call in self.calls]
        if self.call_id:
            message["tool_call_id"] = forms.id(safe(self.call_id))
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = safe(self.reasoning)


class ChatOptions(Struct, frozen=True):
    """What a chat template gets besides the turns."""

    tools: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    continue_last: bool = False  # end inside of the last turn, which the model continues

    def strings(self) -> Iterator[str]:
        yield from strings_in(self.tools)
        yield from strings_in(self.variables)

    def template_variables(self, safe: Safe) -> dict[str, Any]:
        """The variables of the template; of tools and values every string is ``safe``."""
        written: dict[str, Any] = {name: map_strings(v, safe) for name, v in self.variables.items()}
        if self.tools:
            written["tools"] = [map_strings(tool, safe) for tool in self.tools]
        written["add_generation_prompt"] = self.add_generation_prompt and not self.continue_last
        return written


def _call(call: EarlierCall, forms: ToolForms, safe: Safe) -> dict[str, Any]:
    arguments: Any = safe(call.arguments)
    if call.parsed is not None and not forms.text_arguments:
        arguments = map_strings(call.parsed, safe)
    function = {"name": safe(call.name), "arguments": arguments}
    return {"id": forms.id(safe(call.id)), "type": "function", "function": function}


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys too."""
    stack = [value]
    while stack:
        match stack.pop():
            case str() as text:
                yield text
            case dict() as members:
                stack += members
                stack += members.values()
            case list() | tuple() as items:
                stack += items


def map_strings(value: Any, change: Safe) -> Any:
    """A JSON value with all its strings changed, keys too. Callers limit its depth."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): map_strings(inner, change) for key, inner in value.items()}
        case list() | tuple():
            return [map_strings(inner, change) for inner in value]
    return value
