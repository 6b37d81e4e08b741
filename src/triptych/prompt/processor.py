"""Chat turns or text to a Prompt: token ids with one placeholder for each media item.

Passes on the sources of media as they are: it fetches and reads nothing. Callers check whether
media are allowed, and whether prompt and answer together fit the context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedModel
from triptych.messages import PLURALS, MediaForm, MediaKind
from triptych.prompt.control_tokens import ControlTokenEscaper
from triptych.prompt.template import (
    ChatTemplate,
    PromptTemplate,
    TemplateMessage,
    find_placeholders,
    read_special_tokens,
    read_template,
)
from triptych.prompt.tokenizer import Tokenizer
from triptych.recipe import MediaOptions

ChatRole = Literal["system", "user", "assistant"]
TURN_CHARACTERS = 16  # rendering a turn takes as long as encoding these
ROLES = frozenset(("system", "user", "assistant"))
_ITEM = re.compile(r"media\[(\d+)\]")

MediaSource = bytes | memoryview | str


class TextPart(Struct, frozen=True):
    text: str


class MediaPart(Struct, frozen=True):
    """An image, a video or a sound: its bytes, or the URL to load them from."""

    kind: MediaKind
    form: MediaForm
    source: MediaSource | None  # None: what the tenant sent before under ``uuid``
    options: MediaOptions | None = None  # how the request wants it prepared
    uuid: str | None = None  # the tenant's own name for it


PromptPart = TextPart | MediaPart


class ChatTurn(Struct, frozen=True):
    """One message of a chat."""

    role: ChatRole
    content: str | tuple[PromptPart, ...]


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
        chat = _chat_template(model, names, config.prompt_template)
        self._places = places = find_placeholders(model, tokenizer, chat)
        self._template: ChatTemplate | PromptTemplate
        if config.prompt_template:
            self._template = PromptTemplate(config.prompt_template, places)
        elif chat is not None:
            self._template = chat
        else:
            raise InvalidConfig(
                f"{model.folder} has no chat template. Give one with --prompt-template, "
                "for example 'USER: <prompt> ASSISTANT:'."
            )
        words = {word for place in places.values() for word in (place.word, *place.frame)}
        added = tokenizer.description.added_tokens
        self._media_ids = {id for p in places.values() for id in (p.id, p.written)}
        frames = {token.id for token in added if token.content in words}
        self._chat_escaper = ControlTokenEscaper(
            tokenizer, {*self._media_ids, *frames, *tokenizer.specials.values()}
        )
        self._text_escaper = ControlTokenEscaper(tokenizer, {*self._media_ids, *frames})

    async def chat(self, turns: Sequence[ChatTurn]) -> Prompt:
        """The prompt of /v1/chat/completions, up to where the assistant speaks."""
        texts, media = _contents(turns)
        for place, part in media:
            if part.kind not in self._places:
                raise InvalidValue(f"This model takes no {PLURALS[part.kind]}.", param=place)
        size = sum(map(len, texts)) + TURN_CHARACTERS * (len(turns) + len(texts))
        return await self.tokenizer.run(size, self._chat, turns, texts, media)

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
    ) -> Prompt:
        escaper = self._chat_escaper
        mark = escaper.choose_mark(texts) if any(map(escaper.needs_escaping, texts)) else ""
        text = self._written(turns, media, mark)
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
        _check(turns)
        if isinstance(self._template, ChatTemplate):
            return self._template.render([self._message(turn, mark) for turn in turns])
        if len(turns) > 1 or turns[0].role != "user":
            raise InvalidValue(
                "The server's prompt template has a place for one message from the user alone: no "
                "system message, and no earlier turns. Send one message.",
                param="messages",
            )
        text = "\n".join(_contents(turns)[0])
        return self._template.render(self._safe(text, mark), [part.kind for _, part in media])

    def _message(self, turn: ChatTurn, mark: str) -> TemplateMessage:
        """A turn in a form that the template can render."""
        template, content = self._template, turn.content
        assert isinstance(template, ChatTemplate)
        if isinstance(content, str):
            text = self._safe(content, mark)
            whole = text if template.takes_text else [{"type": "text", "text": text}]
            return {"role": turn.role, "content": whole}
        if template.takes_parts:
            parts = [
                {"type": "text", "text": self._safe(part.text, mark)}
                if isinstance(part, TextPart)
                else self._places[part.kind].part
                for part in content
            ]
            return {"role": turn.role, "content": parts}
        lines = [
            self._safe(part.text, mark)
            if isinstance(part, TextPart)
            else self._places[part.kind].whole
            for part in content
        ]
        return {"role": turn.role, "content": "\n".join(lines)}

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


def _chat_template(model: Model, names: dict[str, str], prompt: str) -> ChatTemplate | None:
    """The model's own; None if it has none, or a broken one that --prompt-template replaces."""
    if (source := read_template(model.folder)) is None:
        return None
    with suppress(*((UnsupportedModel,) if prompt else ())):
        return ChatTemplate(source, names)
    return None


def _check(turns: Sequence[ChatTurn]) -> None:
    if not turns:
        raise InvalidValue("There are no messages.", param="messages")
    for turn in turns:
        if turn.role not in ROLES:  # templates write it among control tokens
            raise InvalidValue(
                f"A role is {', '.join(sorted(ROLES))}, not '{turn.role}'.", param="messages"
            )


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
