"""The packaged examples: held-out media with true answers, picked to be shown.

The demonstration model never saw these renderings and never heard these voices (of the fox, it
learned the emoji itself). ``models/demo/examples.py`` makes them. Beside each file lies what a
terminal shows of it, so that whoever shows them need decode nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from triptych.commands.client import MediaInput
from triptych.commands.show.small import Thumbnail
from triptych.messages import MediaKind

FOLDER = Path(__file__).parents[1] / "assets" / "examples"


class Item(Struct, frozen=True):
    """One picture, clip or sound."""

    kind: MediaKind
    file: str  # name below FOLDER
    about: str  # for those who can't see or hear it
    small: Thumbnail

    def medium(self) -> MediaInput:
        return MediaInput(self.kind, str(FOLDER / self.file))


class Example(Struct, frozen=True):
    """A question. What decides are the words ``truth``, in their order, among ``choices``."""

    question: str
    truth: tuple[str, ...]
    choices: tuple[str, ...]  # in small letters
    media: tuple[Item, ...]

    def right(self, answer: str) -> bool:
        longest_first = sorted(self.choices, key=len, reverse=True)  # a light is no light bulb
        names = "|".join(map(re.escape, longest_first))
        return tuple(re.findall(rf"\b(?:{names})\b", answer.lower())) == self.truth


def examples() -> tuple[Example, ...]:
    return msgspec.json.decode((FOLDER / "examples.json").read_bytes(), type=tuple[Example, ...])
