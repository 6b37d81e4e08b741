"""Requests of other APIs as chats: what all of them share.

A module for each API builds the ChatRequest of its request with a ``ChatBuilder``, which also keeps
where each part stands in the original: errors name that place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from triptych.api.requests import ChatMessage, ChatRequest

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")


class MessagePlace(Struct, frozen=True):
    """Where a message of the chat stands in the original request, and its parts."""

    message: str
    parts: Sequence[str] = ()


class TranslatedChat(Struct, frozen=True):
    request: ChatRequest
    places: Sequence[MessagePlace]
    names: Mapping[str, str]  # of parameters that the other API calls otherwise

    def place(self, param: str | None) -> str | None:
        """The place in the original request of a parameter of the chat."""
        if param is None:
            return None
        if match := _MESSAGE.match(param):
            place = self.places[int(match[1])]
            at = -1 if match[2] is None else int(match[2])
            return place.parts[at] if 0 <= at < len(place.parts) else place.message
        param = _FUNCTION.sub(r"\1", param)
        for name, other in self.names.items():
            if re.match(rf"{re.escape(name)}(?!\w)", param):
                return other + param[len(name) :]
            if re.match(r"tools\[\d+\]\.", param):
                param = re.sub(rf"\.{re.escape(name)}\b", f".{other}", param, count=1)
        return param


class ChatBuilder:
    """Collects the messages of a chat with their places."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: list[MessagePlace] = []

    def add(self, message: ChatMessage, place: str, parts: Sequence[str] = ()) -> None:
        self.messages.append(message)
        self.places.append(MessagePlace(place, parts))
