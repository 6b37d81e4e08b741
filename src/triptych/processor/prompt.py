"""Words and media to a Prompt: token ids, one placeholder for each media item.

The media's bytes are handed on as they are, never looked at. Whether media are allowed at all, and
whether prompt and answer together fit the context, is for others to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, InvalidValue, UnsupportedModel
from triptych.messages import MediaItem
from triptych.model import Model
from triptych.processor.guard import Guard
from triptych.processor.template import (
    ChatTemplate,
    Message,
    PromptTemplate,
    read_names,
    read_template,
)
from triptych.processor.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
TURN_CHARACTERS = 16  # a template takes as long for a turn as encoding does for these
ROLES = frozenset(("system", "user", "assistant"))
_PLACEHOLDERS = tuple(
    f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index")
)


class TextPart(Struct, frozen=True):
    text: str


class ImagePart(Struct, frozen=True):
    data: bytes | memoryview  # of a JPEG, PNG or WebP file


Part = TextPart | ImagePart


class Turn(Struct, frozen=True):
    """One message of a chat."""

    role: Role
    content: str | tuple[Part, ...]


class Prompt(Struct, frozen=True):
    """What a model is asked: ids, and the media whose placeholders stand among them."""

    ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()


class Processor:
    """Makes prompts for one model. What the model or the template cannot do is refused."""

    def __init__(self, model: Model, config: Config) -> None:
        self.tokenizer = tokenizer = Tokenizer(model)
        self._vocabulary = model.vocabulary
        self._context = model.context
        self._image_id = model.image_id
        self._picture = self._word(model.image_id)
        if model.image_id is not None and not self._picture:
            raise UnsupportedModel(
                f"config.json says that {model.image_id} is the placeholder of an image, but the "
                "tokenizer has no such token"
            )
        media_ids = {id for key in _PLACEHOLDERS if isinstance(id := model.config.get(key), int)}
        self._chat_guard = Guard(tokenizer, media_ids.union(tokenizer.specials.values()))
        self._text_guard = Guard(tokenizer, media_ids)
        names = read_names(model.folder)
        self._bos = names.get("bos_token", "")
        self._template: ChatTemplate | PromptTemplate
        if config.prompt_template:
            frame = (
                self._word(model.config.get("vision_start_token_id")),
                self._word(model.config.get("vision_end_token_id")),
            )
            self._template = PromptTemplate(config.prompt_template, self._picture, frame)
        elif (source := read_template(model.folder)) is not None:
            self._template = ChatTemplate(source, names)
        else:
            raise InvalidConfig(
                f"{model.folder} has no chat template. Give one with --prompt-template, "
                "for example 'USER: <prompt> ASSISTANT:'."
            )

    async def chat(self, turns: Sequence[Turn]) -> Prompt:
        """The prompt of /v1/chat/completions, up to where the assistant speaks."""
        texts, images = _contents(turns)
        if images and self._image_id is None:
            raise InvalidValue("This model takes no images.", param="messages")
        size = sum(map(len, texts)) + TURN_CHARACTERS * (len(turns) + len(texts))
        ids = await self.tokenizer.work(size, self._chat_ids, turns, texts, len(images))
        return Prompt(tuple(ids), self._placed(ids, images))

    async def text(self, prompt: str | Sequence[int]) -> Prompt:
        """The prompt of /v1/completions: text only, taken as it is.

        Control tokens in it mean what they say, since whoever writes a raw prompt writes those too;
        but placeholders of media stay plain text.
        """
        if not prompt:
            raise InvalidValue("The prompt is empty.", param="prompt")
        if not isinstance(prompt, str):
            return Prompt(self._checked(prompt))
        return Prompt(tuple(await self.tokenizer.work(len(prompt), self._text_ids, prompt)))

    def _text_ids(self, prompt: str) -> list[int]:
        guard = self._text_guard
        if not guard.touches(prompt):
            return self.tokenizer.ids(prompt, True, self._context)
        mark = guard.mark_for((prompt,))
        return guard.encode(guard.marked(prompt, mark), mark, True, self._context)

    def _chat_ids(self, turns: Sequence[Turn], texts: Sequence[str], images: int) -> list[int]:
        guard = self._chat_guard
        mark = guard.mark_for(texts) if any(map(guard.touches, texts)) else ""
        text = self._written(turns, images, mark)
        special = self._adds_special(text)
        if mark:
            return guard.encode(text, mark, special, self._context)
        return self.tokenizer.ids(text, special, self._context)

    def _written(self, turns: Sequence[Turn], images: int, mark: str) -> str:
        """The text of the chat, with the mark in whatever might be taken for a control token."""
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
        return self._template.render(self._safe(text, mark), images)

    def _message(self, turn: Turn, mark: str) -> Message:
        """A turn in a form that the template understands."""
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
                else {"type": "image"}
                for part in content
            ]
            return {"role": turn.role, "content": parts}
        lines = [
            self._safe(part.text, mark) if isinstance(part, TextPart) else self._picture
            for part in content
        ]
        return {"role": turn.role, "content": "\n".join(lines)}

    def _safe(self, text: str, mark: str) -> str:
        return self._chat_guard.marked(text, mark) if mark else text

    def _adds_special(self, text: str) -> bool:
        """Whether the tokenizer's own <s> is still missing, by the rules of transformers.

        The template of a language model writes its own. Processors of models with media add it
        unless it stands there already, and a prompt template is likely to leave it out.
        """
        if self._image_id is None and isinstance(self._template, ChatTemplate):
            return False
        return not (self._bos and text.startswith(self._bos))

    def _placed(self, ids: list[int], images: list[ImagePart]) -> tuple[MediaItem, ...]:
        if self._image_id is None:
            return ()
        if (found := ids.count(self._image_id)) != len(images):
            raise InvalidValue(
                f"The model's template has places for {found} images here, but the request has "
                f"{len(images)}.",
                param="messages",
            )
        media = []
        at = -1
        for image in images:
            at = ids.index(self._image_id, at + 1)
            media.append(MediaItem("image", at, image.data))
        return tuple(media)

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise InvalidValue(
                f"The prompt's token ids must be from 0 to {self._vocabulary - 1}.", param="prompt"
            )
        if self._image_id is not None and self._image_id in ids:
            raise InvalidValue(
                f"The prompt holds {self._image_id}, the placeholder of an image, but no image can "
                "come with it. Send images to /v1/chat/completions.",
                param="prompt",
            )
        return tuple(ids)

    def _word(self, id: int | None) -> str:
        return "" if id is None else self.tokenizer.library.id_to_token(id) or ""


def _check(turns: Sequence[Turn]) -> None:
    if not turns:
        raise InvalidValue("There are no messages.", param="messages")
    for turn in turns:
        if turn.role not in ROLES:  # templates write it among control tokens
            raise InvalidValue(
                f"A role is {', '.join(sorted(ROLES))}, not '{turn.role}'.", param="messages"
            )


def _contents(turns: Sequence[Turn]) -> tuple[list[str], list[ImagePart]]:
    texts: list[str] = []
    images: list[ImagePart] = []
    for turn in turns:
        if isinstance(turn.content, str):
            texts.append(turn.content)
            continue
        for part in turn.content:
            if isinstance(part, TextPart):
                texts.append(part.text)
            else:
                images.append(part)
    return texts, images
