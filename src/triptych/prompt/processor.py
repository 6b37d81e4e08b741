"""Chat turns or text to a Prompt: token ids with one placeholder for each media item.

Passes on the sources of media as they are: it fetches and reads nothing. Callers check whether
media are allowed, and whether prompt and answer together fit the context.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedModel, UnsupportedParameter
from triptych.messages import PLURALS, MediaForm, MediaKind
from triptych.prompt.chat_options import ChatOptions, TurnDetails
from triptych.prompt.control_tokens import ControlTokenEscaper
from triptych.prompt.template import (
    ChatTemplate,
    PromptTemplate,
    TemplateMessage,
    find_placeholders,
    read_special_tokens,
    read_template,
    read_template_file,
    read_tool_template,
)
from triptych.prompt.tokenizer import Tokenizer
from triptych.prompt.tool_forms import ToolForms, find_tool_forms

ChatRole = Literal["system", "user", "assistant", "tool"]
TURN_CHARACTERS = 16  # rendering a turn takes as long as encoding these
ROLES = frozenset(("system", "user", "assistant", "tool"))
_ITEM = re.compile(r"media\[(\d+)\]")

MediaSource = bytes | memoryview | str


class TextPart(Struct, frozen=True):
    text: str


class MediaPart(Struct, frozen=True):
    """An image, a video or a sound: its bytes, or the URL to load them from."""

    kind: MediaKind
    form: MediaForm
    source: MediaSource


PromptPart = TextPart | MediaPart


class ChatTurn(Struct, frozen=True):
    """One message of a chat."""

    role: ChatRole
    content: str | tuple[PromptPart, ...]
    details: TurnDetails | None = None


class PlacedMedia(Struct, frozen=True):
    """A media part, and where it belongs in prompt and request."""

    part: MediaPart
    at: int  # index of its placeholder among the ids
    place: str  # in the request: messages[0].content[1]


class Prompt(Struct, frozen=True):
    """Token ids, and the media whose placeholders are among them, in order."""

    ids: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()

    def place(self, param: str | None) -> str | None:
        """The place in the request of a worker's ``media[2]``; any other param as it is."""
        match = _ITEM.fullmatch(param or "")
        if match is None or int(match[1]) >= len(self.media):
            return param
        return self.media[int(match[1])].place


class PromptProcessor:
    """Builds the prompts of one model. Refuses what the model or its template cannot represent."""

    def __init__(self, model: Model, config: Config) -> None:
        self.tokenizer = tokenizer = Tokenizer(model)
        self._vocabulary = model.vocabulary
        self._context = model.context
        names = read_special_tokens(model.folder)
        self._bos = names.get("bos_token", "")
        chat = _chat_template(model, names, config)
        self._places = places = find_placeholders(model, tokenizer, chat)
        self._template: ChatTemplate | PromptTemplate
        self._tool_template: ChatTemplate | None = None  # for chats with tools
        self._tool_forms = ToolForms()
        if config.prompt_template:
            self._template = PromptTemplate(config.prompt_template, places)
        elif chat is not None:
            self._template = chat
            other = None if config.chat_template else read_tool_template(model.folder)
            self._tool_template = chat if other is None else ChatTemplate(other, names)
            self._tool_forms = find_tool_forms(self._tool_template)
        else:
            raise InvalidConfig(
                f"{model.folder} has no chat template. Give one with --chat-template FILE, or with "
                "--prompt-template, for example 'USER: <prompt> ASSISTANT:'."
            )
        words = {word for place in places.values() for word in (place.word, *place.frame)}
        added = tokenizer.description.added_tokens
        self._media_ids = {id for p in places.values() for id in (p.id, p.written)}
        frames = {token.id for token in added if token.content in words}
        self._chat_escaper = ControlTokenEscaper(
            tokenizer, {*self._media_ids, *frames, *tokenizer.specials.values()}
        )
        self._text_escaper = ControlTokenEscaper(tokenizer, {*self._media_ids, *frames})

    @property
    def describes_tools(self) -> bool:
        """Whether the model's chat template writes the tools of a request."""
        return self._tool_forms.describes

    @property
    def tool_template_source(self) -> str:
        """The chat template for chats with tools; empty if the model has none."""
        return "" if self._tool_template is None else self._tool_template.source

    def uses_variable(self, name: str) -> bool:
        """Whether the model's chat template mentions this name."""
        return isinstance(self._template, ChatTemplate) and name in self._template.source

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse variables that a client must not set."""
        if not isinstance(self._template, ChatTemplate):
            raise UnsupportedParameter(
                "The server's prompt template has no variables.", param="chat_template_kwargs"
            )
        for name in names:
            if name in self._template.reserved:
                raise InvalidValue(
                    f"'{name}' is set by the server.", param=f"chat_template_kwargs.{name}"
                )

    async def chat(self, turns: Sequence[ChatTurn], options: ChatOptions | None = None) -> Prompt:
        """The prompt of /v1/chat/completions, up to where the assistant speaks."""
        texts, media = _contents(turns)
        for place, part in media:
            if part.kind not in self._places:
                raise InvalidValue(f"This model takes no {PLURALS[part.kind]}.", param=place)
        for turn in turns:
            if turn.details is not None:
                texts += turn.details.strings()
        if options is not None:
            texts += options.strings()
        size = sum(map(len, texts)) + TURN_CHARACTERS * (len(turns) + len(texts))
        return await self.tokenizer.run(size, self._chat, turns, texts, media, options)

    async def text(self, prompt: str | Sequence[int]) -> Prompt:
        """The prompt of /v1/completions: text only, taken as it is.

        Control tokens in it are control tokens, since a raw prompt is written with them; but
        placeholders of media stay plain text.
        """
        if not prompt:
            raise InvalidValue("The prompt is empty.", param="prompt")
        if not isinstance(prompt, str):
            return Prompt(self._checked(prompt))
        return Prompt(tuple(await self.tokenizer.run(len(prompt), self._text_ids, prompt)))

    def _text_ids(self, prompt: str) -> list[int]:
        escaper = self._text_escaper
        if not escaper.needs_escaping(prompt):
            return self.tokenizer.ids(prompt, True, self._context)
        mark = escaper.choose_mark((prompt,))
        return escaper.encode(escaper.escape(prompt, mark), mark, True, self._context)

    def _chat(
        self,
        turns: Sequence[ChatTurn],
        texts: Sequence[str],
        media: Sequence[tuple[str, MediaPart]],
        options: ChatOptions | None,
    ) -> Prompt:
        escaper = self._chat_escaper
        mark = escaper.choose_mark(texts) if any(map(escaper.needs_escaping, texts)) else ""
        if options is None:
            text = self._written(turns, media, mark)
        else:
            text = self._written_with(options, turns, media, mark, texts)
        special = self._adds_special(text)
        if mark:
            ids = escaper.encode(text, mark, special, self._context)
        else:
            ids = self.tokenizer.ids(text, special, self._context)
        placed = self._placed(ids, media)
        return Prompt(tuple(ids), placed)

    def _written(
        self, turns: Sequence[ChatTurn], media: Sequence[tuple[str, MediaPart]], mark: str
    ) -> str:
        """The text of the chat, with the mark in everything that could become a control token."""
        _check(turns, self._tool_forms)
        if isinstance(self._template, ChatTemplate):
            return self._template_for(turns).render([self._message(turn, mark) for turn in turns])
        if len(turns) > 1 or turns[0].role != "user":
            raise InvalidValue(
                "The server's prompt template has a place for one message from the user alone: no "
                "system message, and no earlier turns. Send one message.",
                param="messages",
            )
        text = "\n".join(_contents(turns)[0])
        return self._template.render(self._safe(text, mark), [part.kind for _, part in media])

    def _written_with(
        self,
        options: ChatOptions,
        turns: Sequence[ChatTurn],
        media: Sequence[tuple[str, MediaPart]],
        mark: str,
        texts: Sequence[str],
    ) -> str:
        """The same with options, which only a chat template takes."""
        if not isinstance(self._template, ChatTemplate):
            if options.tools or options.continue_last or not options.add_generation_prompt:
                raise UnsupportedParameter(
                    "The server's prompt template has no place for tools, and it always ends with "
                    "the assistant's turn.",
                    param="tools" if options.tools else "continue_final_message",
                )
            return self._written(turns, media, mark)
        _check(turns, self._tool_forms)
        template = self._template_for(turns, bool(options.tools))
        messages = [self._message(turn, mark) for turn in turns]
        end = ""
        if options.continue_last:
            end = self._chat_escaper.choose_mark((*texts, mark))
            _append(messages[-1], end)
        text = template.render(messages, options.template_variables(lambda t: self._safe(t, mark)))
        if not end:
            return text
        if (at := text.rfind(end)) < 0:
            raise InvalidValue(
                "The model's chat template does not write the last message, which is to be "
                "continued.",
                param="continue_final_message",
            )
        return text[:at]

    def _template_for(self, turns: Sequence[ChatTurn], tools: bool = False) -> ChatTemplate:
        """Some models have a template of its own for chats with tools."""
        template = self._template
        assert isinstance(template, ChatTemplate)
        if self._tool_template is None or self._tool_template is template:
            return template
        of_tools = any(
            turn.role == "tool" or (turn.details and turn.details.calls) for turn in turns
        )
        return self._tool_template if tools or of_tools else template

    def _message(self, turn: ChatTurn, mark: str) -> TemplateMessage:
        """A turn in a form that the template can render."""
        template, forms = self._template, self._tool_forms
        assert isinstance(template, ChatTemplate)
        if turn.role == "tool":
            content = self._content(turn.content, forms.result_parts, forms.result_text, mark)
        else:
            content = self._content(turn.content, template.takes_parts, template.takes_text, mark)
        message: TemplateMessage = {"role": turn.role, "content": content}
        if turn.details is not None:
            turn.details.write(message, forms, lambda text: self._safe(text, mark))
        return message

    def _content(
        self, content: str | tuple[PromptPart, ...], takes_parts: bool, takes_text: bool, mark: str
    ) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            text = self._safe(content, mark)
            return text if takes_text else [{"type": "text", "text": text}]
        if takes_parts:
            return [
                {"type": "text", "text": self._safe(part.text, mark)}
                if isinstance(part, TextPart)
                else self._places[part.kind].part
                for part in content
            ]
        return "\n".join(
            [
                self._safe(part.text, mark)
                if isinstance(part, TextPart)
                else self._places[part.kind].whole
                for part in content
            ]
        )

    def _safe(self, text: str, mark: str) -> str:
        return self._chat_escaper.escape(text, mark) if mark else text

    def _adds_special(self, text: str) -> bool:
        """Whether the tokenizer's own <s> is still missing, by the rules of transformers.

        The template of a language model writes its own. Processors of models with media add it
        unless it is there, and a prompt template probably leaves it out.
        """
        if not self._places and isinstance(self._template, ChatTemplate):
            return False
        return not (self._bos and text.startswith(self._bos))

    def _placed(
        self, ids: list[int], media: Sequence[tuple[str, MediaPart]]
    ) -> tuple[PlacedMedia, ...]:
        """Every part beside its placeholder, the n-th of its kind, in the order of the ids.

        A template may order kinds otherwise than the request. The token that it writes for an item
        is replaced by the model's own placeholder.
        """
        if not media and self._media_ids.isdisjoint(ids):
            return ()
        placed: list[PlacedMedia] = []
        for kind, place in self._places.items():
            parts = [one for one in media if one[1].kind == kind]
            if (found := ids.count(place.written)) != len(parts):
                raise InvalidValue(
                    f"The model's template has places for {found} {PLURALS[kind]} here, but the "
                    f"request has {len(parts)}.",
                    param="messages",
                )
            at = -1
            for where, part in parts:
                at = ids.index(place.written, at + 1)
                ids[at] = place.id
                placed.append(PlacedMedia(part, at, where))
        if len(placed) > 1:
            placed.sort(key=lambda one: one.at)
        return tuple(placed)

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise InvalidValue(
                f"The prompt's token ids must be from 0 to {self._vocabulary - 1}.", param="prompt"
            )
        if held := self._media_ids.intersection(ids):
            raise InvalidValue(
                f"The prompt holds {min(held)}, the placeholder of a media item, but none can come "
                "with it. Send media to /v1/chat/completions.",
                param="prompt",
            )
        return tuple(ids)


def _chat_template(model: Model, names: dict[str, str], config: Config) -> ChatTemplate | None:
    """The operator's, or the model's own. None if there is none, or a broken one that
    --prompt-template replaces."""
    if config.chat_template:
        file = Path(config.chat_template)
        if not file.is_file():
            raise InvalidConfig(f"--chat-template {file}: there is no such file.")
        return ChatTemplate(read_template_file(file), names)
    if (source := read_template(model.folder)) is None:
        return None
    with suppress(*((UnsupportedModel,) if config.prompt_template else ())):
        return ChatTemplate(source, names)
    return None


def _check(turns: Sequence[ChatTurn], forms: ToolForms) -> None:
    """Refuse turns that the template does not write: it may leave them out without a word."""
    if not turns:
        raise InvalidValue("There are no messages.", param="messages")
    for i, turn in enumerate(turns):
        if turn.role not in ROLES:  # templates write it among control tokens
            raise InvalidValue(
                f"A role is {', '.join(sorted(ROLES))}, not '{turn.role}'.", param="messages"
            )
        if turn.role == "tool" and not forms.results:
            raise InvalidValue(
                "The model's chat template has no place for results of tools.",
                param=f"messages[{i}].role",
            )
        if turn.details and turn.details.calls and not forms.calls:
            raise InvalidValue(
                "The model's chat template has no place for tool calls.",
                param=f"messages[{i}].tool_calls",
            )


def _append(message: TemplateMessage, end: str) -> None:
    """Add to the text of a message, at its end."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + end
    elif content and content[-1]["type"] == "text":
        content[-1] = content[-1] | {"text": content[-1]["text"] + end}
    else:
        content.append({"type": "text", "text": end})


def _contents(turns: Sequence[ChatTurn]) -> tuple[list[str], list[tuple[str, MediaPart]]]:
    """The texts of all turns, and the media with their places."""
    texts: list[str] = []
    media: list[tuple[str, MediaPart]] = []
    for i, turn in enumerate(turns):
        if isinstance(turn.content, str):
            texts.append(turn.content)
            continue
        for j, part in enumerate(turn.content):
            if isinstance(part, TextPart):
                texts.append(part.text)
            else:
                media.append((f"messages[{i}].content[{j}]", part))
    return texts, media
