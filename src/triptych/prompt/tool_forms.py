"""How a chat template writes tools, the calls of earlier turns and their results.

Templates differ: some know no tools, some take the arguments of a call as an object and others as
text, some accept only short ids. Rendering a probe shows what a template does. Knows no request.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence

from msgspec import Struct

from triptych.errors import InvalidValue
from triptych.prompt.template import ChatTemplate, TemplateMessage

_TOOL = "triptychtool"
_CALL = "triptychcall"
_ARGUMENT = "triptychargument"
_RESULT = "triptychresult"
_LONG_ID = "call_0123456789abcdef"
_SHORT_ID = "abcdef012"  # 9 letters and digits, the only ids that Mistral's templates take
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


class ToolForms(Struct, frozen=True):
    """What a chat template does with tools."""

    describes: bool = False  # it writes the tools of a request
    calls: bool = False  # it writes the calls of an assistant's turn,
    text_arguments: bool = False  # whose arguments it takes as text, not as an object,
    short_ids: bool = False  # and whose ids it takes only if they have 9 letters and digits
    results: bool = False  # it writes turns of tools,
    result_parts: bool = False  # with a list of parts as their content,
    result_text: bool = True  # or with a string

    def id(self, given: str) -> str:
        """The id of a call as the template takes it; the same for the same id."""
        if not self.short_ids or (len(given) == len(_SHORT_ID) and given.isalnum()):
            return given
        return hashlib.blake2b(given.encode()).hexdigest()[: len(_SHORT_ID)]


def find_tool_forms(template: ChatTemplate) -> ToolForms:
    """Try what the template does with tools, calls and results."""
    describes = _TOOL in _rendered(template, [_user(template)])
    for short_ids, text_arguments in itertools.product((False, True), repeat=2):
        chat = [_user(template), *_call(short_ids, text_arguments)]
        if not _shows_call(_rendered(template, chat)):
            continue
        id = _SHORT_ID if short_ids else _LONG_ID
        result_text, result_parts = (
            _shows_result(_rendered(template, [*chat, _result(id, content)]))
            for content in (_RESULT, [_text(_RESULT)])
        )
        return ToolForms(
            describes,
            True,
            text_arguments,
            short_ids,
            result_text or result_parts,
            result_parts,
            result_text or not result_parts,
        )
    return ToolForms(describes)


def _shows_call(text: str) -> bool:
    return _CALL in text and _ARGUMENT in text and f"{{'{_ARGUMENT}'" not in text  # not a repr


def _shows_result(text: str) -> bool:
    return _RESULT in text and '"type": "text"' not in text.replace("'", '"')  # not a printed list


def _user(template: ChatTemplate) -> TemplateMessage:
    return {"role": "user", "content": "a" if template.takes_text else [_text("a")]}


def _call(short_ids: bool, text_arguments: bool) -> list[TemplateMessage]:
    arguments = {_ARGUMENT: "a"}
    call = {
        "id": _SHORT_ID if short_ids else _LONG_ID,
        "type": "function",
        "function": {
            "name": _CALL,
            "arguments": json.dumps(arguments) if text_arguments else arguments,
        },
    }
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


def _result(id: str, content: str | list[dict[str, str]]) -> TemplateMessage:
    return {"role": "tool", "content": content, "tool_call_id": id, "name": _CALL}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _rendered(template: ChatTemplate, messages: Sequence[TemplateMessage]) -> str:
    """Empty if the template refuses the messages."""
    try:
        return template.render(messages, {"tools": _TOOLS})
    except InvalidValue:
        return ""
