"""The turns of a conversation with a model, as messages of the chat API. Sends nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from triptych.commands.client import MediaInput, MessagePart
from triptych.errors import TriptychError, rebuild_error

_PLACE = re.compile(r"messages\[([0-9]+)\]\.content\[([0-9]+)\]")


class Attachment(Struct, frozen=True):
    """A media file that was read once, when it was named: it may change or vanish later."""

    medium: MediaInput
    part: MessagePart

    @classmethod
    def read(cls, medium: MediaInput) -> Attachment:
        """Raises StartError if it is neither a URL nor a readable file."""
        return cls(medium, medium.part())

    def __str__(self) -> str:
        return f"{self.medium.kind} {self.medium.source}"


Content = tuple[str | Attachment, ...]  # of a user's message, in its order


class Turn(Struct, frozen=True):
    content: Content
    answer: str


class Conversation:
    """What was said so far. A question joins it together with its answer."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Turn] = []

    def messages(self, content: Content) -> list[dict[str, Any]]:
        """The messages of a request with the next question."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._said(), {"role": "user", "content": _parts(content)}]

    def _said(self) -> Iterator[dict[str, Any]]:
        for turn in self.turns:
            yield {"role": "user", "content": _parts(turn.content)}
            yield {"role": "assistant", "content": turn.answer}

    def name_file(self, error: TriptychError, content: Content) -> TriptychError:
        """The same error, with the name of the file of this request that the server refuses."""
        place = _PLACE.match(error.param or "")
        if place is None:
            return error
        message, part = int(place[1]), int(place[2])
        number, answered = divmod(message - bool(self.system), 2)
        asked = [*(turn.content for turn in self.turns), content]
        if answered or not 0 <= number < len(asked) or part >= len(asked[number]):
            return error
        named = asked[number][part]
        if isinstance(named, str):
            return error
        text = f"{named.medium.name}: {error.message}"
        return rebuild_error(msgspec.structs.replace(error.failure(), message=text))

    def transcript(self, model: str) -> str:
        """The conversation as Markdown. It names files, and does not contain them."""
        blocks = [f"**system**\n\n{self.system}"] if self.system else []
        for turn in self.turns:
            words = "\n".join(one if isinstance(one, str) else f"[{one}]" for one in turn.content)
            blocks += [f"**you**\n\n{words}", f"**{model}**\n\n{turn.answer.strip()}"]
        return "\n\n".join(blocks) + "\n"


def _parts(content: Sequence[str | Attachment]) -> list[MessagePart]:
    return [{"type": "text", "text": one} if isinstance(one, str) else one.part for one in content]
