"""Renders the turns of a chat to the text format that a model was trained on.

``ChatTemplate`` is the model's own, in Jinja; ``PromptTemplate`` is the operator's, with a slot.
Both only write text: ``processor`` handles ids, placeholders and control tokens that users type.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from msgspec import Struct

from triptych.checkpoint import read_json
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedModel
from triptych.messages import MediaKind

SLOT = "<prompt>"
_PROBE = "triptychprobe"

TemplateMessage = dict[str, Any]


class ChatTemplate:
    """A compiled chat template, and which forms of content it renders."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedModel(
                f"the model's chat template has an error in line {error.lineno}: {error.message}. "
                "Correct it, or give --prompt-template."
            ) from None
        # Jinja would merge these again for every rendering, which takes as long as the rest.
        self._known = {
            **self._template.globals,
            **names,  # bos_token, eos_token ...
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        self.takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self.takes_text = self._shows(_PROBE) or not self.takes_parts

    def render(self, messages: Sequence[TemplateMessage]) -> str:
        try:
            known = {**self._known, "messages": messages}
            template = self._template
            context = _ENVIRONMENT.context_class(
                _ENVIRONMENT, known, template.name, template.blocks
            )
            return "".join(template.root_render_func(context))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidValue(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None

    def _shows(self, content: Any) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}])
        except InvalidValue:
            return False
        return _PROBE in text and "'type'" not in text  # not a list that was printed


class PlaceholderText(Struct, frozen=True):
    """How one kind of media is written: its placeholder, without and with the tokens around it."""

    word: str
    whole: str
    many: str  # the plural of the kind


class PromptTemplate:
    """One turn with a slot, such as ``USER: <image>\\n<prompt> ASSISTANT:``.

    The text of the one user turn goes into the slot. A system message or a second turn has no place
    in it: chats with those are refused. A placeholder (with its frame and one line break after it)
    is dropped when there is nothing of its kind and repeated when there are several; those of kinds
    that the template does not name go before the slot.
    """

    def __init__(self, source: str, units: Mapping[MediaKind, PlaceholderText]) -> None:
        if source.count(SLOT) != 1:
            raise InvalidConfig(
                f"--prompt-template must have the slot {SLOT} once, but '{source}' has it "
                f"{source.count(SLOT)} times. Write for example 'USER: {SLOT} ASSISTANT:'."
            )
        self._before, self._after = source.split(SLOT)
        self._units = units
        self._named = {kind: source.count(unit.word) for kind, unit in units.items()}

    def render(self, text: str, kinds: Sequence[MediaKind]) -> str:
        """``kinds``: of the request's media, in their order."""
        sides = (self._before, self._after)
        for kind, named in self._named.items():
            if named and (count := kinds.count(kind)) != named:
                sides = self._fitted(sides, kind, named, count)
        free = "".join(f"{self._units[kind].whole}\n" for kind in kinds if not self._named[kind])
        return f"{sides[0]}{free}{text}{sides[1]}"

    def _fitted(
        self, sides: tuple[str, str], kind: MediaKind, named: int, count: int
    ) -> tuple[str, str]:
        unit = self._units[kind]
        if named > 1 and count:
            raise InvalidValue(
                f"The server's prompt template takes {named} {unit.many}, but the request has "
                f"{count}.",
                param="messages",
            )
        pattern = rf"(?:{re.escape(unit.whole)}|{re.escape(unit.word)})\n?"
        before, after = (re.sub(pattern, lambda one: one[0] * count, side) for side in sides)
        return before, after


def read_template(folder: Path) -> str | None:
    """The chat template of a checkpoint folder, from whichever file it is in."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnsupportedModel(f"{file} is not UTF-8: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several with names
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        if isinstance(found, str):
            return found
    return None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their names in templates: bos_token, eos_token ..."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_json(folder / file).items():
            if isinstance(value, dict):
                value = value.get("content")
            if name.endswith("_token") and isinstance(value, str):
                names[name] = value
    return names


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model is trained on: only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


_ENVIRONMENT = _environment()
