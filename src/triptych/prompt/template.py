"""Renders the turns of a chat to the text format that a model was trained on.

``ChatTemplate`` is the model's own, in Jinja; ``PromptTemplate`` is the operator's, with a slot.
Both only write text: ``processor`` handles ids, the placeholders of a request and control tokens
that users type. A model names one placeholder token for each kind of media that it takes; its chat
template may write another one (Llama 4's ``<|image|>``), with tokens around it. Rendering a probe
finds both (``find_placeholders``).
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from msgspec import Struct

from triptych.checkpoint import Model, read_json
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedModel
from triptych.messages import PLURALS, MediaKind
from triptych.prompt.tokenizer import Tokenizer

SLOT = "<prompt>"
_PROBE = "triptychprobe"
_AROUND: dict[MediaKind, str] = {"image": "vision", "video": "vision", "audio": "audio"}

TemplateMessage = dict[str, Any]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """A compiled chat template, and which forms of content it renders."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        self.source = source
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

    @property
    def reserved(self) -> frozenset[str]:
        """Names of variables that Triptych or Jinja sets itself."""
        return frozenset(("messages", *self._known))

    def render(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> str:
        """``variables``: further ones, such as tools; they replace those that are set already."""
        try:
            known = {**self._known, "messages": messages, **variables}
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


class Placeholder(Struct, frozen=True):
    """How one kind of media is written."""

    id: int  # the model's token, one of which stands for each item in a prompt
    word: str  # what a template writes for it,
    written: int  # and the token of that
    frame: tuple[str, str]  # tokens directly before and after it, as text
    part: dict[str, Any]  # of a message, for which a template writes it

    @property
    def whole(self) -> str:
        return f"{self.frame[0]}{self.word}{self.frame[1]}"


class PromptTemplate:
    """One turn with a slot, such as ``USER: <image>\\n<prompt> ASSISTANT:``.

    The text of the one user turn goes into the slot. A system message or a second turn has no place
    in it: chats with those are refused. A placeholder (with its frame and one line break after it)
    is dropped when there is nothing of its kind and repeated when there are several; those of kinds
    that the template does not name go before the slot.
    """

    def __init__(self, source: str, placeholders: Mapping[MediaKind, Placeholder]) -> None:
        if source.count(SLOT) != 1:
            raise InvalidConfig(
                f"--prompt-template must have the slot {SLOT} once, but '{source}' has it "
                f"{source.count(SLOT)} times. Write for example 'USER: {SLOT} ASSISTANT:'."
            )
        self._before, self._after = source.split(SLOT)
        self._places = placeholders
        self._named = {kind: source.count(place.word) for kind, place in placeholders.items()}

    def render(self, text: str, kinds: Sequence[MediaKind]) -> str:
        """``kinds``: of the request's media, in their order."""
        sides = (self._before, self._after)
        for kind, named in self._named.items():
            if named and (count := kinds.count(kind)) != named:
                sides = self._fitted(sides, kind, named, count)
        free = "".join(f"{self._places[kind].whole}\n" for kind in kinds if not self._named[kind])
        return f"{sides[0]}{free}{text}{sides[1]}"

    def _fitted(
        self, sides: tuple[str, str], kind: MediaKind, named: int, count: int
    ) -> tuple[str, str]:
        place = self._places[kind]
        if named > 1 and count:
            raise InvalidValue(
                f"The server's prompt template takes {named} {PLURALS[kind]}, but the request has "
                f"{count}.",
                param="messages",
            )
        pattern = rf"(?:{re.escape(place.whole)}|{re.escape(place.word)})\n?"
        before, after = (re.sub(pattern, lambda one: one[0] * count, side) for side in sides)
        return before, after


def find_placeholders(
    model: Model, tokenizer: Tokenizer, template: ChatTemplate | None
) -> dict[MediaKind, Placeholder]:
    """The placeholder of each kind that the model takes."""
    found: dict[MediaKind, Placeholder] = {}
    for kind, id in model.media_ids.items():
        word = tokenizer.token(id)
        if not word:
            raise UnsupportedModel(
                f"config.json says that {id} is the placeholder of {kind}, but the tokenizer has "
                "no such token"
            )
        probed = None
        if template is not None and template.takes_parts:
            probed = _probe(kind, id, word, tokenizer, template)
        found[kind] = probed or Placeholder(
            id, word, id, _configured(model, tokenizer, kind), {"type": kind}
        )
    return found


def _probe(
    kind: MediaKind, id: int, word: str, tokenizer: Tokenizer, template: ChatTemplate
) -> Placeholder | None:
    """What the template writes for a part of this kind; None if it writes nothing."""
    ids = {token.content: token.id for token in tokenizer.description.added_tokens}
    longest_first = sorted(ids, key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    probe = {"type": "text", "text": _PROBE}
    for part in ({"type": kind}, {"type": kind, kind: ""}, {"type": kind, f"{kind}_url": ""}):
        try:
            with_it, without = (
                template.render([{"role": "user", "content": content}])
                for content in ([part, probe], [probe])
            )
        except InvalidValue:
            continue
        new = Counter(control.findall(with_it)) - Counter(control.findall(without))
        if word in new:
            written = word
        elif len(new) == 1:
            (written,) = new
        else:
            continue
        frame = _frame(with_it, written, control, new)
        return Placeholder(id, written, ids[written], frame, part)
    return None


def _frame(text: str, word: str, control: re.Pattern[str], new: Counter[str]) -> tuple[str, str]:
    """The control tokens of a part directly before and after its placeholder."""
    at = text.index(word)
    before = [match[0] for match in control.finditer(text) if match.end() == at]
    after = control.match(text, at + len(word))
    return (
        next((found for found in before if found in new), ""),
        after[0] if after is not None and after[0] in new else "",
    )


def _configured(model: Model, tokenizer: Tokenizer, kind: MediaKind) -> tuple[str, str]:
    """The tokens around it that config.json names."""
    config = model.config.get("thinker_config") or model.config
    ids = (config.get(f"{_AROUND[kind]}_{side}_token_id") for side in ("start", "end"))
    before, after = ((tokenizer.token(id) or "") if isinstance(id, int) else "" for id in ids)
    return before, after


def read_template(folder: Path) -> str | None:
    """The chat template of a checkpoint folder, from whichever file it is in."""
    if (file := folder / "chat_template.jinja").is_file():
        return read_template_file(file)
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several with names
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        if isinstance(found, str):
            return found
    return None


def read_tool_template(folder: Path) -> str | None:
    """Another chat template of the folder, for requests with tools; nearly all have none."""
    if (file := folder / "additional_chat_templates" / "tool_use.jinja").is_file():
        return read_template_file(file)
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}.get("tool_use")
    return None


def read_template_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(f"{file} is not UTF-8: {error}") from None


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
